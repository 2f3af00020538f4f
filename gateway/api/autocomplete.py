"""What the gateway answers at each path: requests are checked and answers shaped here, fanned out elsewhere."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import falcon
import msgspec

from gateway.api import sse as streaming
from gateway.api.feedback import FeedbackStore
from gateway.api.schema import (
    AutocompleteRequest,
    AutocompleteResponse,
    parse_autocomplete_request,
)
from gateway.api.sse import EventStream
from gateway.generation.fanout import BranchSpec, Fanout, GenerationSpec, RequestContext, Sessions, TextDelta
from gateway.generation.selection import WHY_NOT, SelectionPolicy, Suggestions
from gateway.generation.suggestions import SelectedSentence, suggest
from gateway.generation.trimming import MIN_TOKENS
from gateway.pool.admission import RETRY_AFTER_S
from shared.errors import ClientGone, DeadlineExceeded, FieldError, InvalidRequest, NoCompletion, UnknownModel
from shared.hangups import HangupWatcher
from shared.plan import Model, Plan
from shared.protocol import MAX_SEED, BranchFailure, Sampling

DEFAULT_MAX_TOKENS = 256
DOCUMENT_CHARS = 200
# JavaScript's numbers are exact up to 2⁵³: a seed that it reads must be the one that it sends back.
MAX_DRAWN_SEED = 2**53 - 100
_encode = msgspec.json.Encoder().encode


class AutocompleteResource:
    """`POST /autocomplete`: the contract of Write With Transformer, kept and extended."""

    def __init__(
        self,
        plan: Plan,
        fanout: Fanout,
        hangups: HangupWatcher,
        feedback_store: FeedbackStore,
        timeout_s: float,
        similarity: float,
    ) -> None:
        self._models = {model.name: model for model in plan.models}
        self._default_model = plan.slots[0].model
        self._fanout = fanout
        self._sessions = Sessions()
        self._hangups = hangups
        self._ledger = feedback_store
        self._timeout_s = timeout_s
        self._similarity = similarity

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        start = time.monotonic()
        request = parse_autocomplete_request(req.bounded_stream.read())
        seed = secrets.randbelow(MAX_DRAWN_SEED) if request.seed is None else request.seed
        run = RequestContext(self._ask(request, req.context.id, start))
        make_branch = partial(_branch, request, seed)
        gone = partial(run.cancel, ClientGone("The client hung up before its answer was ready."))
        with ExitStack() as stack:
            stack.enter_context(self._sessions.newest(run))
            stack.enter_context(self._hangups.watching(req.env.get("gunicorn.socket"), gone))
            stack.callback(run.cancel)
            try:
                self._fanout.start(run, [make_branch(number) for number in range(request.n_samples)])
            except ClientGone as error:
                raise run.ended_by or error from None
            told = suggest(run, self._fanout, self._taste(request), make_branch)
            events = self._events(told, partial(self._answer, req, run, seed, start))
            if request.stream:
                resp.content_type = streaming.CONTENT_TYPE
                resp.set_headers(streaming.HEADERS)
                resp.stream = EventStream(events, req.context.id, stack.pop_all().close)
                return
            *_, (_, answer) = events
        resp.data = _encode(answer) + b"\n"  # for whoever reads it in a terminal

    def _events(
        self,
        told: Iterator[TextDelta | SelectedSentence | Suggestions],
        answer: Callable[[Suggestions], AutocompleteResponse],
    ) -> Iterator[tuple[str, object]]:
        """Names and data of a stream's events, the whole answer last."""
        for one in told:
            if isinstance(one, TextDelta):
                yield "token", {"branch": one.branch, "text": "".join(one.texts)}
            elif isinstance(one, SelectedSentence):
                yield "sentence", {"branch": one.branch, **msgspec.to_builtins(one.sentence)}
            else:
                yield "done", answer(one)

    def _answer(
        self, req: falcon.Request, run: RequestContext, seed: int, start: float, merged: Suggestions
    ) -> AutocompleteResponse:
        if not merged.sentences:
            raise _nothing(merged.failures)
        ask, now = run.ask, time.monotonic()
        seconds = now - start
        slowest = max(merged.sentences, key=lambda sentence: sentence.time)
        req.context.timing = {
            "queue": slowest.queue_ms, "prefill": slowest.prefill_ms, "decode": slowest.decode_ms,
        }  # fmt: skip
        req.context.log = {
            "model": ask.model,
            "context_chars": len(ask.prompt),
            "sentences": len(merged.sentences),
            "partial": merged.is_partial,
            "top_ups": run.num_top_ups,
            # What cleaning, choosing and replacing took after the first branches had answered.
            "added_ms": round(1e3 * (now - (run.heard_first_at or now)), 2),
        }
        self._ledger.note(ask.request_id, len(merged.sentences), seconds)
        return AutocompleteResponse(
            id=ask.request_id,
            model=ask.model,
            seed=seed,
            sentences=merged.sentences,
            time=round(seconds, 4),
            partial=merged.is_partial,
            errors=merged.failures,
        )

    def _taste(self, request: AutocompleteRequest) -> SelectionPolicy:
        return SelectionPolicy(
            context=request.context,
            num_sentences=request.n_samples,
            length=request.length,
            similarity=self._similarity,
            is_literal=request.temperature == 0,
            is_explained=request.explain is not None,
        )

    def _ask(self, request: AutocompleteRequest, request_id: str, start: float) -> GenerationSpec:
        model = self._model(request.model_size)
        if request.max_time is not None and request.max_time > self._timeout_s:
            raise _invalid("max_time", f"must be at most {self._timeout_s:g} seconds (TERCET_TIMEOUT_S)")
        room = model.n_ctx - _num_new_tokens(request)
        if room < 1:
            raise _invalid("length", f"must be below {model.n_ctx}, the context of {model.name}")
        if request.max_tokens is not None and request.max_tokens > room:
            raise _invalid("max_tokens", f"must be at most {room}: {model.name} holds {model.n_ctx} tokens with length")
        if request.top_k > model.vocab_size:
            raise _invalid("top_k", f"must be at most {model.vocab_size}, the vocabulary of {model.name}")
        return GenerationSpec(
            request_id=request_id,
            model=model.name,
            prompt=request.context,
            max_prompt_tokens=request.max_tokens or min(DEFAULT_MAX_TOKENS, room),
            deadline=start + (request.max_time or self._timeout_s),
            session=request.session,
            document=_document(request),
            is_streamed=request.stream,
            num_likeliest=request.explain,
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


def _document(request: AutocompleteRequest) -> int | None:
    """What tells a document from others: its session, else its beginning, which stays while its end is typed.

    A short one without a session has no such thing, nor a prompt worth remembering. `hash` is salted by process.
    """
    if request.session is not None:
        return hash(("session", request.session))
    return hash(request.context[:DOCUMENT_CHARS]) if len(request.context) >= DOCUMENT_CHARS else None


def _branch(request: AutocompleteRequest, seed: int, number: int) -> BranchSpec:
    return BranchSpec(index=number, seed=(seed + number) % (MAX_SEED + 1), sampling=sampling_of(request, number))


def sampling_of(request: AutocompleteRequest, number: int) -> Sampling:
    """How a request's branch of this number draws its tokens."""
    return Sampling(
        max_new_tokens=_num_new_tokens(request),
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        repetition_penalty=request.repetition_penalty,
        stop=tuple(request.stop),
        single_line=request.single_line,
        # Three greedy branches would be one: each starts from the next likeliest token.
        first_rank=number if request.temperature == 0 else 0,
    )


def _num_new_tokens(request: AutocompleteRequest) -> int:
    """Those asked for, and in a short one some to finish a word with."""
    return max(request.length, MIN_TOKENS)


def _invalid(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}.", fields=(FieldError(field, message),))


def _nothing(failures: list[BranchFailure]) -> DeadlineExceeded | NoCompletion:
    if all(failure.code == "deadline_exceeded" for failure in failures):
        return DeadlineExceeded(
            "No completion was ready in time; allow a longer max_time or a shorter length.",
            retry_after_s=RETRY_AFTER_S,
        )
    reasons = " ".join(sorted({f"{failure.code}: {failure.detail}" for failure in failures}))
    if all(failure.code in WHY_NOT for failure in failures):
        return NoCompletion(
            f"No completion was worth showing. {reasons} Try another seed, a higher temperature, or more context.",
            retry_after_s=RETRY_AFTER_S,
        )
    return NoCompletion(f"Every branch failed. {reasons} Try again.", retry_after_s=RETRY_AFTER_S)
