"""From a started request to its suggestions: text deltas, selected suggestions, and replacements for rejected ones.

The same events serve a streamed response and a whole one. Knows no dialect.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from gateway.generation.fanout import Fanout
from gateway.generation.request import BranchFailure, BranchOutcome, BranchResult, RequestContext, TextDelta
from gateway.generation.selection import (
    Selection,
    SelectionPolicy,
    SelectionResult,
    Suggestion,
    deadline_failure,
    trim_completion,
)
from gateway.generation.trimming import Trimmer

# Replacement branches per wanted suggestion: with more, a model that still repeats itself would keep doing so.
MAX_TOP_UPS = 2


def suggest(
    context: RequestContext, fanout: Fanout, policy: SelectionPolicy
) -> Iterator[TextDelta | Suggestion | SelectionResult]:
    """Events of a request whose first branches are started.

    Yields:
        Text deltas, trimmed: a branch's deltas are a beginning of its suggestion's text. Suggestions, as they are
        selected. `SelectionResult` last, at the deadline at the latest.

    Raises:
        TercetError: the reason of a cancellation.
    """
    selection = Selection(policy)
    streams: dict[int, _BranchStream] = {}
    num_branches = policy.num_suggestions
    unfinished = set(range(num_branches))
    while unfinished and (event := context.next_event()) is not None:
        if isinstance(event, TextDelta):
            stream = streams.setdefault(event.branch, _BranchStream(policy))
            if text := stream.feed(event):
                yield TextDelta(event.branch, (text,))
            continue
        unfinished.remove(event.branch)
        if not unfinished and context.first_outcomes_at is None:
            context.first_outcomes_at = time.monotonic()
        if isinstance(event, BranchResult) and context.spec.is_streamed:
            event, text = streams.setdefault(event.branch, _BranchStream(policy)).finish(event)
            if text:
                yield TextDelta(event.branch, (text,))
        yield from selection.add(event)
        num_missing = min(selection.num_missing, (1 + MAX_TOP_UPS) * policy.num_suggestions - num_branches)
        if not unfinished and num_missing > 0 and not context.is_over:
            replacements = range(num_branches, num_branches + num_missing)
            fanout.top_up(context, replacements)
            unfinished.update(replacements)
            num_branches += num_missing
            context.num_top_ups += num_missing
    context.cancel()
    if context.cancel_reason is not None:
        raise context.cancel_reason
    for branch in sorted(unfinished):
        yield from selection.add(deadline_failure(branch))
    yield selection.result()


class _BranchStream:
    """The trimmed text of a branch that has been sent to the client."""

    __slots__ = ("_attempt", "_policy", "_sent", "_trimmer")

    def __init__(self, policy: SelectionPolicy) -> None:
        self._policy = policy
        self._attempt = 0
        self._trimmer = self._new_trimmer()
        self._sent = ""

    def feed(self, delta: TextDelta) -> str:
        """The text to send after this delta. A retry sends nothing until it is past what was sent before."""
        if delta.attempt != self._attempt:
            self._attempt = delta.attempt
            self._trimmer = self._new_trimmer()
        for text in delta.texts:
            self._trimmer.feed(text)
        return self._advance(self._trimmer.text)

    def finish(self, result: BranchResult) -> tuple[BranchOutcome, str]:
        """The branch's outcome, and the rest of its text to send.

        Sent text cannot be taken back: if a retry's text differs from it, the branch has failed. GPUs round differently
        in batches of different sizes, so a retry there may draw other tokens.
        """
        text = trim_completion(result.done, self._policy)
        if not text.startswith(self._sent):
            return BranchFailure(result.branch, "diverged", "Its retry gave a different text."), ""
        return result, self._advance(text)

    def _new_trimmer(self) -> Trimmer:
        return Trimmer(self._policy.length, keeps_partial_word=self._policy.keeps_greedy_text)

    def _advance(self, text: str) -> str:
        if not text.startswith(self._sent):
            return ""
        new = text[len(self._sent) :]
        self._sent = text
        return new
