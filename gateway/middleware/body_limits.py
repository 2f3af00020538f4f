"""Middleware: no body may be longer than the limit, neither as it is sent nor decoded.

Falcon limits no body and decodes none. The server has decoded chunks, so each request says how long its body is.
"""

from __future__ import annotations

import gzip
import io
import zlib

import falcon

from shared.errors import BodyTooLarge, MalformedRequest, UnsupportedCoding

# RFC 9110, § 8.4.1.3: x-gzip is another name of gzip.
_GZIP = frozenset({"gzip", "x-gzip"})
_MAX_SHOWN_CHARS = 40


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
        body = self._decompress(req.env["wsgi.input"].read(length))
        req.stream = req.env["wsgi.input"] = io.BytesIO(body)
        req.env["CONTENT_LENGTH"] = str(len(body))

    def _decompress(self, data: bytes) -> bytes:
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
                body = file.read(self._max_body_bytes + 1)  # decompresses no more than that
        except (OSError, EOFError, zlib.error) as error:
            raise MalformedRequest(
                "The body is not complete gzip data, as its Content-Encoding header says: compress it again, or leave"
                " the header out."
            ) from error
        if len(body) > self._max_body_bytes:
            raise self._too_large("Decompressed, the body")
        return body

    def _too_large(self, subject: str) -> BodyTooLarge:
        return BodyTooLarge(
            f"{subject} has more than the {self._max_body_bytes} bytes of the limit (TERCET_MAX_BODY_BYTES). Send only"
            " the end of the document."
        )
