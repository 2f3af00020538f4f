"""`POST /autocomplete`, the editor's dialect: the contract of Write With Transformer, kept and extended.

Translates between the public schema and generation's specs and results; how completions are made is not known here.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

import falcon
import msgspec
from msgspec import structs

from gateway.api import sse
from gateway.api.feedback import FeedbackStore
from gateway.api.operation import JSON, Answer, Events, Operation, Operations
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
from gateway.generation.fanout import Fanout
from gateway.generation.request import BranchFailure, GenerationSpec, RequestContext, TextDelta
from gateway.generation.selection import REJECTION_DETAILS, SelectionPolicy, SelectionResult, Suggestion
from gateway.generation.sessions import Sessions
from gateway.generation.suggestions import suggest
from gateway.generation.trimming import MIN_TOKENS
from gateway.pool.quota import OwnerQuota
from shared.errors import (
    ClientGone,
    DeadlineExceeded,
    FieldError,
    InvalidJson,
    InvalidRequest,
    NoCompletion,
    NotReady,
    Overloaded,
    Problem,
    QuotaExceeded,
    Superseded,
    UnknownModel,
    retry_after_s,
)
from shared.hangups import HangupWatcher
from shared.plan import Model, Plan
from shared.protocol import Done, Sampling

# Prompt tokens, where the request does not say.
DEFAULT_MAX_TOKENS = 256
# Characters at a document's beginning that identify it where there is no session.
DOCUMENT_CHARS = 200
# JavaScript's numbers are exact up to 2⁵³: a client must be able to send back the seed that it reads.
MAX_DRAWN_SEED = 2**53 - 100
_SAMPLING_FIELDS = tuple(set(Sampling.__struct_fields__) & set(AutocompleteRequest.__struct_fields__))
_encode = msgspec.json.Encoder().encode


class AutocompleteResource:
    """Answers `POST /autocomplete`, at once or as server-sent events."""

    operations: ClassVar[Operations] = {
        "POST": Operation(
            tag="Completions",
            summary="Complete a text",
            description="Answers up to `n_samples` sentences that continue `context`, best first. The body is parsed as"
            " JSON, whatever its `Content-Type`. With `stream`, errors after the first event are its last event.",
            bodies=(parse_autocomplete_request,),
            examples={
                "three sentences": {"context": "The old man looked at the sea and"},
                "a line, streamed": {"context": "Dear Sir or ", "single_line": True, "stream": True},
            },
            answers={
                200: Answer(
                    "The sentences. `partial`: some branches failed, as `errors` says.",
                    {
                        JSON: AutocompleteResponse,
                        sse.CONTENT_TYPE: Events(
                            {
                                "token": TokenEvent,
                                "sentence": SentenceEvent,
                                "done": AutocompleteResponse,
                                "error": Problem,
                            }
                        ),
                    },
                )
            },
            errors=(
                InvalidJson,
                InvalidRequest,
                UnknownModel,
                Superseded,
                QuotaExceeded,
                NotReady,
                Overloaded,
                NoCompletion,
                DeadlineExceeded,
            ),
        )
    }

    def __init__(
        self,
        plan: Plan,
        fanout: Fanout,
        quota: OwnerQuota,
        hangups: HangupWatcher,
        feedback_store: FeedbackStore,
        timeout_s: float,
        similarity: float,
    ) -> None:
        """
        Args:
            timeout_s: the default and upper bound of `max_time`.
            similarity: percent from which two sentences are near-duplicates.
        """
        self._models = {model.name: model for model in plan.models}
        self._default_model = plan.slots[0].model
        self._fanout = fanout
        self._quota = quota
        self._sessions = Sessions()
        self._hangups = hangups
        self._feedback_store = feedback_store
        self._timeout_s = timeout_s
        self._similarity = similarity

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        """
        Raises:
            InvalidJson, InvalidRequest, UnknownModel: the request is wrong.
            QuotaExceeded, Overloaded, NotReady, Superseded, ClientGone: it was not started, or cancelled.
            NoCompletion, DeadlineExceeded, InvalidRequest: it has no suggestion. A stream has begun then: the error is
                its last event.
        """
        started_at = time.monotonic()
        with ExitStack() as stack:
            self._fanout.check(req.context.owner)
            stack.enter_context(
                self._quota.entering(req.context.owner, req.context.key and req.context.key.concurrency)
            )
            request = parse_autocomplete_request(req.bounded_stream.read())
            seed = secrets.randbelow(MAX_DRAWN_SEED) if request.seed is None else request.seed
            context = RequestContext(self._spec(request, req.context, seed, started_at))
            hang_up = partial(context.cancel, ClientGone("The client hung up before its answer was ready."))
            stack.enter_context(self._sessions.superseding(context))
            stack.enter_context(self._hangups.watching(req.env.get("gunicorn.socket"), hang_up))
            stack.callback(context.cancel)
            try:
                self._fanout.start(context)
            except ClientGone as error:  # the reservation's only word for a cancelled request
                raise context.cancel_reason or error from None
            outputs = suggest(context, self._fanout, self._policy(request))
            render_sentence = partial(_sentence, is_explained=request.explain is not None)
            respond = partial(self._respond, req, context, started_at, render_sentence)
            if request.stream:
                resp.content_type = sse.CONTENT_TYPE
                resp.set_headers(sse.HEADERS)
                events = _events(outputs, render_sentence, respond)
                resp.stream = sse.EventStream(events, req.context.id, stack.pop_all().close)
                return
            *_, result = outputs
            assert isinstance(result, SelectionResult)
        resp.data = _encode(respond(result)) + b"\n"  # a terminal's prompt should start on a new line

    def _respond(
        self,
        req: falcon.Request,
        context: RequestContext,
        started_at: float,
        render_sentence: Callable[[Suggestion], Sentence],
        result: SelectionResult,
    ) -> AutocompleteResponse:
        """The whole answer; also fills in what the middleware logs, and remembers the answer for feedback.

        Raises:
            NoCompletion, DeadlineExceeded: there is no suggestion.
        """
        if not result.suggestions:
            raise _no_suggestion_error(result.failures)
        spec, now = context.spec, time.monotonic()
        seconds = now - started_at
        sentences = [render_sentence(suggestion) for suggestion in result.suggestions]
        slowest = max(sentences, key=lambda sentence: sentence.time)
        req.context.timing = {
            "queue": slowest.queue_ms, "prefill": slowest.prefill_ms, "decode": slowest.decode_ms,
        }  # fmt: skip
        req.context.log = {
            "model": spec.model,
            "context_chars": len(spec.prompt),
            "sentences": len(sentences),
            "partial": result.is_partial,
            "top_ups": context.num_top_ups,
            # Time for trimming, selection and replacements, after the first branches had finished.
            "added_ms": round(1e3 * (now - (context.first_outcomes_at or now)), 2),
        }
        self._feedback_store.add_answer(spec.owner, spec.request_id, len(sentences), seconds)
        return AutocompleteResponse(
            id=spec.request_id,
            model=spec.model,
            seed=spec.seed,
            sentences=sentences,
            time=round(seconds, 4),
            partial=result.is_partial,
            errors=[
                FailedBranch(branch=failure.branch, code=failure.code, detail=failure.detail)
                for failure in result.failures
            ],
        )

    def _policy(self, request: AutocompleteRequest) -> SelectionPolicy:
        return SelectionPolicy(
            prompt=request.context,
            num_suggestions=request.n_samples,
            length=request.length,
            similarity=self._similarity,
            keeps_greedy_text=request.temperature == 0,
        )

    def _spec(
        self, request: AutocompleteRequest, context: falcon.Context, seed: int, started_at: float
    ) -> GenerationSpec:
        """
        Raises:
            UnknownModel, InvalidRequest: a field is out of the range that the plan or the model allows.
        """
        model = self._model(request.model_size)
        if request.max_time is not None and request.max_time > self._timeout_s:
            raise _invalid("max_time", f"must be at most {self._timeout_s:g} seconds (TERCET_TIMEOUT_S)")
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
        return GenerationSpec(
            request_id=context.id,
            model=model.name,
            prompt=request.context,
            max_prompt_tokens=request.max_tokens or min(DEFAULT_MAX_TOKENS, max_prompt_tokens),
            num_completions=request.n_samples,
            seed=seed,
            sampling=sampling_of(request),
            ranks_first_token=True,
            heals=True,
            echoes=False,
            num_top_logprobs=request.explain,
            is_streamed=request.stream,
            deadline=started_at + (request.max_time or self._timeout_s),
            owner=context.owner,
            session=request.session,
            document=_document_key(request, context.owner),
        )

    def _model(self, name: str | None) -> Model:
        name = name or self._default_model
        if name not in self._models:
            served = ", ".join(self._models)
            raise UnknownModel(
                f"model_size {name!r} is not served here; served: {served}.",
                fields=(FieldError("model_size", f"must be one of: {served}"),),
            )
        return self._models[name]


def sampling_of(request: AutocompleteRequest) -> Sampling:
    """A request's sampling parameters, for every branch."""
    # The public schema and the internal protocol give a parameter the same name.
    shared = {name: getattr(request, name) for name in _SAMPLING_FIELDS}
    return Sampling(**{**shared, "max_new_tokens": _num_new_tokens(request), "stop": tuple(request.stop)})


def _num_new_tokens(request: AutocompleteRequest) -> int:
    return max(request.length, MIN_TOKENS)


def _document_key(request: AutocompleteRequest, owner: str) -> int | None:
    """Equal for requests from the same document: by session, else by its beginning, which typing leaves as it is.

    None for a short document without a session: its prompt is not worth a place in the cache. Python salts `hash` per
    process, so the key says nothing outside this process.
    """
    if request.session is not None:
        return hash((owner, request.session))
    return hash((owner, request.context[:DOCUMENT_CHARS])) if len(request.context) >= DOCUMENT_CHARS else None


def _events(
    outputs: Iterator[TextDelta | Suggestion | SelectionResult],
    render_sentence: Callable[[Suggestion], Sentence],
    respond: Callable[[SelectionResult], AutocompleteResponse],
) -> Iterator[tuple[str, object]]:
    """Names and data of a stream's events; the whole answer is the last."""
    for output in outputs:
        if isinstance(output, TextDelta):
            yield "token", TokenEvent(branch=output.branch, text="".join(output.texts))
        elif isinstance(output, Suggestion):
            sentence = structs.asdict(render_sentence(output))
            yield "sentence", SentenceEvent(branch=output.result.branch, **sentence)
        else:
            yield "done", respond(output)


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


def _no_suggestion_error(failures: list[BranchFailure]) -> DeadlineExceeded | InvalidRequest | NoCompletion:
    if all(failure.code == InvalidRequest.code for failure in failures):
        return InvalidRequest(failures[0].detail)  # the same for all: the worker refuses what its model cannot compute
    if all(failure.code == "deadline_exceeded" for failure in failures):
        return DeadlineExceeded(
            "No completion was ready in time; allow a longer max_time or a shorter length.",
            retry_after_s=retry_after_s(),
        )
    reasons = " ".join(sorted({f"{failure.code}: {failure.detail}" for failure in failures}))
    if all(failure.code in REJECTION_DETAILS for failure in failures):
        return NoCompletion(
            f"No completion was worth showing. {reasons} Try another seed, a higher temperature, or more context.",
            retry_after_s=retry_after_s(),
        )
    return NoCompletion(f"Every branch failed. {reasons} Try again.", retry_after_s=retry_after_s())
