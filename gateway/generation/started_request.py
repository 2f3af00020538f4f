"""A started request, as a dialect reads it: its result as a whole, or its events as they happen."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.generation.fanout import Fanout
from gateway.generation.request import RequestContext
from gateway.generation.selection import SelectionPolicy, SelectionResult
from gateway.generation.suggestions import Output, suggest


class StartedRequest:
    """A request whose branches run. It is read once, by `result` or by `events`.

    Attributes:
        context: its spec, and its state while it is processed.
    """

    def __init__(self, context: RequestContext, fanout: Fanout, policy: SelectionPolicy) -> None:
        self.context = context
        self._fanout = fanout
        self._policy = policy

    def events(self) -> Iterator[Output]:
        """As `suggest` yields them: the result is the last.

        Raises:
            TercetError: the reason of a cancellation.
        """
        return suggest(self.context, self._fanout, self._policy)

    def result(self) -> SelectionResult:
        """Wait for the result, until the deadline at the latest.

        Raises:
            TercetError: the reason of a cancellation.
        """
        for event in self.events():
            if isinstance(event, SelectionResult):
                return event
        raise AssertionError("The result is the last event.")
