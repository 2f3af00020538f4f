"""The two routes of a SageMaker container: `GET /ping` is `gateway.api.health`'s, `POST /invocations` is here.

An endpoint has a single route for all clients: the body's field decides on the dialect that answers, errors included.
Knows the fields of the dialects, not what they do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import falcon
import msgspec
from msgspec import Meta, Struct

from gateway.api.callers import caller_of
from gateway.api.error_formats import PROBLEM_DETAILS, ErrorFormat
from gateway.generation.failures import no_completion_error
from gateway.generation.request import GenerationSpec
from gateway.generation.request_starter import RequestStarter, document_key, draw_seed
from gateway.generation.selection import SelectionPolicy, SelectionResult
from shared.errors import FieldError, InvalidRequest
from shared.parsing import BodyParser, members_of
from shared.protocol import Sampling

# SageMaker passes it on from the client's `CustomAttributes`.
ATTRIBUTES_HEADER = "X-Amzn-SageMaker-Custom-Attributes"
_SESSION = re.compile(r"(?:^|[;,])\s*session=([^;,\s]{1,128})")
# Values of the deployment that Patsnap published: three texts for each input, up to ten inputs a request.
NUM_OUTPUTS = 3
MAX_INPUTS = 10
MAX_INPUT_CHARS = 1 << 20
MAX_PROMPT_TOKENS = 256
_Input = Annotated[str, Meta(max_length=MAX_INPUT_CHARS)]
_encode = msgspec.json.Encoder().encode
Respond = Callable[[falcon.Request, falcon.Response, bytes], None]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a request with a dialect's field is answered."""

    respond: Respond
    error_format: ErrorFormat = PROBLEM_DETAILS


class InvocationsResource:
    """`POST /invocations`."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        """
        Args:
            dialects: dialects by the field of the body that each of them requires.
        """
        self._dialects = dialects

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            InvalidRequest: the body has no dialect's field.
            TercetError: as the dialect's resource.
        """
        body = req.bounded_stream.read()
        req.context.session = _session(req.get_header(ATTRIBUTES_HEADER) or "")
        dialect = self._dialects[self._field(body)]
        req.context.error_format = dialect.error_format
        dialect.respond(req, resp, body)

    def _field(self, body: bytes) -> str:
        members = members_of(body)
        for name in self._dialects:
            if name in members:
                return name
        names = ", ".join(self._dialects)
        raise InvalidRequest(
            f"The body has none of the fields {names}: send the one of your client's API.",
            fields=tuple(FieldError(name, "is missing") for name in self._dialects),
        )


def _session(attributes: str) -> str | None:
    match = _SESSION.search(attributes)
    return match[1] if match else None


class PatsnapRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A text, or several."""

    input: Annotated[
        _Input | Annotated[list[_Input], Meta(min_length=1, max_length=MAX_INPUTS)],
        Meta(description=f"a string, or a list of 1 to {MAX_INPUTS} strings, of up to {MAX_INPUT_CHARS} characters"),
    ]


class PatsnapResponse(Struct, kw_only=True):
    """Three texts that begin with the input, likeliest first; for a list of inputs, a list of three for each."""

    output: list[str] | list[list[str]]


parse_patsnap_request = BodyParser(PatsnapRequest)


class PatsnapResponder:
    """Answers `{"input": …}` with the default model's completions, unchanged."""

    def __init__(self, starter: RequestStarter) -> None:
        self._starter = starter

    def respond(self, req: falcon.Request, resp: falcon.Response, body: bytes) -> None:
        """
        Raises:
            InvalidJson, InvalidRequest: the request is wrong.
            QuotaExceeded, Overloaded, NotReady, Superseded, ClientGone: it was not started, or cancelled.
            TercetError: a text is missing.
        """
        started_at = time.monotonic()
        caller = caller_of(req)
        with self._starter.admitting(caller):
            found = parse_patsnap_request(body).input
            inputs = [found] if isinstance(found, str) else found
            spec = GenerationSpec(
                request_id=caller.request_id,
                model=self._starter.default_model,
                prompts=tuple(inputs),
                max_prompt_tokens=MAX_PROMPT_TOKENS,
                num_completions=NUM_OUTPUTS,
                seed=draw_seed(),
                sampling=Sampling(),
                deadline=self._starter.deadline(started_at),
                owner=caller.owner,
                session=caller.session,
                document=document_key(caller.owner, caller.session, inputs[0]),
            )
            policy = SelectionPolicy(
                prompt="",
                num_suggestions=spec.num_branches,
                length=spec.sampling.max_new_tokens,
                similarity=100.0,
                is_verbatim=True,
            )
            with self._starter.started(caller, spec, policy) as started:
                result = started.result()
        texts = _texts(inputs, result)
        resp.data = _encode(PatsnapResponse(output=texts[0] if isinstance(found, str) else texts))


def _texts(inputs: list[str], result: SelectionResult) -> list[list[str]]:
    """
    Raises:
        TercetError: a text is missing.
    """
    if result.failures:
        raise no_completion_error(result.failures, faster="send fewer inputs")
    texts: list[list[str]] = [[] for _ in inputs]
    for suggestion in result.suggestions:
        number = suggestion.result.branch // NUM_OUTPUTS
        texts[number].append(inputs[number] + suggestion.text)
    return texts
