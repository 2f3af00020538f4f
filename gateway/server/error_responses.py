"""Error responses that the gateway's worker sends by itself, without a thread and without the app.

Knows HTTP/1.1 and the error classes, not why a request is refused.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from contextlib import suppress

from shared.errors import PROBLEM_JSON, TercetError
from shared.telemetry import request_id


def encode_error(
    error: TercetError, *, keeps_connection: bool = False, headers: Iterable[tuple[str, str]] = ()
) -> bytes:
    """An error response with a request id of its own.

    Args:
        headers: further headers, besides the error's own.
    """
    identifier = request_id(None)
    body = error.problem(identifier)
    head = [
        f"HTTP/1.1 {error.status} {error.title}",
        f"Content-Type: {PROBLEM_JSON}",
        f"Content-Length: {len(body)}",
        f"X-Request-Id: {identifier}",
        f"Connection: {'keep-alive' if keeps_connection else 'close'}",
        *(f"{name}: {value}" for name, value in (*error.headers.items(), *headers)),
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def send_once(sock: socket.socket, data: bytes) -> None:
    """Send what the socket takes at once. Over TLS the client sees a failed handshake."""
    with suppress(OSError):
        sock.setblocking(False)
        sock.send(data)
