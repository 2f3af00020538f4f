"""The route `/`: GET is the page with the editor, POST a request of Text Generation Inference.

Its client posts to the server's bare address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import falcon

from gateway.api.error_formats import ErrorFormat
from gateway.api.page import Asset, AssetResource
from gateway.api.tgi import COMPLETE_AT_ROOT, TgiResponder
from gateway.api.tgi_schema import TGI_ERRORS


class RootResource(AssetResource):
    """`GET /` and `POST /`: the answer to a POST is a list with a single completion."""

    error_formats: ClassVar[Mapping[str, ErrorFormat]] = {"POST": TGI_ERRORS}

    def __init__(self, index: Asset, responder: TgiResponder) -> None:
        super().__init__(index, "The web editor")
        self.operations = {**self.operations, "POST": COMPLETE_AT_ROOT}
        self._responder = responder

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._responder.respond(req, resp, req.bounded_stream.read())
