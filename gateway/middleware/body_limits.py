"""Middleware: a POST must say how long its body is, and may not be longer than the limit.

Falcon limits no body, and its `bounded_stream` reads a chunked body as empty: without these checks a client that
sends chunks would get an answer to an empty request.
"""

from __future__ import annotations

import falcon

from shared.errors import BodyTooLarge, LengthRequired


class BodyLimits:
    """Falcon middleware. It judges by the headers, before the body is read."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes

    def process_request(self, req: falcon.Request, _resp: falcon.Response) -> None:
        """
        Raises:
            LengthRequired: no `Content-Length`, or a `Transfer-Encoding`.
            BodyTooLarge: longer than the limit.
        """
        if req.method != "POST":
            return
        if req.get_header("Transfer-Encoding") or req.content_length is None:
            raise LengthRequired("Send a Content-Length header; chunked bodies are not supported.")
        if req.content_length > self._max_body_bytes:
            raise BodyTooLarge(
                f"The body has {req.content_length} bytes; the limit is {self._max_body_bytes} "
                "(TERCET_MAX_BODY_BYTES). Send only the end of the document."
            )
