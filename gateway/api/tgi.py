"""Text Generation Inference's routes: `/generate`, `/generate_stream`, `POST /`, `/info` and `/endpoint`.

Translates between their schema and generation's specs and results; how completions are made is not known here. A
completion's text ends before its stop sequence.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any, ClassVar, Literal

import falcon
import msgspec

from gateway.api import sse
from gateway.api.callers import caller_of
from gateway.api.error_formats import ErrorFormat
from gateway.api.operation import JSON, TEXT, Answer, Events, Operation, Operations
from gateway.api.tgi_schema import (
    DEFAULT_MAX_NEW_TOKENS,
    MAX_BEST_OF,
    MAX_STOP_SEQUENCES,
    MAX_TOP_N_TOKENS,
    TGI_ERRORS,
    FinishReason,
    TgiBestOfSequence,
    TgiDetails,
    TgiGeneration,
    TgiInfo,
    TgiParameters,
    TgiPrefillToken,
    TgiRequest,
    TgiStreamDetails,
    TgiStreamEvent,
    TgiToken,
    invalid,
    parse_tgi_body,
    parse_tgi_request,
)
from gateway.generation.request import BranchFailure, GenerationSpec
from gateway.generation.runner import Caller, CompletionRunner, document_key, draw_seed
from gateway.generation.selection import SelectionPolicy, SelectionResult, Suggestion
from gateway.generation.suggestions import Output, TextDelta
from gateway.generation.trimming import MIN_TOKENS
from gateway.pool.admission import Admission
from shared.errors import (
    DeadlineExceeded,
    InvalidJson,
    InvalidRequest,
    NoCompletion,
    NotReady,
    Overloaded,
    PromptTooLong,
    QuotaExceeded,
    TercetError,
    retry_after_s,
)
from shared.plan import Plan
from shared.protocol import Done, Sampling, Token, Top

TAG = "Text Generation Inference"
ERRORS = (
    InvalidJson,
    InvalidRequest,
    PromptTooLong,
    QuotaExceeded,
    NotReady,
    Overloaded,
    NoCompletion,
    DeadlineExceeded,
)
EXAMPLES = {
    "a completion": {"inputs": "The old man looked at the sea and"},
    "sampled, with details": {
        "inputs": "The old man looked at the sea and",
        "parameters": {"max_new_tokens": 20, "temperature": 0.8, "details": True},
    },
}
STREAM = Events({"": TgiStreamEvent})
# A completion that the time limit has ended is as short as if it had reached its length.
_FINISH_REASONS: dict[str, FinishReason] = {
    "length": "length", "deadline": "length", "eos": "eos_token", "stop": "stop_sequence",
}  # fmt: skip
_encode = msgspec.json.Encoder().encode
Form = Literal["object", "list", "stream"]


class TgiResponder:
    """Answers bodies of Text Generation Inference's requests, with the plan's default model."""

    def __init__(self, runner: CompletionRunner, similarity: float) -> None:
        """
        Args:
            similarity: percent from which two completions are near-duplicates, for requests with `clean`.
        """
        self._runner = runner
        self._similarity = similarity

    def respond(self, req: falcon.Request, resp: falcon.Response, body: bytes, form: Form = "list") -> None:
        """Answer a request's body. A stream begins when there is something to send, so that an error before that has
        its own status.

        Args:
            form: of the answer, unless the body asks for a stream.

        Raises:
            InvalidJson, InvalidRequest: the request is wrong.
            QuotaExceeded, Overloaded, NotReady, Superseded, ClientGone: it was not started, or cancelled.
            PromptTooLong, NoCompletion, DeadlineExceeded: it has no completion.
        """
        started_at = time.monotonic()
        caller = caller_of(req)
        with ExitStack() as stack:
            stack.enter_context(self._runner.admitting(caller))
            request = parse_tgi_request(body)
            is_streamed = form == "stream" or bool(request.stream)
            parameters = request.parameters or TgiParameters()
            spec = self._spec(request, parameters, caller, started_at, is_streamed=is_streamed)
            _, outputs = self._runner.start(stack, spec, self._policy(request, parameters, spec), caller)
            answer = _Answer(request.inputs, parameters, spec, req.context)
            if is_streamed:
                first = next(outputs)
                if isinstance(first, SelectionResult):
                    answer.check(first)
                events = answer.events(chain([first], outputs))
                sse.stream(resp, events, TGI_ERRORS, req.context.id, stack.pop_all().close)
                return
            *_, result = outputs
            assert isinstance(result, SelectionResult)
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
        model = self._runner.model(None, "model")
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
            ranks_first_token=False,
            heals=bool(parameters.clean),
            echoes=bool(parameters.details and parameters.decoder_input_details),
            num_top_logprobs=(parameters.top_n_tokens or 0) if has_tokens else None,
            is_streamed=is_streamed,
            deadline=self._runner.deadline(started_at, None, "max_time"),
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


class _Answer:
    """Renders the outputs of one request."""

    def __init__(self, inputs: str, parameters: TgiParameters, spec: GenerationSpec, log: falcon.Context) -> None:
        self._parameters = parameters
        self._spec = spec
        self._prefix = inputs if parameters.return_full_text else ""
        self._log = log

    def generation(self, result: SelectionResult) -> TgiGeneration:
        """
        Raises:
            TercetError: there is no completion.
        """
        best, *others = self._suggestions(result)
        generation = TgiGeneration(generated_text=self._prefix + best.text)
        if self._parameters.details:
            details = TgiDetails(**self._sequence(best))
            if self._spec.num_branches > 1:
                details.best_of_sequences = [
                    TgiBestOfSequence(generated_text=self._prefix + other.text, **self._sequence(other))
                    for other in others
                ]
            generation.details = details
        return generation

    def events(self, outputs: Iterator[Output]) -> Iterator[bytes]:
        """One event per token. A token that may be the last waits for what follows it."""
        held: TgiStreamEvent | None = None
        rest = ""
        num_tokens = 0
        for output in outputs:
            if isinstance(output, TextDelta):
                for token in output.tokens:
                    if held is not None:
                        yield sse.event(None, held)
                    held = self._event(num_tokens, token)
                    num_tokens += 1
                    # Part of its text is held back, or it has none: it may end the text.
                    if (
                        num_tokens < self._spec.sampling.max_new_tokens
                        and token.text
                        and token.text == token.token_text
                    ):
                        yield sse.event(None, held)
                        held = None
                rest += "" if output.tokens else output.text
            elif isinstance(output, SelectionResult):
                yield sse.event(None, self._last_event(held, rest, output))

    def _event(self, index: int, token: Token) -> TgiStreamEvent:
        event = TgiStreamEvent(
            index=index, token=TgiToken(id=token.token_id, text=token.text, logprob=token.logprob, special=False)
        )
        if self._parameters.top_n_tokens:
            event.top_tokens = _top_tokens(token.tops or [])
        return event

    def _last_event(self, held: TgiStreamEvent | None, rest: str, result: SelectionResult) -> TgiStreamEvent:
        """
        Raises:
            TercetError: there is no completion.
        """
        suggestion = self._suggestions(result)[0]
        done = suggestion.result.done
        if held is None:  # the time limit has ended the text after a token that was sent
            last = TgiToken(id=done.token_ids[-1], text="", logprob=done.logprobs[-1], special=True)
            held = TgiStreamEvent(index=len(done.token_ids) - 1, token=last)
        held.token.text += rest
        held.token.special |= done.finish_reason == "eos"
        held.generated_text = self._prefix + suggestion.text
        if self._parameters.details:
            held.details = TgiStreamDetails(
                finish_reason=_FINISH_REASONS[done.finish_reason],
                generated_tokens=len(done.token_ids),
                seed=self._seed(suggestion),
                input_length=done.num_prompt_tokens,
            )
        return held

    def check(self, result: SelectionResult) -> None:
        """
        Raises:
            TercetError: there is no completion.
        """
        if not result.suggestions:
            raise _failure_error(result.failures)

    def _suggestions(self, result: SelectionResult) -> list[Suggestion]:
        """The completions; also fills in what the middleware logs.

        Raises:
            TercetError: there are none.
        """
        self.check(result)
        slowest = max(result.suggestions, key=lambda suggestion: suggestion.result.time_s).result.done
        self._log.timing = {"queue": slowest.queue_ms, "prefill": slowest.prefill_ms, "decode": slowest.decode_ms}
        self._log.log = {"model": self._spec.model, "completions": len(result.suggestions)}
        return result.suggestions

    def _sequence(self, suggestion: Suggestion) -> dict[str, Any]:
        """The fields of a `TgiSequence`."""
        done = suggestion.result.done
        kept = slice(None)
        if self._parameters.clean:
            kept = slice(done.num_typed_tokens, done.num_typed_tokens + suggestion.num_tokens)
        tokens = _tokens(done)[kept]
        fields: dict[str, Any] = {
            "finish_reason": _FINISH_REASONS[done.finish_reason],
            "generated_tokens": len(tokens),
            "seed": self._seed(suggestion),
            "prefill": _prefill(done),
            "tokens": tokens,
        }
        if self._parameters.top_n_tokens:
            fields["top_tokens"] = [_top_tokens(tops) for tops in (done.tops or [])[kept]]
        return fields

    def _seed(self, suggestion: Suggestion) -> int | None:
        return suggestion.result.seed if self._parameters.is_sampled else None


def _tokens(done: Done) -> list[TgiToken]:
    tokens = [
        TgiToken(id=id_, text=text, logprob=logprob, special=False)
        for id_, text, logprob in zip(done.token_ids, done.token_texts or [], done.logprobs, strict=True)
    ]
    if tokens and done.finish_reason == "eos":
        tokens[-1].special = True
    return tokens


def _prefill(done: Done) -> list[TgiPrefillToken]:
    ids, texts = done.prompt_ids or [], done.prompt_token_texts or []
    logprobs = done.prompt_logprobs or [None] * len(ids)
    return [
        TgiPrefillToken(id=id_, text=text, logprob=logprob)
        for id_, text, logprob in zip(ids, texts, logprobs, strict=True)
    ]


def _top_tokens(tops: list[Top]) -> list[TgiToken]:
    return [TgiToken(id=top.token_id, text=top.text, logprob=top.logprob, special=False) for top in tops]


def _failure_error(failures: list[BranchFailure]) -> TercetError:
    codes = {failure.code for failure in failures}
    if codes == {PromptTooLong.code}:
        return PromptTooLong(failures[0].detail)
    if codes == {InvalidRequest.code}:
        return InvalidRequest(failures[0].detail)
    if codes == {DeadlineExceeded.code}:
        return DeadlineExceeded(
            "No completion was ready in time; send a lower max_new_tokens.", retry_after_s=retry_after_s()
        )
    reasons = " ".join(sorted({f"{failure.code}: {failure.detail}" for failure in failures}))
    return NoCompletion(f"There is no completion. {reasons} Try again.", retry_after_s=retry_after_s())


class GenerateResource:
    """`POST /generate`: the answer is an object."""

    error_format: ClassVar[ErrorFormat] = TGI_ERRORS
    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag=TAG,
            summary="Complete a text",
            description="Greedy unless `do_sample`, `temperature`, `top_k` or `top_p` is sent.",
            bodies=(parse_tgi_body,),
            examples=EXAMPLES,
            answers={200: Answer("The completion.", {JSON: TgiGeneration, sse.CONTENT_TYPE: STREAM})},
            errors=ERRORS,
        )
    }

    def __init__(self, responder: TgiResponder) -> None:
        self._responder = responder

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._responder.respond(req, resp, req.bounded_stream.read(), "object")


class GenerateStreamResource:
    """`POST /generate_stream`: the answer is a stream of tokens."""

    error_format: ClassVar[ErrorFormat] = TGI_ERRORS
    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag=TAG,
            summary="Complete a text, as a stream of tokens",
            bodies=(parse_tgi_body,),
            examples=EXAMPLES,
            answers={200: Answer("The tokens; an error is the last event.", {sse.CONTENT_TYPE: STREAM})},
            errors=ERRORS,
        )
    }

    def __init__(self, responder: TgiResponder) -> None:
        self._responder = responder

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        self._responder.respond(req, resp, req.bounded_stream.read(), "stream")


class InfoResource:
    """`GET /info`."""

    error_format: ClassVar[ErrorFormat] = TGI_ERRORS
    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag=TAG, summary="The default model and its limits", answers={200: Answer("The model.", {JSON: TgiInfo})}
        )
    }

    def __init__(self, plan: Plan, admission: Admission, default_model: str) -> None:
        self._plan = plan
        self._admission = admission
        self._model = plan.model(default_model)

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        model = self._model
        slot = next(slot for slot in self._plan.slots if slot.model == model.name)
        resp.data = _encode(
            TgiInfo(
                model_id=model.name,
                model_sha=model.revision or None,
                model_dtype=self._admission.states()[slot.index].dtype,
                model_device_type=slot.device.partition(":")[0],
                model_pipeline_tag="text-generation",
                max_concurrent_requests=self._plan.max_running,
                max_best_of=MAX_BEST_OF,
                max_stop_sequences=MAX_STOP_SEQUENCES,
                max_top_n_tokens=MAX_TOP_N_TOKENS,
                max_input_tokens=model.n_ctx - 1,
                max_total_tokens=model.n_ctx,
                router="tercet",
            )
        )

    on_head = on_get


class EndpointResource:
    """`GET /endpoint`: the address of this service, as the request names it."""

    operations: ClassVar[Operations] = {
        "GET": Operation(tag=TAG, summary="This service's address", answers={200: Answer("A URL.", {TEXT: str})})
    }

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = TEXT
        resp.text = f"{req.scheme}://{req.get_header('Host')}"

    on_head = on_get
