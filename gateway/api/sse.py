"""Server-sent events (WHATWG HTML, § 9.2): encodes events and ends the request with its stream.

An `/autocomplete` stream has `token` events (branch, text), `sentence` events (a branch's suggestion), and last either
`done` (the whole answer, as without streaming) or `error` (problem details, as in an error response). Other dialects
have events without a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import falcon
import msgspec
import structlog

from gateway.api.error_formats import ErrorFormat
from shared.errors import TercetError, internal_error

CONTENT_TYPE = "text/event-stream"
# The first turns off nginx's buffering for this response, the second every cache, and compression by a proxy or a
# middleware, which holds events back until a block is full (RFC 9111, § 5.2.2.6).
HEADERS = {"X-Accel-Buffering": "no", "Cache-Control": "no-store, no-transform"}
log = structlog.get_logger()
_encode = msgspec.json.Encoder().encode


def event(name: str | None, data: object) -> bytes:
    """An event, encoded. Its data is JSON, which contains no line end, so it is a single line."""
    line = b"data: %s\n\n" % _encode(data)
    return line if name is None else b"event: %s\n%s" % (name.encode(), line)


def begun(events: Iterator[bytes]) -> Iterator[bytes]:
    """The events, once there is a first one: what is raised before it can still have a status of its own."""
    return chain([next(events)], events)


def stream(
    resp: falcon.Response,
    events: Iterator[bytes],
    error_format: ErrorFormat,
    request_id: str,
    close: Callable[[], None],
) -> None:
    """Answer with events.

    Args:
        events: encoded; may raise.
        close: ends the request's work.
    """
    resp.content_type = CONTENT_TYPE
    resp.set_headers(HEADERS)
    resp.stream = EventStream(events, error_format, request_id, close)


@dataclass(slots=True)
class EventStream:
    """A WSGI response body of events. An error becomes its last event, in the dialect's format.

    Attributes:
        events: encoded; may raise.
        close: ends the request. The WSGI server calls this in every case, even if it sent no event.
    """

    events: Iterator[bytes]
    error_format: ErrorFormat
    request_id: str
    close: Callable[[], None]

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self.events
        except TercetError as error:
            yield self.error_format.event(error, self.request_id)
        except Exception as error:  # the response has begun, so the error handlers cannot answer
            log.error("unhandled_exception", request_id=self.request_id, exc_info=error)
            yield self.error_format.event(internal_error(self.request_id), self.request_id)
