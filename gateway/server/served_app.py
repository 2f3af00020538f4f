"""What the HTTP server needs of the WSGI app that it serves."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from gateway.server.request_parser import RequestHead
from shared.api_keys import ApiKey
from shared.errors import TercetError

# Of the WSGI environment: what the app has said of the request's head.
ARRIVAL = "tercet.arrival"


class Work(enum.Enum):
    """Classes of requests, by what they need; each has threads and a queue of its own. `PIPELINED`: it was sent before
    the response to the last one was complete. `REFUSED`: by its head; the thread that leads answers it."""

    COMPLETIONS = enum.auto()
    TOKENIZING = enum.auto()
    JOBS = enum.auto()
    READS = enum.auto()
    HEALTH = enum.auto()
    PIPELINED = enum.auto()
    REFUSED = enum.auto()


class Arrival(NamedTuple):
    """What is known of a request from its head.

    Attributes:
        owner: id of its API key, without one the client's address ("": a Unix socket).
        weight: what a byte of its body costs, in bytes of a completion.
        refusal: the error with which the app answers it, without its body.
    """

    work: Work
    owner: str
    key: ApiKey | None = None
    weight: int = 1
    refusal: TercetError | None = None


class ServedApp(Protocol):
    """The app, from its server's side. All methods may be called from any thread."""

    def __call__(self, env: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request, as WSGI defines it."""

    def admit(self, head: RequestHead, client: object) -> Arrival:
        """Judge a request by its head, before its body is read. Does not block. A body of known length is charged.

        Args:
            client: address as of `socket`; that of a Unix socket is no tuple.
        """

    def refuse(self, head: RequestHead, refusal: TercetError, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request with an error, as `__call__` would, and also what is no request. Does not block."""

    def charge(self, arrival: Arrival, num_bytes: int) -> None:
        """Charge the owner for bytes of a body in chunks that have been read. Does not block.

        Raises:
            QuotaExceeded: the owner may send no more now; the request is to be refused.
        """

    @property
    def has_warm_slot(self) -> bool:
        """Whether any slot can compute."""

    @property
    def num_arrived(self) -> int:
        """Completion requests since the start."""

    @property
    def is_computing(self) -> bool:
        """Whether completions are being computed or wait as jobs."""

    def watch_server(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        """Export gauges of the server: text and function by name."""

    def begin_stop(self, *, is_replaced: bool) -> None:
        """Return running jobs to their queue, and turn readiness off.

        Args:
            is_replaced: a successor serves in place of this process, so the server stays ready.
        """

    def cancel_all(self, error: TercetError) -> None:
        """End all completions with this error, those that arrive later included."""

    def end_stop(self, timeout_s: float) -> None:
        """Wait until the jobs are returned."""
