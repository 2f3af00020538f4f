"""Middleware: no body may be longer than the limit, neither as it is sent nor decoded.

Falcon limits no body and decodes none. The server has decoded chunks, so each request says how long its body is.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import falcon

from shared.errors import BodyTooLarge, MalformedRequest, UnsupportedCoding

# RFC 9110, § 8.4.1.3: x-gzip is another name of gzip.
_GZIP = frozenset({"gzip", "x-gzip"})
_MAX_SHOWN_CHARS = 40
# Compressed bytes that are unpacked at once: they become a MiB at most, 1032 times as many (RFC 1951).
_PIECE_BYTES = 1 << 10
# What beginning a member of a gzip stream costs, in bytes.
MEMBER_BYTES = 4 << 10


class BodyLimits:
    """Falcon middleware. It judges by the headers, and reads only bodies that it decodes."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        """
        Raises:
            MalformedRequest: the body is not gzip data as it says.
            BodyTooLarge: longer than the limit.
            UnsupportedCoding: a `Content-Encoding` other than gzip.
            QuotaExceeded: unpacked, it has more bytes than its owner may send now.
        """
        length = int(req.env.get("CONTENT_LENGTH") or 0)  # the server has refused what is not digits
        if length > self._max_body_bytes:
            raise self._too_large("The body")
        coding = (req.get_header("Content-Encoding") or "identity").strip().lower()
        if coding == "identity" or not length:
            return
        if coding not in _GZIP:
            raise UnsupportedCoding(
                f"Content-Encoding {coding[:_MAX_SHOWN_CHARS]!r} is not supported: send the body compressed with gzip,"
                " or uncompressed and without this header.",
                headers={"Accept-Encoding": "gzip"},
            )
        body = self._unpack(req.env["wsgi.input"].read(length), req.context.charge)
        req.stream = req.env["wsgi.input"] = io.BytesIO(body)
        req.env["CONTENT_LENGTH"] = str(len(body))

    def _unpack(self, data: bytes, charge: Callable[[int], None]) -> bytes:
        body, member = bytearray(), None
        try:
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                while piece:
                    if member is None:
                        charge(MEMBER_BYTES)
                        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # of gzip
                    unpacked = member.decompress(piece)
                    charge(len(unpacked))
                    body += unpacked
                    if len(body) > self._max_body_bytes:
                        raise self._too_large("Decompressed, the body")
                    piece = member.unused_data
                    member = None if member.eof else member
            if member is not None:
                raise zlib.error("The last member has no end.")
        except zlib.error as error:
            raise MalformedRequest(
                "The body is not complete gzip data, as its Content-Encoding header says: compress it again, or leave"
                " the header out."
            ) from error
        return bytes(body)

    def _too_large(self, subject: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"{subject} has more than the {self._max_body_bytes} bytes of the limit (TERCET_MAX_BODY_BYTES). Send only"
            " the end of the document."
        )
