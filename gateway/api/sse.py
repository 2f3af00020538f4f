"""Server-sent events: an answer while it is being made.

`token` (branch, text), `sentence` (a branch's text is whole), `done` (the answer as it would have come at once)
or `error` (a problem, as it would have been answered). The format is WHATWG's, HTML § 9.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import structlog

from shared.errors import TercetError

CONTENT_TYPE = "text/event-stream"
# nginx passes on at once what has the first; nobody keeps what has the second.
HEADERS = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
log = structlog.get_logger()
_encode = msgspec.json.Encoder().encode


def event(name: str, data: bytes) -> bytes:
    """One event. JSON has no line ends of its own, so its data is one line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class EventStream:
    """A WSGI body. `close`, which the server calls whatever happens, also before the first event, ends the work."""

    def __init__(self, events: Iterator[tuple[str, object]], request_id: str, close: Callable[[], None]) -> None:
        """
        Args:
            events: name and data of each; may raise.
        """
        self._events = events
        self._request_id = request_id
        self._close = close

    def __iter__(self) -> Iterator[bytes]:
        try:
            for name, data in self._events:
                yield event(name, _encode(data))
        except TercetError as error:
            yield event("error", error.problem(self._request_id))
        except Exception as error:  # the answer has begun: only here can the reader be told
            log.error("unhandled_exception", request_id=self._request_id, exc_info=error)
            told = TercetError(f"The server's log has the reason, under request {self._request_id}.")
            yield event("error", told.problem(self._request_id))

    def close(self) -> None:
        self._close()
