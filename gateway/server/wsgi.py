"""WSGI (PEP 3333): a request's environment, and responses in HTTP/1.1, also errors that the app does not see.

Knows neither connections nor what is served.
"""

from __future__ import annotations

import io
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

from gateway.server.request_parser import Request
from shared.errors import PROBLEM_JSON, TercetError

Headers = Iterable[tuple[str, str]]


def make_environ(request: Request, scheme: str, sock: object, client: Any, server: Any) -> dict[str, Any]:
    """The environment of a request.

    Args:
        scheme: "http" or "https".
        sock: its client's socket, by which the app sees that the client is gone.
        client, server: addresses as of `socket`; those of Unix sockets are not tuples.
    """
    head, path = request.head, request.head.path
    remote = client if isinstance(client, tuple) else ("", "")
    local = server if isinstance(server, tuple) else ("localhost", "")
    return {
        **head.fields,
        "gunicorn.socket": sock,
        "wsgi.errors": sys.stderr,
        "wsgi.input": io.BytesIO(request.body),  # which reading does not copy
        "wsgi.input_terminated": True,
        "wsgi.multiprocess": False,
        "wsgi.multithread": True,
        "wsgi.run_once": False,
        "wsgi.url_scheme": scheme,
        "wsgi.version": (1, 0),
        "PATH_INFO": unquote_to_bytes(path).decode("latin-1") if "%" in path else path,
        "QUERY_STRING": head.query,
        "RAW_URI": head.target,
        "REMOTE_ADDR": remote[0],
        "REMOTE_PORT": str(remote[1]),
        "REQUEST_METHOD": head.method,
        "SCRIPT_NAME": "",
        "SERVER_NAME": local[0],
        "SERVER_PORT": str(local[1]),
        "SERVER_PROTOCOL": head.version,
        "SERVER_SOFTWARE": "gunicorn",
    }


class ResponseWriter:
    """Writes one response.

    Attributes:
        has_begun: some of it was sent.
        keeps_connection: the connection may carry another one.
    """

    def __init__(self, send: Callable[[bytes], None], request: Request, *, keeps_connection: bool) -> None:
        self.has_begun = False
        self.keeps_connection = keeps_connection
        self._send = send
        self._is_head_only = request.head.method == "HEAD"
        self._is_http_1_0 = request.head.version == "HTTP/1.0"
        self._head = b""  # sent with the first bytes of the body
        self._is_chunked = False
        self._num_missing_bytes: int | None = None  # of the body; None: it has no length

    def respond(self, app: Callable[..., Iterable[bytes]], environ: dict[str, Any]) -> None:
        """Send what the app answers. A response that is shorter than its length ends the connection.

        Raises:
            Exception: the app's. If the response has begun, only the end of the connection shows that it is incomplete.
        """
        body = app(environ, self.start_response)
        try:
            for part in body:
                self.write(part)
            if self._is_chunked or not self.has_begun:
                self._send_after_head(b"0\r\n\r\n" if self._is_chunked else b"")
            self.keeps_connection &= not self._num_missing_bytes
        finally:
            if hasattr(body, "close"):
                body.close()

    def start_response(self, status: str, headers: Headers, exc_info: Any = None) -> Callable[[bytes], None]:
        """
        Raises:
            ValueError: as of `encode_head`.
        """
        if exc_info is not None and self.has_begun:
            raise exc_info[1]
        for name, value in headers:
            if name.lower() == "content-length":
                self._num_missing_bytes = int(value)
        if status.startswith(("1", "204")):  # they have no body, and so no length (RFC 9110, § 8.6)
            headers = [header for header in headers if header[0].lower() != "content-length"]
        if self._is_head_only or status.startswith(("1", "204", "304")):
            self._num_missing_bytes = 0
        if self._num_missing_bytes is None:
            self._is_chunked = not self._is_http_1_0
            self.keeps_connection &= self._is_chunked
        self._head = encode_head(status, headers, keeps_connection=self.keeps_connection, is_chunked=self._is_chunked)
        return self.write

    def write(self, data: bytes) -> None:
        """Send some of the body, and before its first bytes the head. What is longer than the length is cut off."""
        if self._num_missing_bytes is not None:
            data = data[: self._num_missing_bytes]
            self._num_missing_bytes -= len(data)
        if data:
            self._send_after_head(b"%x\r\n%s\r\n" % (len(data), data) if self._is_chunked else data)

    def _send_after_head(self, data: bytes) -> None:
        head, self._head = self._head, b""
        self.has_begun = True
        self._send(head + data)


def encode_head(status: str, headers: Headers, *, keeps_connection: bool, is_chunked: bool = False) -> bytes:
    """
    Raises:
        ValueError: a header contains a line break, which would start another header, or is not Latin-1.
    """
    lines = [
        f"HTTP/1.1 {status}",
        "Server: gunicorn",
        f"Date: {_date(int(time.time()))}",
        "Connection: keep-alive" if keeps_connection else "Connection: close",
        *(["Transfer-Encoding: chunked"] if is_chunked else []),
        *[f"{name}: {value}" for name, value in headers],
        "\r\n",
    ]
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) or head.count("\r") != len(lines):
        raise ValueError("A header contains a line break.")
    return head.encode("latin-1")


def encode_error(error: TercetError, headers: Headers = ()) -> bytes:
    """An error response with a request id of its own.

    Args:
        headers: further headers, besides the error's own.
    """
    identifier = secrets.token_hex(8)
    body = error.problem(identifier)
    own = {"Content-Type": PROBLEM_JSON, "Content-Length": str(len(body)), "X-Request-Id": identifier} | error.headers
    head = encode_head(f"{error.status} {error.title}", [*own.items(), *headers], keeps_connection=False)
    return head + body


def refuse_at_once(sock: socket.socket, error: TercetError) -> None:
    """Send what the socket takes at once, and close it. Over TLS the client sees a failed handshake."""
    with suppress(OSError):
        sock.setblocking(False)
        sock.send(encode_error(error))
    sock.close()


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
