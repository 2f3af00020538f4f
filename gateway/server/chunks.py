"""Bodies in chunks (RFC 9112, § 7.1): decodes them as they arrive, within a bound.

Extensions and trailers mean nothing here and are dropped. Where two readers could disagree, the body is refused: lines
end with CRLF, and a size is nothing but hexadecimal digits. Knows neither sockets nor heads.
"""

from __future__ import annotations

import enum
import re

# A line: a chunk's size with its extensions, or a trailer.
MAX_LINE_BYTES = 4096
# Lines of all chunks together, besides the bytes of the body: their number costs time.
MAX_LINES_BYTES = 256 << 10

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:[ \t]*;[^\x00-\x08\x0a-\x1f\x7f]*)?")
_TRAILER = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[^\x00-\x08\x0a-\x1f\x7f]*")


class InvalidChunks(Exception):
    """The body is not in chunks. The message is a sentence for the client, without what it sent."""


class _Part(enum.Enum):
    SIZE = enum.auto()
    DATA = enum.auto()
    DATA_END = enum.auto()
    TRAILER = enum.auto()


class ChunkedBody:
    """Decodes one body.

    Attributes:
        body: what is decoded; at most `max_bytes`.
        rest: what is not decoded yet, less than a line. Behind a complete body: what follows it.
        is_complete: the last chunk and its trailers have arrived.
        is_too_large: the chunks say that there is more than `max_bytes`; nothing more is decoded.
    """

    def __init__(self, max_bytes: int) -> None:
        self.body = bytearray()
        self.rest = bytearray()
        self.is_complete = False
        self.is_too_large = False
        self._max_bytes = max_bytes
        self._max_lines_bytes = max_bytes + MAX_LINES_BYTES
        self._part = _Part.SIZE
        self._num_missing = 0  # bytes of the current chunk
        self._lines_bytes = 0

    @property
    def num_buffered_bytes(self) -> int:
        return len(self.body) + len(self.rest)

    def feed(self, data: bytes | bytearray) -> None:
        """Decode what has arrived.

        Raises:
            InvalidChunks: it is not in chunks.
        """
        self.rest += data
        position = 0
        while not self.is_complete and not self.is_too_large:
            if self._part is _Part.DATA:
                piece = self.rest[position : position + self._num_missing]
                self.body += piece
                position += len(piece)
                self._num_missing -= len(piece)
                if self._num_missing:
                    break
                self._part = _Part.DATA_END
            max_bytes = 0 if self._part is _Part.DATA_END else MAX_LINE_BYTES
            end = self.rest.find(b"\r\n", position, position + max_bytes + 2)
            if end < 0:
                if len(self.rest) - position >= max_bytes + 2:
                    raise InvalidChunks(
                        f"A chunk's size, extensions or a trailer are a line of more than {MAX_LINE_BYTES} bytes."
                        if max_bytes
                        else "A chunk is longer than its size says, or does not end with CRLF."
                    )
                break
            self._take_line(bytes(self.rest[position:end]))
            self._lines_bytes += end + 2 - position
            if self._lines_bytes > self._max_lines_bytes:
                raise InvalidChunks("The chunks' sizes, extensions and trailers are too long: send larger chunks.")
            position = end + 2
        del self.rest[:position]

    def _take_line(self, line: bytes) -> None:
        if self._part is _Part.SIZE:
            match = _SIZE_LINE.fullmatch(line)
            if match is None:
                raise InvalidChunks("A chunk must begin with its size, in hexadecimal digits.")
            self._num_missing = int(match[1], 16)
            self._part = _Part.DATA if self._num_missing else _Part.TRAILER
            self.is_too_large = len(self.body) + self._num_missing > self._max_bytes
        elif self._part is _Part.DATA_END:
            self._part = _Part.SIZE
        elif not line:
            self.is_complete = True
        elif not _TRAILER.fullmatch(line):
            raise InvalidChunks("A trailer of the chunked body is not a valid header field.")
