"""Text Generation Inference's routes: `/generate`, `/generate_stream`, `POST /`, `/info` and `/endpoint`.

Translates between their schema and generation's specs and results; it does not know how completions are made. A
completion's text ends before its stop sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import falcon
import msgspec
from msgspec.structs import replace

from gateway.api import sse
from gateway.api.callers import SESSION_PARAMETER, caller_of
from gateway.api.error_formats import ErrorFormat
from gateway.api.fields import MAX_STOP_SEQUENCES, sampling_of
from gateway.api.operation import COMPLETION_ERRORS, JSON, TEXT, Answer, Events, Operation, Operations
from gateway.api.tgi_answer import TgiAnswer
from gateway.api.tgi_schema import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_BEST_OF,
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
from gateway.api.tolerance import Tolerated
from gateway.generation.request import Caller, GenerationSpec, resolve_seed
from gateway.generation.request_starter import RequestStarter
from gateway.generation.selection import selection_policy
from gateway.generation.suggestions import StartedRequest
from gateway.generation.trimming import MIN_TOKENS
from gateway.pool.admission import Admission
from gateway.pool.tokenizing import TEXT_WEIGHT, PoolTokenizer
from shared.errors import FieldError, InvalidRequest, PromptTooLong, Superseded
from shared.plan import Model
from shared.protocol import Tokens
from shared.version import tercet_version

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
# By this, clients mean as many tokens as there is room for.
ALL = -1
_encode = msgspec.json.Encoder().encode
Form = Literal["object", "list", "stream"]


class TgiResponder:
    """Answers bodies of Text Generation Inference's requests, with the plan's default model."""

    def __init__(self, starter: RequestStarter, tokenizer: PoolTokenizer, similarity: float) -> None:
        """
        Args:
            similarity: percent from which two completions are near-duplicates, for requests with `clean`.
        """
        self._starter = starter
        self._tokenizer = tokenizer
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
        with ExitStack() as stack:
            request, answer, started = self._started(stack, req, lambda: parse_tgi_request(body), form)
            if started.context.spec.is_streamed:
                events = sse.begun(answer.events(started.events()))
                sse.stream(resp, events, TGI_ERRORS, req.context.id, stack.pop_all().close)
                return
            result = started.result()
        found = answer.generations(result)
        is_single = form == "object" and (request.parameters or TgiParameters()).num_return_sequences in {None, 1}
        answers = [generations[0] if is_single else generations for generations in found]
        resp.data = _encode(answers[0] if isinstance(request.inputs, str) else answers)

    def generations(
        self, req: falcon.Request, parse: Callable[[], Tolerated[TgiRequest]], *, needs_all: bool = False
    ) -> tuple[TgiRequest, list[list[TgiGeneration]]]:
        """The request, and completions of each of its inputs, for a dialect that is parsed into this one.

        Args:
            needs_all: whether it fails if one of the completions does.

        Raises:
            TercetError: as `respond`.
        """
        with ExitStack() as stack:
            request, answer, started = self._started(stack, req, parse)
            result = started.result()
        return request, answer.generations(result, needs_all=needs_all)

    def _started(
        self, stack: ExitStack, req: falcon.Request, parse: Callable[[], Tolerated[TgiRequest]], form: Form = "list"
    ) -> tuple[TgiRequest, TgiAnswer, StartedRequest]:
        started_at = time.monotonic()
        caller = caller_of(req)
        stack.enter_context(self._starter.counting(caller))
        parsed = parse()
        req.context.num_ignored = parsed.num_unknown
        request = parsed.request
        is_streamed = form == "stream" or bool(request.stream)
        if is_streamed:
            check_streamable(request)
        model = self._starter.model(None, "model")
        parameters, more = self._resolve(request, model, caller, started_at)
        max_new_tokens = parameters.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        if parameters.clean:
            max_new_tokens = max(max_new_tokens, MIN_TOKENS)
        has_tokens = is_streamed or parameters.details
        max_time_s = None if parameters.max_time is None else min(parameters.max_time, self._starter.timeout_s)
        spec = GenerationSpec(
            caller=caller,
            model=model.name,
            sampling=sampling_of(parameters, max_new_tokens, model.vocab_size, stop=parameters.stop_strings),
            prompts=tuple(request.prompts),
            max_prompt_tokens=parameters.truncate,
            num_completions=parameters.num_completions,
            deadline=self._starter.deadline(started_at, max_time_s),
            seed=resolve_seed(parameters.seed),
            session=caller.session,
            heals=parameters.clean,
            ranks_first_token=True,  # several greedy completions of a text would be the same
            echoes=parameters.details and parameters.decoder_input_details,
            num_top_logprobs=parameters.top_n_tokens if has_tokens else None,
            is_streamed=is_streamed,
        )
        started = stack.enter_context(self._starter.started(spec, selection_policy(spec, self._similarity)))
        return request, TgiAnswer(request.prompts, parameters, [*parsed.warnings, *more], spec, req.context), started

    def _resolve(
        self, request: TgiRequest, model: Model, caller: Caller, started_at: float
    ) -> tuple[TgiParameters, list[str]]:
        """The parameters in the terms of Tercet, and a warning for each whose value it could not have.

        Raises:
            InvalidRequest: `max_new_tokens` is 0.
            ClientGone, Overloaded, NotReady, DeadlineExceeded: no slot could tokenize the inputs, for `max_length`.
        """
        parameters = request.parameters or TgiParameters()
        changes: dict[str, Any] = {}
        warnings = []
        if parameters.truncate is not None and parameters.truncate >= model.n_ctx:
            changes["truncate"] = None
        number = parameters.max_new_tokens
        if number == 0:
            raise invalid("max_new_tokens", "must be 1 or more, or -1, not 0")
        if number is None and parameters.max_length is not None:
            caller.charge((TEXT_WEIGHT - 1) * sum(map(len, request.prompts)))
            found = [tokens_of(self._starter, self._tokenizer, caller, text, started_at) for text in request.prompts]
            longest = max(len(tokens.ids) for tokens in found)
            number = parameters.max_length - longest
            if number < 1:
                number = 1
                warnings.append(f"max_length was raised to {longest + 1}: the inputs have {longest} tokens.")
        number = DEFAULT_MAX_NEW_TOKENS if number is None else number
        if number == ALL or number >= model.n_ctx:
            number = model.n_ctx // 2
            warnings.append(f"max_new_tokens was lowered to {number}, half of the model's context.")
        changes["max_new_tokens"] = number
        return replace(parameters, **changes), warnings


def tokens_of(starter: RequestStarter, tokenizer: PoolTokenizer, caller: Caller, text: str, began_at: float) -> Tokens:
    """The tokens of a text by the default model, ended with its client; raises as `PoolTokenizer.tokenize`."""
    cancelling = starter.watching(caller)
    return tokenizer.tokenize(
        starter.default_model, text, starter.deadline(began_at), owner=caller.owner, cancelling=cancelling
    )


def check_streamable(request: TgiRequest) -> None:
    """
    Raises:
        InvalidRequest: a field excludes streaming.
    """
    parameters = request.parameters or TgiParameters()
    if not isinstance(request.inputs, str):
        raise InvalidRequest(
            "inputs must be a single text in a stream.", fields=(FieldError("inputs", "must be a single text"),)
        )
    if (parameters.best_of or 1) > 1:
        raise invalid("best_of", "must be 1 in a stream")
    if (parameters.num_return_sequences or 1) > 1:
        raise invalid("num_return_sequences", "must be 1 in a stream; POST /autocomplete streams several completions")
    if parameters.decoder_input_details:
        raise invalid("decoder_input_details", "must be false in a stream")
    if parameters.clean:
        raise invalid("clean", "must be false in a stream; POST /autocomplete streams trimmed completions")


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
    Answer(
        "The completion; a list with `num_return_sequences`. To a list of inputs, a list of such answers.",
        {JSON: (TgiGeneration, list[TgiGeneration], list[list[TgiGeneration]]), sse.CONTENT_TYPE: STREAM},
    ),
    "Greedy unless `do_sample`, `temperature`, `top_k` or `top_p` is sent.",
)
COMPLETE_AS_STREAM = _completion_operation(
    "Complete a text, as a stream of tokens",
    Answer("The tokens; an error is the last event.", {sse.CONTENT_TYPE: STREAM}),
)
COMPLETE_AT_ROOT = _completion_operation(
    "Complete a text, answered with a list",
    Answer(
        "The completion, in a list. To a list of inputs, a list of such lists.",
        {JSON: (list[TgiGeneration], list[list[TgiGeneration]]), sse.CONTENT_TYPE: STREAM},
    ),
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
                version=tercet_version(),
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
