"""The route `/`: GET is the page with the editor, POST a request of Text Generation Inference.

Its client posts to the server's bare address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import falcon

from gateway.api import sse
from gateway.api.callers import SESSION_PARAMETER
from gateway.api.error_formats import ErrorFormat
from gateway.api.operation import JSON, Answer, Operation, Operations
from gateway.api.page import PageResource
from gateway.api.tgi import ERRORS, EXAMPLES, STREAM, TAG, TgiResponder
from gateway.api.tgi_schema import TGI_ERRORS, TgiGeneration, parse_tgi_body


class RootResource:
    """`GET /` and `POST /`: the answer to a POST is a list with a single completion."""

    error_formats: ClassVar[Mapping[str, ErrorFormat]] = {"POST": TGI_ERRORS}
    operations: ClassVar[Operations] = {
        **PageResource.operations,
        "POST": Operation(
            tag=TAG,
            summary="Complete a text, answered with a list",
            description="As `POST /generate`; huggingface_hub's `InferenceClient` sends it.",
            bodies=(parse_tgi_body,),
            examples=EXAMPLES,
            parameters=(SESSION_PARAMETER,),
            answers={200: Answer("The completion, in a list.", {JSON: list[TgiGeneration], sse.CONTENT_TYPE: STREAM})},
            errors=ERRORS,
        ),
    }

    def __init__(self, page: PageResource, responder: TgiResponder) -> None:
        self._page = page
        self._responder = responder

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._page.on_get(req, resp)

    on_head = on_get

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._responder.respond(req, resp, req.bounded_stream.read())
