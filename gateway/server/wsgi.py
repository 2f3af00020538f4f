"""WSGI (PEP 3333): a request's environment, and responses in HTTP/1.1, also errors that the app does not see.

Knows neither connections nor what is served.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_to_bytes

from gateway.server.request_parser import Request, RequestHead

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
        "PATH_INFO": decode_path(path),
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


def decode_path(path: str) -> str:
    """A path without its percent signs, as WSGI has it: bytes as Latin-1."""
    return unquote_to_bytes(path).decode("latin-1") if "%" in path else path


class ResponseWriter:
    """Writes one response.

    Attributes:
        has_begun: some of it was sent.
        keeps_connection: the connection may carry another one.
    """

    def __init__(self, send: Callable[[bytes], None], head: RequestHead, *, keeps_connection: bool) -> None:
        """
        Args:
            head: of the request.
        """
        self.has_begun = False
        self.keeps_connection = keeps_connection
        self._send = send
        self._is_head_only = head.method == "HEAD"
        self._is_http_1_0 = head.version == "HTTP/1.0"
        self._head = b""  # sent with the first bytes of the body
        self._is_chunked = False
        self._num_missing_bytes: int | None = None  # of the body; None: it has no length

    def respond(self, answer: Callable[[Callable[..., Any]], Iterable[bytes]]) -> None:
        """Send what an app, given its environment, answers. A response that is shorter than its length ends the
        connection.

        Raises:
            Exception: the app's. If the response has begun, only the end of the connection shows that it is incomplete.
        """
        body = answer(self.start_response)
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


@lru_cache(maxsize=2)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
