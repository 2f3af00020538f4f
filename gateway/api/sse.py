"""Server-sent events (WHATWG HTML, § 9.2): encodes events and ends the request with its stream.

An `/autocomplete` stream has `token` events (branch, text), `sentence` events (a branch's suggestion), and last either
`done` (the whole answer, as without streaming) or `error` (problem details, as in an error response).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import structlog

from shared.errors import TercetError, internal_error

CONTENT_TYPE = "text/event-stream"
# The first turns off nginx's buffering for this response, the second every cache.
HEADERS = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
log = structlog.get_logger()
_encode = msgspec.json.Encoder().encode


def event(name: str, data: bytes) -> bytes:
    """An event, encoded. `data` is JSON, which contains no line end, so it is a single line."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)


class EventStream:
    """A WSGI response body of events. Errors become its last event."""

    def __init__(self, events: Iterator[tuple[str, object]], request_id: str, close: Callable[[], None]) -> None:
        """
        Args:
            events: name and data of each; may raise.
            close: ends the request's work.
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
        except Exception as error:  # the response has begun, so the error handlers cannot answer
            log.error("unhandled_exception", request_id=self._request_id, exc_info=error)
            yield event("error", internal_error(self._request_id).problem(self._request_id))

    def close(self) -> None:
        """End the request. The WSGI server calls this in every case, even if it sent no event."""
        self._close()
