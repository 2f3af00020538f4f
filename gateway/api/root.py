"""The route `/`: GET is the page with the editor, POST a request of Text Generation Inference.

Its client posts to the server's bare address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import falcon

from gateway.api.error_formats import ErrorFormat
from gateway.api.operation import Operations
from gateway.api.page import AssetResource
from gateway.api.tgi import COMPLETE_AT_ROOT, TgiResponder
from gateway.api.tgi_schema import TGI_ERRORS


class RootResource:
    """`GET /` and `POST /`: the answer to a POST is a list with a single completion."""

    error_formats: ClassVar[Mapping[str, ErrorFormat]] = {"POST": TGI_ERRORS}

    def __init__(self, page: AssetResource, responder: TgiResponder) -> None:
        self._page = page
        self._responder = responder
        self.operations: Operations = {**page.operations, "POST": COMPLETE_AT_ROOT}

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._page.on_get(req, resp)

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._responder.respond(req, resp, req.bounded_stream.read())
