"""`POST /autocomplete`, the editor's dialect: the contract of Write With Transformer, kept and extended.

Translates between the public schema and generation's specs and results; how completions are made is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import falcon
import msgspec
from msgspec import structs

from gateway.api import sse
from gateway.api.callers import SESSION_PARAMETER, caller_of
from gateway.api.error_formats import PROBLEM_DETAILS
from gateway.api.feedback import FeedbackStore
from gateway.api.jobs import ERRORS_OF_JOBS, JOB_ACCEPTED, JOB_HEADERS, JobResponse, JobSubmitter, prefers_async
from gateway.api.operation import COMPLETION_ERRORS, JSON, Answer, Events, Operation, Operations
from gateway.api.schema import (
    AutocompleteRequest,
    AutocompleteResponse,
    FailedBranch,
    Sentence,
    SentenceEvent,
    TokenEvent,
    TokenExplanation,
    parse_autocomplete_request,
)
from gateway.generation.failures import are_rejections, no_completion_error
from gateway.generation.request import GenerationSpec, RequestContext
from gateway.generation.request_starter import Caller, RequestStarter, document_key, draw_seed
from gateway.generation.selection import SelectionPolicy, SelectionResult, Suggestion
from gateway.generation.suggestions import Output, TextDelta
from gateway.generation.trimming import MIN_TOKENS
from gateway.jobs.executor import Cancelling
from gateway.jobs.store import Job
from shared.errors import (
    FieldError,
    InvalidRequest,
    Problem,
    Superseded,
    UnknownModel,
)
from shared.protocol import Done, Prediction, Sampling

# Prompt tokens, where the request does not say.
DEFAULT_MAX_TOKENS = 256
_SAMPLING_FIELDS = tuple(set(Sampling.__struct_fields__) & set(AutocompleteRequest.__struct_fields__))
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class PredictionSettings:
    """What `tercet calibrate` fits.

    Attributes:
        temperature: calibrates the probabilities of predicted words.
        min_usefulness: keys that a prediction should save, to be shown.
    """

    temperature: float = 1.0
    min_usefulness: float = 0.0


class AutocompleteResource:
    """Answers `POST /autocomplete`, at once or as server-sent events."""

    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag="Completions",
            summary="Complete a text",
            description="Answers up to `n_samples` sentences that continue `context`, best first; none if no"
            " completion was worth showing. The body is parsed as"
            " JSON, whatever its `Content-Type`. With `stream`, errors after the first event are its last event.",
            bodies=(parse_autocomplete_request,),
            examples={
                "three sentences": {"context": "The old man looked at the sea and"},
                "a line, streamed": {"context": "Dear Sir or ", "single_line": True, "stream": True},
            },
            parameters=(SESSION_PARAMETER, *JOB_HEADERS),
            answers={
                200: Answer(
                    "The sentences. `partial`: some branches failed, as `errors` says. For the `Idempotency-Key`"
                    " of an earlier job: the job, if it is final.",
                    {
                        JSON: (AutocompleteResponse, JobResponse),
                        sse.CONTENT_TYPE: Events(
                            {
                                "token": TokenEvent,
                                "sentence": SentenceEvent,
                                "done": AutocompleteResponse,
                                "error": Problem,
                            }
                        ),
                    },
                ),
                202: JOB_ACCEPTED,
            },
            errors=(*COMPLETION_ERRORS, UnknownModel, Superseded, *ERRORS_OF_JOBS),
        )
    }

    def __init__(
        self,
        starter: RequestStarter,
        feedback_store: FeedbackStore,
        similarity: float,
        prediction: PredictionSettings,
        submitter: JobSubmitter | None = None,
    ) -> None:
        """
        Args:
            similarity: percent from which two sentences are near-duplicates.
            prediction: of requests whose strategy is `predict`.
            submitter: None: there are no jobs.
        """
        self._starter = starter
        self._feedback_store = feedback_store
        self._similarity = similarity
        self._prediction = prediction
        self._submitter = submitter

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """As `respond`; with `Prefer: respond-async` the answer is a job."""
        body = req.bounded_stream.read()
        if self._submitter is None or not prefers_async(req):
            self.respond(req, resp, body)
            return
        request = parse_autocomplete_request(body)
        self.check(request, caller_of(req))
        self._submitter.respond(req, resp, request)
        resp.set_header("Preference-Applied", "respond-async")

    def respond(self, req: falcon.Request, resp: falcon.Response, body: bytes) -> None:
        """Answer a request's body.

        Raises:
            InvalidJson, InvalidRequest, UnknownModel: the request is wrong.
            QuotaExceeded, Overloaded, NotReady, Superseded, ClientGone: it was not started, or cancelled.
            NoCompletion, DeadlineExceeded, InvalidRequest: it has no completion. A stream has begun then: the error is
                its last event.
        """
        started_at = time.monotonic()
        caller = caller_of(req)
        with ExitStack() as stack:
            stack.enter_context(self._starter.admitting(caller))
            request = parse_autocomplete_request(body)
            context, outputs = self._start(stack, request, caller, started_at)
            render_sentence = partial(_sentence, is_explained=request.explain is not None)
            respond = partial(self._respond, req.context, context, started_at, render_sentence)
            if request.stream:
                events = _events(outputs, render_sentence, respond)
                sse.stream(resp, events, PROBLEM_DETAILS, req.context.id, stack.pop_all().close)
                return
            *_, result = outputs
            assert isinstance(result, SelectionResult)
        resp.data = _encode(respond(result)) + b"\n"  # a terminal's prompt should start on a new line

    def check(self, request: AutocompleteRequest, caller: Caller) -> None:
        """
        Raises:
            UnknownModel, InvalidRequest: a field is out of the range that the plan or the model allows.
        """
        self._spec(request, caller, time.monotonic())

    def compute(self, job: Job, cancelling: Cancelling) -> bytes:
        """The answer to a job's request, as `POST /autocomplete` would send it.

        Raises:
            TercetError: as `respond`.
        """
        # Its queue bounds a key's jobs; the key's concurrency is left to requests that wait.
        caller = Caller(request_id=job.id, owner=job.owner, max_concurrency=0, cancelling=cancelling)
        started_at = time.monotonic()
        request = parse_autocomplete_request(job.request)
        with ExitStack() as stack:
            stack.enter_context(self._starter.admitting(caller))
            context, outputs = self._start(stack, request, caller, started_at)
            *_, result = outputs
            assert isinstance(result, SelectionResult)
        render_sentence = partial(_sentence, is_explained=request.explain is not None)
        return _encode(_response(context, started_at, render_sentence, result))

    def _start(
        self, stack: ExitStack, request: AutocompleteRequest, caller: Caller, started_at: float
    ) -> tuple[RequestContext, Iterator[Output]]:
        spec = self._spec(request, caller, started_at)
        return self._starter.start(stack, spec, self._policy(request), caller)

    def _respond(
        self,
        log: falcon.Context,
        context: RequestContext,
        started_at: float,
        render_sentence: Callable[[Suggestion], Sentence],
        result: SelectionResult,
    ) -> AutocompleteResponse:
        """The whole answer; also fills in what the middleware logs, and remembers the answer for feedback.

        Raises:
            NoCompletion, DeadlineExceeded: there is no completion.
        """
        response = _response(context, started_at, render_sentence, result)
        now = time.monotonic()
        if response.sentences:
            slowest = max(response.sentences, key=lambda sentence: sentence.time)
            log.timing = {"queue": slowest.queue_ms, "prefill": slowest.prefill_ms, "decode": slowest.decode_ms}
        log.log = {
            "model": response.model,
            "context_chars": context.num_prompt_chars,
            "sentences": len(response.sentences),
            "partial": result.is_partial,
            "top_ups": context.num_top_ups,
            # Time for trimming, selection and replacements, after the first branches had finished.
            "added_ms": round(1e3 * (now - (context.first_outcomes_at or now)), 2),
        }
        usefulness = [sentence.usefulness for sentence in response.sentences]
        self._feedback_store.add_answer(context.spec.owner, response.id, usefulness, response.time)
        return response

    def _policy(self, request: AutocompleteRequest) -> SelectionPolicy:
        return SelectionPolicy(
            prompt=request.context,
            num_suggestions=request.n_samples,
            length=request.length,
            similarity=self._similarity,
            keeps_greedy_text=request.temperature == 0,
            is_verbatim=not request.clean,
            min_usefulness=self._prediction.min_usefulness if request.strategy == "predict" else None,
        )

    def _spec(self, request: AutocompleteRequest, caller: Caller, started_at: float) -> GenerationSpec:
        """
        Raises:
            UnknownModel, InvalidRequest: a field is out of the range that the plan or the model allows.
        """
        model = self._starter.model(request.model_size, "model_size")
        deadline = self._starter.deadline(started_at, request.max_time, "max_time")
        max_prompt_tokens = model.n_ctx - _num_new_tokens(request)
        if max_prompt_tokens < 1:
            raise _invalid("length", f"must be below {model.n_ctx}, the context of {model.name}")
        if request.max_tokens is not None and request.max_tokens > max_prompt_tokens:
            raise _invalid(
                "max_tokens",
                f"must be at most {max_prompt_tokens}: {model.name} has room for {model.n_ctx} tokens, length included",
            )
        if request.top_k > model.vocab_size:
            raise _invalid("top_k", f"must be at most {model.vocab_size}, the vocabulary of {model.name}")
        session = request.session or caller.session
        return GenerationSpec(
            request_id=caller.request_id,
            model=model.name,
            prompts=(request.context,),
            max_prompt_tokens=request.max_tokens or min(DEFAULT_MAX_TOKENS, max_prompt_tokens),
            num_completions=request.n_samples,
            seed=draw_seed() if request.seed is None else request.seed,
            sampling=sampling_of(request),
            ranks_first_token=True,
            heals=request.clean,
            echoes=False,
            num_top_logprobs=request.explain,
            is_streamed=request.stream,
            deadline=deadline,
            owner=caller.owner,
            session=session,
            document=document_key(caller.owner, session, request.context),
            predict=Prediction(temperature=self._prediction.temperature, is_verbatim=not request.clean)
            if request.strategy == "predict"
            else None,
        )


def sampling_of(request: AutocompleteRequest) -> Sampling:
    """A request's sampling parameters, for every branch."""
    # The public schema and the internal protocol give a parameter the same name.
    shared = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    return Sampling(**{**shared, "max_new_tokens": _num_new_tokens(request), "stop": tuple(request.stop)})


def _num_new_tokens(request: AutocompleteRequest) -> int:
    return max(request.length, MIN_TOKENS) if request.clean else request.length


def _response(
    context: RequestContext,
    started_at: float,
    render_sentence: Callable[[Suggestion], Sentence],
    result: SelectionResult,
) -> AutocompleteResponse:
    """
    Raises:
        NoCompletion, DeadlineExceeded, InvalidRequest: there is no completion. If all were rejected, the answer is
            whole and has no sentence: another attempt would end alike.
    """
    if not result.suggestions and not are_rejections(result.failures):
        raise no_completion_error(result.failures, faster="allow a longer max_time or a shorter length")
    spec = context.spec
    return AutocompleteResponse(
        id=spec.request_id,
        model=spec.model,
        seed=spec.seed,
        sentences=[render_sentence(suggestion) for suggestion in result.suggestions],
        time=round(time.monotonic() - started_at, 4),
        partial=result.is_partial,
        errors=[
            FailedBranch(branch=failure.branch, code=failure.code, detail=failure.detail) for failure in result.failures
        ],
    )


def _events(
    outputs: Iterator[Output],
    render_sentence: Callable[[Suggestion], Sentence],
    respond: Callable[[SelectionResult], AutocompleteResponse],
) -> Iterator[bytes]:
    """A stream's events; the whole answer is the last."""
    for output in outputs:
        if isinstance(output, TextDelta):
            yield sse.event("token", TokenEvent(branch=output.branch, text=output.text))
        elif isinstance(output, Suggestion):
            sentence = structs.asdict(render_sentence(output))
            yield sse.event("sentence", SentenceEvent(branch=output.result.branch, **sentence))
        else:
            yield sse.event("done", respond(output))


def _sentence(suggestion: Suggestion, *, is_explained: bool) -> Sentence:
    result = suggestion.result
    done = result.done
    return Sentence(
        value=suggestion.text,
        time=round(result.time_s, 4),
        score=suggestion.score,
        finish_reason=done.finish_reason,
        seed=result.seed,
        slot=result.slot,
        model=result.model,
        tokens=suggestion.num_tokens,
        cached_tokens=done.cached_tokens,
        queue_ms=round(done.queue_ms, 2),
        prefill_ms=round(done.prefill_ms, 2),
        decode_ms=round(done.decode_ms, 2),
        usefulness=done.usefulness,
        explanation=_explanation(done, suggestion.num_tokens) if is_explained else None,
    )


def _explanation(done: Done, num_tokens: int) -> list[TokenExplanation]:
    kept = slice(done.num_typed_tokens, done.num_typed_tokens + num_tokens)
    return [
        TokenExplanation(text=text, logprob=logprob, likeliest=[(top.text, top.logprob) for top in tops])
        for text, logprob, tops in zip(
            (done.token_texts or [])[kept], done.logprobs[kept], (done.tops or [])[kept], strict=True
        )
    ]


def _invalid(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}.", fields=(FieldError(field, message),))
