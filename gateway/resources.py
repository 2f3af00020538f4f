"""What the gateway answers at each path: requests are checked and answers shaped here, fanned out elsewhere."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import falcon
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.admission import RETRY_AFTER_S, Admission
from gateway.fanout import Ask, Branch, Fanout, Run, Sessions
from gateway.merge import BranchResult, merge
from gateway.metrics import Metrics
from shared.errors import ClientGone, DeadlineExceeded, FieldError, InvalidRequest, NoCompletion, UnknownModel
from shared.hangups import HangupWatcher
from shared.schemas import (
    ALIASES,
    MAX_SEED,
    AutocompleteRequest,
    AutocompleteResponse,
    BranchFailure,
    Sampling,
    parse_request,
)
from shared.slots import DRAINING_FILE, Model, Plan

DEFAULT_MAX_TOKENS = 256
DOCUMENT_CHARS = 200
_encode = msgspec.json.Encoder().encode


class AutocompleteResource:
    """`POST /autocomplete`: the contract of Write With Transformer, kept and extended."""

    def __init__(self, plan: Plan, fanout: Fanout, hangups: HangupWatcher, timeout_s: float) -> None:
        self._models = {model.name: model for model in plan.models}
        self._default_model = plan.slots[0].model
        self._fanout = fanout
        self._sessions = Sessions()
        self._hangups = hangups
        self._timeout_s = timeout_s

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        start = time.monotonic()
        request = parse_request(req.bounded_stream.read(), AutocompleteRequest, ALIASES)
        ask = self._ask(request, req.context.id, start)
        run = Run(ask)
        gone = partial(run.cancel, ClientGone("The client hung up before its answer was ready."))
        outcomes: list[BranchResult | BranchFailure] = []
        with (
            self._sessions.newest(run),
            self._hangups.watching(req.env.get("gunicorn.socket"), gone),
            suppress(ClientGone),  # told below, by the reason
        ):
            outcomes = self._fanout.carry_out(run)
        if run.ended_by is not None:
            raise run.ended_by
        failures = [outcome for outcome in outcomes if isinstance(outcome, BranchFailure)]
        merged = merge([outcome for outcome in outcomes if isinstance(outcome, BranchResult)], failures)
        if not merged.sentences:
            raise _nothing(merged.failures)
        resp.data = (
            _encode(
                AutocompleteResponse(
                    id=ask.request_id,
                    model=ask.model,
                    sentences=merged.sentences,
                    time=round(time.monotonic() - start, 4),
                    partial=merged.is_partial,
                    errors=merged.failures,
                )
            )
            + b"\n"
        )  # for whoever reads it in a terminal
        best = max(merged.sentences, key=lambda sentence: sentence.time)
        req.context.timing = {
            "queue": best.queue_ms, "prefill": best.prefill_ms, "decode": best.decode_ms,
        }  # fmt: skip
        req.context.log = {
            "model": ask.model,
            "context_chars": len(request.context),
            "branches": len(ask.branches),
            "sentences": len(merged.sentences),
            "partial": merged.is_partial,
        }

    def _ask(self, request: AutocompleteRequest, request_id: str, start: float) -> Ask:
        model = self._model(request.model_size)
        if request.stream:
            raise _invalid("stream", "must be false: streaming is not offered yet")
        if request.max_time is not None and request.max_time > self._timeout_s:
            raise _invalid("max_time", f"must be at most {self._timeout_s:g} seconds (TERCET_TIMEOUT_S)")
        room = model.n_ctx - request.length
        if room < 1:
            raise _invalid("length", f"must be below {model.n_ctx}, the context of {model.name}")
        if request.max_tokens is not None and request.max_tokens > room:
            raise _invalid("max_tokens", f"must be at most {room}: {model.name} holds {model.n_ctx} tokens with length")
        if request.top_k > model.vocab_size:
            raise _invalid("top_k", f"must be at most {model.vocab_size}, the vocabulary of {model.name}")
        seed = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed
        return Ask(
            request_id=request_id,
            model=model.name,
            prompt=request.context,
            max_prompt_tokens=request.max_tokens or min(DEFAULT_MAX_TOKENS, room),
            branches=[
                Branch(index, (seed + index) % (MAX_SEED + 1), _sampling(request, index))
                for index in range(request.n_samples)
            ],
            deadline=start + (request.max_time or self._timeout_s),
            session=request.session,
            document=_document(request),
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


def _sampling(request: AutocompleteRequest, branch: int) -> Sampling:
    return Sampling(
        max_new_tokens=request.length,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        repetition_penalty=request.repetition_penalty,
        stop=tuple(request.stop),
        single_line=request.single_line,
        # Three greedy branches would be one: each starts from the next likeliest token.
        first_rank=branch if request.temperature == 0 else 0,
    )


def _invalid(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}.", fields=(FieldError(field, message),))


def _nothing(failures: list[BranchFailure]) -> DeadlineExceeded | NoCompletion:
    if all(failure.code == "deadline_exceeded" for failure in failures):
        return DeadlineExceeded(
            "No completion was ready in time; allow a longer max_time or a shorter length.",
            retry_after_s=RETRY_AFTER_S,
        )
    reasons = "; ".join(sorted({f"{failure.code}: {failure.detail}" for failure in failures}))
    return NoCompletion(f"Every branch failed: {reasons} Try again.", retry_after_s=RETRY_AFTER_S)


class LiveResource:
    """`GET /health/live`: this process answers. Depends on nothing."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.media = {"status": "live"}


class ReadyResource:
    """`GET /health/ready`: 200 while every model has a warm slot and the server is not being stopped."""

    def __init__(self, plan: Plan, admission: Admission, run_path: Path) -> None:
        self._plan = plan
        self._admission = admission
        self._draining_file = run_path / DRAINING_FILE

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        states = self._admission.states()
        slots: list[dict[str, Any]] = [
            {
                "slot": slot.index,
                "model": slot.model,
                "device": slot.device,
                "state": state.state,
                "reason": state.reason,
                "progress": round(state.progress, 3),
                "dtype": state.dtype,
                "ms_per_token": round(state.ms_per_token, 3),
                "pid": state.pid,
            }
            for slot, state in zip(self._plan.slots, states, strict=True)
        ]
        warm = {slot["model"] for slot in slots if slot["state"] == "warm"}
        if self._draining_file.exists():
            status = "draining"
        elif all(model.name in warm for model in self._plan.models):
            status = "ready"
        else:
            status = "starting"
        if status != "ready":
            resp.status = falcon.HTTP_503
            resp.set_header("Retry-After", str(RETRY_AFTER_S))
        resp.media = {
            "status": status,
            "models": [
                {"model": model.name, "source": model.source, "warning": model.warning} for model in self._plan.models
            ],
            "slots": slots,
        }


class MetricsResource:
    """`GET /metrics`, for Prometheus."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = CONTENT_TYPE_LATEST
        resp.data = self._metrics.exposition()
