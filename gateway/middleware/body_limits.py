"""Middleware: a POST must say how long its body is, and no body may be longer than the limit.

Falcon limits no body, and its `bounded_stream` reads a chunked body as empty: without these checks a client that
sends chunks would get an answer to an empty request.
"""

from __future__ import annotations

import re

import falcon

from shared.errors import BodyTooLarge, LengthRequired, MalformedRequest

# RFC 9110, § 8.6. Python's `int` also takes signs, underscores, white space and the digits of other scripts.
_DIGITS = re.compile(r"[0-9]{1,19}")


class BodyLimits:
    """Falcon middleware. It judges by the headers, before the body is read."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        """
        Raises:
            LengthRequired: a `Transfer-Encoding`, or a POST without `Content-Length`.
            MalformedRequest: the `Content-Length` is not a number.
            BodyTooLarge: longer than the limit.
        """
        length = req.env.get("CONTENT_LENGTH") or ""
        if req.get_header("Transfer-Encoding") or (req.method == "POST" and not length):
            raise LengthRequired("Send a Content-Length header; chunked bodies are not supported.")
        if length and not _DIGITS.fullmatch(length):
            raise MalformedRequest("Content-Length must be the number of the body's bytes, in decimal digits.")
        if int(length or 0) > self._max_body_bytes:
            raise BodyTooLarge(
                f"The body has {int(length)} bytes; the limit is {self._max_body_bytes} "
                "(TERCET_MAX_BODY_BYTES). Send only the end of the document."
            )
