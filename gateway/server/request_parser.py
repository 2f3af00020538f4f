"""Reads requests of HTTP/1.1 and 1.0 from the bytes that a client sends. Knows neither sockets nor routes.

llhttp judges the fields of a head and decodes bodies in chunks. Its defaults refuse what two readers could frame in two
ways: two lengths, a length with chunks, folded lines, bare line feeds, a space before the colon, sizes that are not
digits. Named checks refuse what it admits. It gets no byte behind the end of a request, because it would read on there:
a head ends with the first empty line, a body of known length is not parsed, and chunks are passed on in pieces that end
wherever the body may end.
"""

from __future__ import annotations

import io
import re
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import httptools

from shared.errors import HeadersTooLarge, MalformedRequest, UrlTooLong

# Of the request line, without its end.
MAX_LINE_BYTES = 4094
MAX_FIELDS = 1000
# Of all fields, with the ends of their lines.
MAX_FIELDS_BYTES = 64 << 10
MAX_HEAD_BYTES = MAX_LINE_BYTES + MAX_FIELDS_BYTES + 4
# Sizes, extensions and trailers of chunks cost time. They may have the first number of bytes, and the second for each
# byte of the body; and in all no more than a body may have and the third.
MIN_CHUNK_LINES_BYTES, CHUNK_LINES_PER_BYTE, MAX_CHUNK_LINES_BYTES = 4096, 16, 256 << 10
# The longest part of a body in chunks that is parsed at once.
_PIECE_BYTES = 4096

_END = b"\r\n\r\n"
_ORIGIN = re.compile(rb"\r\norigin:[ \t]*([!-~]+)[ \t]*(?=\r\n)", re.IGNORECASE)
# One space between its parts, no fragment, and nothing but printable ASCII.
_LINE = re.compile(r'([A-Z-]+) ([!"$-~]+) (HTTP/1\.[01])')
_ABSOLUTE = re.compile(r"https?://([^/?]+)([^?]*)\??(.*)", re.IGNORECASE)
# Fields whose values cannot be joined where they are repeated (RFC 9110, § 5.3).
_SINGLE = frozenset({"HTTP_HOST", "CONTENT_TYPE"})
_CHUNKED_HEAD = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
_MALFORMED_HEAD = "The request line or a header field is not valid HTTP/1.1."
_MALFORMED_CODING = "Transfer-Encoding must be `chunked` alone, once, and without a Content-Length, in HTTP/1.1."
_MALFORMED_CHUNKS = "The body is not in chunks as its Transfer-Encoding says, or a trailer is not a valid header field."
_LONG_CHUNK_LINES = "The chunks' sizes, extensions and trailers are too long: send larger chunks."


class RequestHead(NamedTuple):
    """A head that was read.

    Attributes:
        raw: its bytes.
        target: as it was sent. `path` and `query` are its parts, not decoded.
        fields: by the names that WSGI has for them, like `HTTP_X_REQUEST_ID` and `CONTENT_TYPE`. Values of a repeated
            field are joined by commas. A name with an underscore is dropped: WSGI cannot tell it from a hyphen.
        content_length: None for a body in chunks.
        keeps_connection: the client may send another request.
    """

    raw: bytes
    method: str
    target: str
    path: str
    query: str
    version: str
    fields: dict[str, str]
    content_length: int | None
    keeps_connection: bool


NO_HEAD = RequestHead(b"", "", "", "", "", "HTTP/1.1", {}, 0, keeps_connection=False)


class Request(NamedTuple):
    """A complete request. A body that is too long is left out; `CONTENT_LENGTH` in the fields of its head says so."""

    head: RequestHead
    body: bytes
    keeps_connection: bool


class RequestParser:
    """The bytes of one connection, as one request after another.

    Attributes:
        head: of the request that arrives or is complete. None until all of it has arrived.
    """

    def __init__(self, max_body_bytes: int) -> None:
        """
        Args:
            max_body_bytes: of a longer body no more is read: the request is complete, and the connection ends.
        """
        self.head: RequestHead | None = None
        self._max_body_bytes = max_body_bytes
        self._received = bytearray()  # of a head or of chunks, or behind the request
        self._searched = 0  # bytes of it in which no head ends
        self._body = io.BytesIO()  # which grows without a copy, and gives its bytes without one
        self._body_length = 0  # of the request with this head; 0 if it is in chunks
        self._is_too_long = False  # its body
        self._chunks: _ChunkedBody | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        in_head = 0 if self.head is None else len(self.head.raw)
        return in_head + len(self._received) + self._body.tell()

    @property
    def num_received_bytes(self) -> int:
        """Bytes behind the head that were not decoded yet."""
        return len(self._received)

    @property
    def is_chunked(self) -> bool:
        """Whether the body arrives in chunks."""
        return self._chunks is not None

    @property
    def answered_head(self) -> RequestHead:
        """What the answer to an error needs of a head: of one that is not complete or not valid, its origin."""
        if self.head is not None:
            return self.head
        found = _ORIGIN.findall(bytes(self._received[:MAX_HEAD_BYTES]).partition(_END)[0] + b"\r\n")
        return NO_HEAD._replace(fields={"HTTP_ORIGIN": found[0].decode("ascii")} if len(found) == 1 else {})

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits before it sends the body. HTTP/1.0 has no such answer (RFC 9110, § 10.1.1)."""
        if self.head is None or self._received or self._body.tell():
            return False
        return "HTTP_EXPECT" in self.head.fields and self.head.version != "HTTP/1.0"

    def clear(self) -> None:
        """Forget all that has arrived."""
        self._received = bytearray()
        self._forget_request()

    def advance(self, data: bytes = b"") -> bool:
        """Read on in what has arrived, and in this. Returns whether a request is complete.

        Raises:
            MalformedRequest, UrlTooLong, HeadersTooLarge: it is refused. Where the next begins is not known.
        """
        if (num_missing := self._body_length - self._body.tell()) > 0:
            self._body.write(data[:num_missing])
            data = data[num_missing:]
        self._received += data
        if self.head is None and not self._find_head():
            return False
        if self._chunks is None:
            return self._body.tell() == self._body_length
        if not self._chunks.has_ended:
            del self._received[: self._chunks.feed(self._received)]
            self._is_too_long = self._body.tell() > self._max_body_bytes
        return self._chunks.has_ended

    def take(self) -> Request:
        """The complete request. Another may follow it."""
        head = self.head
        assert head is not None
        if self._chunks is not None:
            head.fields["CONTENT_LENGTH"] = str(self._body.tell())
        body = b"" if self._is_too_long else self._body.getvalue()
        self._forget_request()
        return Request(head, body, head.keeps_connection and not self._is_too_long)

    def take_refused(self) -> Request:
        """The request whose head has arrived, without its body. Nothing may follow one that is not complete."""
        if self.advance():
            return self.take()._replace(body=b"")
        assert self.head is not None
        request = Request(self.head, b"", keeps_connection=False)
        self.clear()
        return request

    def _forget_request(self) -> None:
        self.head = self._chunks = None
        self._searched = 0
        self._body, self._body_length = io.BytesIO(), 0

    def _find_head(self) -> bool:
        end = self._received.find(_END, max(0, self._searched - len(_END)))
        self._searched = len(self._received)
        if end < 0:
            if self._searched > MAX_HEAD_BYTES:
                raise HeadersTooLarge("The request's headers are longer than 64 KiB.")
            return False
        # One empty line before a request means nothing (RFC 9112, § 2.2).
        self.head = parse_head(bytes(self._received[: end + len(_END)]).removeprefix(b"\r\n"))
        del self._received[: end + len(_END)]
        length = self.head.content_length
        self._is_too_long = length is not None and length > self._max_body_bytes
        if length is None:
            self._chunks = _ChunkedBody(self._body, self._max_body_bytes)
        elif not self._is_too_long:
            self._body_length = length
            self._body.write(self._received[:length])
            del self._received[:length]
        return True


def parse_head(data: bytes) -> RequestHead:
    """Read a head, from its first byte to the end of the empty line.

    Raises:
        MalformedRequest, UrlTooLong, HeadersTooLarge: it is refused.
    """
    line_end = data.index(b"\r\n")
    if line_end > MAX_LINE_BYTES:
        raise UrlTooLong("The request line is longer than 4,094 bytes; send the text in the body of a POST.")
    num_fields_bytes = len(data) - line_end - len(_END)
    if num_fields_bytes > MAX_FIELDS_BYTES or (num_fields_bytes > MAX_FIELDS and data.count(b"\n") - 2 > MAX_FIELDS):
        raise HeadersTooLarge("At most 1,000 header fields are accepted, of 64 KiB together.")
    line = _LINE.fullmatch(str(data[:line_end], "latin-1"))
    if line is None:
        raise MalformedRequest(_MALFORMED_HEAD)
    method, target, version = line.groups()
    fields = _parse_fields(data)
    path, _, query = target.partition("?")
    if absolute := _ABSOLUTE.fullmatch(target):
        fields["HTTP_HOST"], path, query = absolute.groups()  # the header's does not count (RFC 9112, § 3.2.2)
        path = path or "/"
    elif not target.startswith("/") and (method, target) != ("OPTIONS", "*"):
        raise MalformedRequest(_MALFORMED_HEAD)
    if method == "CONNECT" or fields.get("HTTP_EXPECT", "100-continue").lower() != "100-continue":
        raise MalformedRequest(_MALFORMED_HEAD)
    content_length: int | None = int(fields.get("CONTENT_LENGTH", "0"))
    if (coding := fields.pop("HTTP_TRANSFER_ENCODING", None)) is not None:
        if coding.lower() != "chunked" or version == "HTTP/1.0":
            raise MalformedRequest(_MALFORMED_CODING)
        content_length = None
    options = _connection_options(fields.get("HTTP_CONNECTION", ""))
    keeps_connection = "close" not in options and (version == "HTTP/1.1" or "keep-alive" in options)
    return RequestHead(data, method, target, path, query, version, fields, content_length, keeps_connection)


def _parse_fields(data: bytes) -> dict[str, str]:
    """The fields of a head, as `RequestHead` has them.

    Where the client asks for another protocol (`Upgrade: h2c`), llhttp ends. It is served as if it had not asked.

    Raises:
        MalformedRequest: llhttp refuses the head, or a field is repeated that cannot be joined.
    """
    found: list[tuple[bytes, bytes]] = []
    callbacks = SimpleNamespace(on_header=lambda name, value: found.append((name, value)))
    try:
        httptools.HttpRequestParser(callbacks).feed_data(data)
    except httptools.HttpParserUpgrade:
        pass
    except httptools.HttpParserError:
        raise MalformedRequest(_MALFORMED_HEAD) from None
    fields: dict[str, str] = {}
    repeated: dict[str, list[str]] = {}
    for name, value in found:
        key, text = _wsgi_name(name), str(value, "latin-1").rstrip(" \t")
        if key in fields:
            repeated.setdefault(key, [fields[key]]).append(text)
        else:
            fields[key] = text
    if repeated:
        if not _SINGLE.isdisjoint(repeated):
            raise MalformedRequest(_MALFORMED_HEAD)
        fields |= {key: ",".join(values) for key, values in repeated.items()}
    fields.pop("", None)
    return fields


@lru_cache(maxsize=256)
def _wsgi_name(name: bytes) -> str:
    """The name that WSGI has for a field; "" if it is to be dropped."""
    key = str(name, "ascii").upper().replace("-", "_")
    if b"_" in name:
        return ""
    return key if key in {"CONTENT_TYPE", "CONTENT_LENGTH"} else f"HTTP_{key}"


@lru_cache(maxsize=16)
def _connection_options(value: str) -> frozenset[str]:
    return frozenset(option.strip(" \t") for option in value.lower().split(","))


class _ChunkedBody:
    """A body in chunks (RFC 9112, § 7.1), decoded as it arrives. Extensions and trailers are dropped."""

    def __init__(self, body: io.BytesIO, max_bytes: int) -> None:
        """
        Args:
            body: gets what is decoded. If it is too long, then by less than a piece.
        """
        self._body = body
        self._max_bytes = max_bytes
        self._ends: list[bool] = []  # True once the body is complete
        callbacks = SimpleNamespace(on_body=body.write, on_message_complete=partial(self._ends.append, True))
        self._parser = httptools.HttpRequestParser(callbacks)
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True)  # a trailer of that name means nothing
        self._parser.feed_data(_CHUNKED_HEAD)
        self._last = b""  # up to three bytes that were parsed, with which the end may have begun
        self._num_parsed = 0

    @property
    def has_ended(self) -> bool:
        """Whether the body is complete or too long."""
        return bool(self._ends) or self._body.tell() > self._max_bytes

    def feed(self, data: bytearray) -> int:
        """Decode what has arrived up to the end of the body. Returns how many bytes were used.

        Raises:
            MalformedRequest: it is not in chunks.
        """
        pieces = self._last + data
        start = num_last = len(self._last)
        while start < len(pieces) and not self.has_ended:
            end = pieces.find(_END, max(0, start - 3), start + _PIECE_BYTES)
            stop = min(start + _PIECE_BYTES, len(pieces)) if end < 0 else end + len(_END)
            try:
                self._parser.feed_data(pieces[start:stop])
            except httptools.HttpParserError:
                raise MalformedRequest(_MALFORMED_CHUNKS) from None
            self._num_parsed += stop - start
            start = stop
            max_lines_bytes = MIN_CHUNK_LINES_BYTES + CHUNK_LINES_PER_BYTE * self._body.tell()
            if self._num_parsed - self._body.tell() > min(max_lines_bytes, self._max_bytes + MAX_CHUNK_LINES_BYTES):
                raise MalformedRequest(_LONG_CHUNK_LINES)
        self._last = bytes(pieces[-3:])
        return start - num_last
