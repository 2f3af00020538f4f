"""What the HTTP server needs of the WSGI app that it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from gateway.server.request_parser import RequestHead
from gateway.server.work import Work
from shared.errors import TercetError


class ServedApp(Protocol):
    """The app, from its server's side. All methods may be called from any thread."""

    def __call__(self, env: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer one request, as WSGI defines it."""

    def classify(self, head: RequestHead) -> tuple[Work, str]:
        """Return the class of a complete request, and what distinguishes its owner."""

    def find_early_refusal(self, head: RequestHead) -> TercetError | None:
        """Return the error that answers the complete request with this head now. None: the app answers it."""

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

    def count_refused_connection(self, code: str) -> None:
        """Count a connection that the server refused, by error code."""

    def count_unparsed_request(self, status: int) -> None:
        """Count a request that the server answered with an error because it could not be parsed."""

    def begin_stop(self, *, is_replaced: bool) -> None:
        """Return running jobs to their queue, and turn readiness off.

        Args:
            is_replaced: a successor serves in place of this process, so the server stays ready.
        """

    def cancel_all(self, error: TercetError) -> None:
        """End all completions with this error, those that arrive later included."""

    def end_stop(self, timeout_s: float) -> None:
        """Wait until the jobs are returned."""
