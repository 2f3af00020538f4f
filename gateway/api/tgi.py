"""Text Generation Inference's routes: `/generate`, `/generate_stream`, `POST /`, `/info` and `/endpoint`.

Translates between their schema and generation's specs and results; it does not know how completions are made. A
completion's text ends before its stop sequence.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import chain
from typing import ClassVar, Literal

import falcon
import msgspec

from gateway.api import sse
from gateway.api.callers import SESSION_PARAMETER, caller_of
from gateway.api.error_formats import ErrorFormat
from gateway.api.operation import COMPLETION_ERRORS, JSON, TEXT, Answer, Events, Operation, Operations
from gateway.api.tgi_answer import TgiAnswer
from gateway.api.tgi_schema import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_BEST_OF,
    MAX_STOP_SEQUENCES,
    MAX_TOP_N_TOKENS,
    TGI_ERRORS,
    TgiGeneration,
    TgiInfo,
    TgiParameters,
    TgiRequest,
    TgiStreamEvent,
    invalid,
    parse_tgi_body,
    parse_tgi_request,
)
from gateway.generation.request import GenerationSpec
from gateway.generation.request_starter import Caller, RequestStarter, document_key, draw_seed
from gateway.generation.selection import SelectionPolicy, SelectionResult
from gateway.generation.trimming import MIN_TOKENS
from gateway.pool.admission import Admission
from shared.errors import PromptTooLong, Superseded
from shared.protocol import Sampling

TAG = "Text Generation Inference"
ERRORS = (*COMPLETION_ERRORS, PromptTooLong, Superseded)
EXAMPLES = {
    "a completion": {"inputs": "The old man looked at the sea and"},
    "sampled, with details": {
        "inputs": "The old man looked at the sea and",
        "parameters": {"max_new_tokens": 20, "temperature": 0.8, "details": True},
    },
}
STREAM = Events({"": TgiStreamEvent})
_encode = msgspec.json.Encoder().encode
Form = Literal["object", "list", "stream"]


class TgiResponder:
    """Answers bodies of Text Generation Inference's requests, with the plan's default model."""

    def __init__(self, starter: RequestStarter, similarity: float) -> None:
        """
        Args:
            similarity: percent from which two completions are near-duplicates, for requests with `clean`.
        """
        self._starter = starter
        self._similarity = similarity

    def respond(self, req: falcon.Request, resp: falcon.Response, body: bytes, form: Form = "list") -> None:
        """Answer a request's body. A stream begins when there is something to send, so that an error before that has
        its own status.

        Args:
            form: form of the answer, unless the body requests a stream.

        Raises:
            InvalidJson, InvalidRequest: the request is wrong.
            QuotaExceeded, Overloaded, NotReady, Superseded, ClientGone: it was not started, or cancelled.
            PromptTooLong, NoCompletion, DeadlineExceeded: it has no completion.
        """
        started_at = time.monotonic()
        caller = caller_of(req)
        with ExitStack() as stack:
            stack.enter_context(self._starter.admitting(caller))
            request = parse_tgi_request(body)
            is_streamed = form == "stream" or bool(request.stream)
            parameters = request.parameters or TgiParameters()
            spec = self._spec(request, parameters, caller, started_at, is_streamed=is_streamed)
            policy = self._policy(request, parameters, spec)
            started = stack.enter_context(self._starter.started(caller, spec, policy))
            answer = TgiAnswer(request.inputs, parameters, spec, req.context)
            if is_streamed:
                events = started.events()
                first = next(events)
                if isinstance(first, SelectionResult):
                    answer.check(first)
                encoded = answer.events(chain([first], events))
                sse.stream(resp, encoded, TGI_ERRORS, req.context.id, stack.pop_all().close)
                return
            result = started.result()
        generation = answer.generation(result)
        resp.data = _encode([generation] if form == "list" else generation)

    def _policy(self, request: TgiRequest, parameters: TgiParameters, spec: GenerationSpec) -> SelectionPolicy:
        return SelectionPolicy(
            prompt=request.inputs,
            num_suggestions=spec.num_branches,
            length=parameters.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            similarity=self._similarity,
            keeps_greedy_text=not parameters.is_sampled,
            is_verbatim=not parameters.clean,
        )

    def _spec(
        self, request: TgiRequest, parameters: TgiParameters, caller: Caller, started_at: float, *, is_streamed: bool
    ) -> GenerationSpec:
        """
        Raises:
            InvalidRequest: a parameter is out of the range that the model allows, or excludes streaming.
        """
        model = self._starter.model(None, "model")
        if is_streamed:
            _check_streamable(parameters)
        for name in ("max_new_tokens", "truncate"):
            if (getattr(parameters, name) or 1) >= model.n_ctx:
                raise invalid(name, f"must be at most {model.n_ctx - 1}: the context of {model.name} is {model.n_ctx}")
        max_new_tokens = parameters.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        if parameters.clean:
            max_new_tokens = max(max_new_tokens, MIN_TOKENS)
        has_tokens = is_streamed or bool(parameters.details)
        return GenerationSpec(
            request_id=caller.request_id,
            model=model.name,
            prompts=(request.inputs,),
            max_prompt_tokens=parameters.truncate,
            num_completions=parameters.best_of or 1,
            seed=draw_seed() if parameters.seed is None else parameters.seed,
            sampling=_sampling(parameters, max_new_tokens, model.vocab_size),
            heals=bool(parameters.clean),
            echoes=bool(parameters.details and parameters.decoder_input_details),
            num_top_logprobs=(parameters.top_n_tokens or 0) if has_tokens else None,
            is_streamed=is_streamed,
            deadline=self._starter.deadline(started_at),
            owner=caller.owner,
            session=caller.session,
            document=document_key(caller.owner, caller.session, request.inputs),
        )


def _check_streamable(parameters: TgiParameters) -> None:
    """
    Raises:
        InvalidRequest: a parameter excludes streaming.
    """
    if (parameters.best_of or 1) > 1:
        raise invalid("best_of", "must be 1 in a stream")
    if parameters.decoder_input_details:
        raise invalid("decoder_input_details", "must be false in a stream")
    if parameters.clean:
        raise invalid("clean", "must be false in a stream; POST /autocomplete streams trimmed completions")


def _sampling(parameters: TgiParameters, max_new_tokens: int, vocab_size: int) -> Sampling:
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=(parameters.temperature or 1.0) if parameters.is_sampled else 0.0,
        top_k=min(parameters.top_k or 0, vocab_size),
        top_p=parameters.top_p or 1.0,
        repetition_penalty=parameters.repetition_penalty or 1.0,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        stop=parameters.stop_strings,
    )


class GenerateResource:
    """`POST /generate`, whose answer is an object, and `POST /generate_stream`, whose answer is a stream of tokens."""

    error_format: ClassVar[ErrorFormat] = TGI_ERRORS

    def __init__(self, responder: TgiResponder, form: Form, operation: Operation) -> None:
        self._responder = responder
        self._form = form
        self.operations: Operations = {"POST": operation}

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._responder.respond(req, resp, req.bounded_stream.read(), self._form)


def _completion_operation(summary: str, answer: Answer, description: str = "") -> Operation:
    return Operation(
        tag=TAG,
        summary=summary,
        description=description,
        bodies=(parse_tgi_body,),
        examples=EXAMPLES,
        parameters=(SESSION_PARAMETER,),
        answers={200: answer},
        errors=ERRORS,
    )


COMPLETE = _completion_operation(
    "Complete a text",
    Answer("The completion.", {JSON: TgiGeneration, sse.CONTENT_TYPE: STREAM}),
    "Greedy unless `do_sample`, `temperature`, `top_k` or `top_p` is sent.",
)
COMPLETE_AS_STREAM = _completion_operation(
    "Complete a text, as a stream of tokens",
    Answer("The tokens; an error is the last event.", {sse.CONTENT_TYPE: STREAM}),
)
COMPLETE_AT_ROOT = _completion_operation(
    "Complete a text, answered with a list",
    Answer("The completion, in a list.", {JSON: list[TgiGeneration], sse.CONTENT_TYPE: STREAM}),
    "As `POST /generate`; huggingface_hub's `InferenceClient` sends it.",
)


class InfoResource:
    """`GET /info`."""

    error_format: ClassVar[ErrorFormat] = TGI_ERRORS
    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag=TAG, summary="The default model and its limits", answers={200: Answer("The model.", {JSON: TgiInfo})}
        )
    }

    def __init__(self, admission: Admission, starter: RequestStarter) -> None:
        self._admission = admission
        self._starter = starter

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            NotReady: the model is on other machines, and no worker has reported yet.
        """
        model = self._starter.model(None, "model")
        row = next((row for row in self._admission.slots() if row.slot.model == model.name), None)
        resp.data = _encode(
            TgiInfo(
                model_id=model.name,
                model_sha=model.revision or None,
                model_dtype=row.state.dtype if row else "",
                model_device_type=row.device.partition(":")[0] if row else "",
                model_pipeline_tag="text-generation",
                max_concurrent_requests=self._admission.capacity(),
                max_best_of=MAX_BEST_OF,
                max_stop_sequences=MAX_STOP_SEQUENCES,
                max_top_n_tokens=MAX_TOP_N_TOKENS,
                max_input_tokens=model.n_ctx - 1,
                max_total_tokens=model.n_ctx,
                router="tercet",
            )
        )


class EndpointResource:
    """`GET /endpoint`: the address of this service: its public URL, or else as the request names it."""

    operations: ClassVar[Operations] = {
        "GET": Operation(tag=TAG, summary="This service's address", answers={200: Answer("A URL.", {TEXT: str})})
    }

    def __init__(self, public_url: str | None) -> None:
        """
        Args:
            public_url: where clients reach this server; None: as the request names it.
        """
        self._public_url = public_url

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = TEXT
        resp.text = self._public_url or f"{req.scheme}://{req.get_header('Host')}"
