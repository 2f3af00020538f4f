"""The fan-out: one HTTP call to a worker per branch, each on a thread of its own.

The request's thread waits on a condition with the deadline, never on a socket. A branch that fails is retried on
another slot while time and the retry budget remain. Knows no dialect, and not what a completion is good for.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import zip_longest
from typing import TypeAlias
from weakref import WeakSet

import structlog
from msgspec import structs

from gateway.generation.request import (
    BranchFailure,
    BranchOutcome,
    BranchResult,
    BranchSpec,
    GenerationSpec,
    RequestContext,
    TokenDelta,
)
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from gateway.pool.client import BranchError, SlotClient
from gateway.pool.retries import Attempts, RetryBudget
from shared.call_threads import CallThreads
from shared.errors import Overloaded, TercetError, internal_error
from shared.protocol import PRIOR_PROTOCOL, SCORING_PROTOCOL, Done, GenerateRequest, Group, Token
from shared.time_margins import MARGINS
from shared.tracing import Tracing

# Branches of a request that run or wait for room at the same time; each holds a thread. Further ones start as they end.
MAX_BRANCHES_AT_ONCE = 8
# Failures of a branch whose worker may have ended.
LOST_CODES = {"broken", "slot_lost", "device_error", "hang"}
# Pause of a branch beyond `MAX_BRANCHES_AT_ONCE` before it tries a full queue again.
FULL_QUEUE_PAUSE_S = 0.1

# What is left of a response after its result.
_Rest: TypeAlias = Iterable[object]

log = structlog.get_logger()


class Fanout:
    """Runs the branches of all requests on one thread pool."""

    def __init__(
        self,
        clients: Mapping[int, SlotClient] | Sequence[SlotClient],
        admission: Admission,
        metrics: Metrics,
        num_threads: int,
        retry_budget: RetryBudget,
        tracing: Tracing | None = None,
    ) -> None:
        """
        Args:
            clients: clients by slot index.
            num_threads: branches that run or wait for room at the same time.
            tracing: records each request's admission and each call. None: nothing is recorded.
        """
        self._clients = clients
        self._admission = admission
        self._metrics = metrics
        self._retry_budget = retry_budget
        self._tracing = tracing
        self._threads = CallThreads("branch", num_threads)
        self._branch_counter = cache(metrics.branches.labels)
        self._lock = threading.Lock()
        self._contexts: WeakSet[RequestContext] = WeakSet()
        self._stop_reason: TercetError | None = None

    def check(self, owner: str) -> None:
        """Refuse early, before the request of an owner is read, what `start` would refuse now.

        Raises:
            Overloaded, NotReady: as `Admission.check`.
            TercetError: the reason given to `cancel_all`.
        """
        self._raise_if_stopped()
        self._admission.check(owner)

    def start(self, context: RequestContext) -> None:
        """Reserve room for the request's branches together, then start them. They deliver their events to `context`.

        Where the pool has less room than branches, even when idle, the rest reserve theirs one at a time. So do
        branches beyond `MAX_BRANCHES_AT_ONCE`, which start as others end and wait for room like new requests. They
        try a full queue again until the deadline, because a refusal would discard what the others have computed.

        Raises:
            Overloaded, NotReady, DeadlineExceeded, ClientGone: from the reservation; no branch was started.
            Overloaded: a branch has no thread; some may have been started.
            TercetError: the reason given to `cancel_all`.
        """
        with self._lock:
            self._raise_if_stopped()
            self._contexts.add(context)
        spec = context.spec
        num_first = min(spec.num_branches, MAX_BRANCHES_AT_ONCE)
        tracing, parent = self._tracing, context.spec.caller.traceparent
        with tracing.start("admission", parent, branches=num_first) if tracing and parent else nullcontext():
            slots = self._admission.reserve(context.claim, num_first, cancelling=context.on_cancel)
        self._retry_budget.add_branches(spec.num_branches)
        # All before the first runs: as it ends, its thread takes the next.
        branches = [context.take_branch() for _ in range(num_first)]
        for number, (branch, slot) in enumerate(zip_longest(branches, slots)):
            try:
                self._threads.submit(self._run_branches, context, branch, slot)
            except Overloaded:
                for unused in slots[number:]:
                    self._admission.release(unused, context.claim)
                raise

    @property
    def num_awaited(self) -> int:
        """Requests that run or wait for room, and whose clients wait: all but jobs."""
        with self._lock:
            return sum(not (context.spec.caller.is_job or context.is_over) for context in self._contexts)

    def top_up(self, context: RequestContext, indices: range) -> None:
        """Start more branches of an admitted request. They reserve room one at a time, before requests that wait."""
        self._retry_budget.add_branches(len(indices))
        context.expect_outcomes(len(indices))
        group = Group(id=f"{context.spec.request_id}+{indices.start}", size=len(indices))
        for index in indices:
            branch = structs.replace(context.spec.branch(index), group=group)
            try:
                self._threads.submit(self._run_branches, context, branch, None)
            except Overloaded as error:
                context.deliver(BranchFailure(index, error.code, error.detail))

    def cancel_all(self, reason: TercetError) -> None:
        """Cancel every request, running or waiting, with `reason`; from now on `start` and `check` raise it."""
        with self._lock:
            self._stop_reason = reason
            contexts = list(self._contexts)
        for context in contexts:
            context.cancel(copy.copy(reason))

    def _raise_if_stopped(self) -> None:
        if self._stop_reason is not None:
            raise copy.copy(self._stop_reason)  # an exception collects the traceback of each thread that raises it

    def _run_branches(self, context: RequestContext, branch: BranchSpec | None, slot: int | None) -> None:
        """Run a branch, then those of its request that have not started."""
        while branch is not None:
            outcome, rest = self._outcome(context, branch, slot)
            context.deliver(outcome)
            try:
                deque(rest, maxlen=0)  # the last chunk, so that the connection can be used again
            except BranchError as error:
                log.debug("response_not_complete", code=error.code)
            branch, slot = (None if context.is_over else context.take_branch()), None

    def _outcome(self, context: RequestContext, branch: BranchSpec, slot: int | None) -> tuple[BranchOutcome, _Rest]:
        try:
            return self._attempt(context, branch, slot)
        except TercetError as error:
            return BranchFailure(branch.index, error.code, error.detail), ()
        except BaseException as error:
            request_id = context.spec.request_id
            log.error("unhandled_exception", request_id=request_id, exc_info=error)
            generic = internal_error(request_id)
            return BranchFailure(branch.index, generic.code, generic.detail), ()

    def _attempt(self, context: RequestContext, branch: BranchSpec, slot: int | None) -> tuple[BranchOutcome, _Rest]:
        """Call workers until one has answered, as far as `Attempts` permits; preferably slots that were not tried.

        Args:
            slot: reserved by the caller for the first attempt; None: reserve here.

        Raises:
            TercetError: from a reservation.
        """
        attempts = Attempts(time.monotonic())
        while True:
            if slot is None:
                slot = self._reserve_one(context, branch, attempts)
            try:
                if (failure := attempts.failure) is not None and attempts.excludes(slot):
                    return BranchFailure(branch.index, failure.code, failure.detail), ()
                done, rest = self._traced_call(context, branch, slot, attempts.number)
            except BranchError as error:
                self._branch_counter(str(slot), error.code).inc()
                pause_s = self._pause_after(error, context, slot, attempts)
                if pause_s is None:
                    return BranchFailure(branch.index, error.code, error.detail), ()
            else:
                self._branch_counter(str(slot), "ok").inc()
                duration_s = time.monotonic() - attempts.started_at
                return BranchResult(branch.index, branch.seed, slot, context.spec.model, done, duration_s), rest
            finally:
                self._admission.release(slot, context.claim)
            context.pause(pause_s)
            slot = None

    def _pause_after(self, error: BranchError, context: RequestContext, slot: int, attempts: Attempts) -> float | None:
        """The time until the next call, in seconds; None: there is none."""
        pause_s = None if context.is_over else attempts.waits_after(slot, error, time.monotonic())
        if pause_s is not None:
            return pause_s
        if error.code in LOST_CODES:
            self._note_lost_worker(context, slot)
        may_repeat = attempts.may_repeat_after(error) and not context.is_over and not context.ends_workers
        return 0.0 if may_repeat and self._take_retry() else None

    def _reserve_one(self, context: RequestContext, branch: BranchSpec, attempts: Attempts) -> int:
        """Room for one branch of a request that was admitted.

        Raises:
            TercetError: as `Admission.reserve`; `Overloaded` only at the deadline.
        """
        spec = context.spec
        is_admitted = not attempts.is_first or not MAX_BRANCHES_AT_ONCE <= branch.index < spec.num_branches
        while True:
            try:
                [slot] = self._admission.reserve(
                    context.claim,
                    1,
                    avoid=attempts.tried_slots,
                    is_retry=is_admitted,
                    cancelling=context.on_cancel,
                )
            except Overloaded:
                if context.is_over or time.monotonic() + FULL_QUEUE_PAUSE_S >= spec.deadline:
                    raise
                context.pause(FULL_QUEUE_PAUSE_S)
            else:
                return slot

    def _note_lost_worker(self, context: RequestContext, slot: int) -> None:
        """Of a worker that has ended, the signal may be anyone's, so its requests are tried again. A request that then
        ends another is taken for the cause, and no further worker gets it.

        A connection may fail although its worker lives, so the earlier one must be known to be gone.
        """
        states = self._admission.states()
        lost = slot, states[slot].pid if slot in states else 0
        living = {(index, state.pid) for index, state in states.items() if state.state not in {"down", "failed"}}
        if context.lost_workers - living - {lost} and not context.ends_workers:
            context.ends_workers = True
            log.error("request_ended_workers", request_id=context.spec.request_id, last_slot=slot)
        context.lost_workers.add(lost)

    def _take_retry(self) -> bool:
        is_granted = self._retry_budget.take_retry()
        (self._metrics.retries if is_granted else self._metrics.refused_retries).inc()
        return is_granted

    def _traced_call(self, context: RequestContext, branch: BranchSpec, slot: int, attempt: int) -> tuple[Done, _Rest]:
        if self._tracing is None or not context.spec.caller.traceparent:
            return self._call(context, branch, slot, attempt, "")
        with self._tracing.start(
            "branch",
            context.spec.caller.traceparent,
            "client",
            branch=branch.index,
            attempt=attempt,
            slot=slot,
            model=context.spec.model,
        ) as span:
            return self._call(context, branch, slot, attempt, span.traceparent)

    def _call(
        self, context: RequestContext, branch: BranchSpec, slot: int, attempt: int, traceparent: str
    ) -> tuple[Done, _Rest]:
        spec = context.spec
        left_s = spec.deadline - time.monotonic() - MARGINS.return_s
        if left_s <= 0:
            raise BranchError("deadline_exceeded", "The time limit passed before its turn.", is_retryable=False)
        if context.ends_workers:
            raise BranchError("slot_lost", "Two workers have ended during this request.", is_retryable=False)
        model = self._admission.models.get(spec.model)
        protocol = self._protocol(spec, slot)
        request = GenerateRequest(
            prompt=spec.needed_text(branch.prompt, model.n_ctx) if isinstance(branch.prompt, str) else None,
            prompt_ids=None if isinstance(branch.prompt, str) else branch.prompt,
            max_prompt_tokens=spec.max_prompt_tokens,
            heal=spec.heals,
            special_as_text=spec.special_as_text,
            suffix=spec.suffix,
            score_last=spec.num_scored_tokens if not branch.index and protocol >= SCORING_PROTOCOL else 0,
            score_prior=spec.scores_prior and protocol >= PRIOR_PROTOCOL,
            sampling=branch.sampling,
            predict=branch.predict,
            seed=branch.seed,
            deadline_ms=left_s * 1e3,
            group=branch.group,
            owner=spec.owner,
            session=spec.session,
            stream=spec.is_streamed and not spec.suffix,
            echo=spec.echoes,
            logprobs=spec.num_top_logprobs,
            request_id=spec.request_id,
            traceparent=traceparent,
        )
        call = self._clients[slot].call(request, spec.deadline, attempt, context.claim.document)
        batches = call.lines()
        with context.on_cancel(call.cancel):
            for lines in batches:
                context.claim.has_output = True
                if tokens := tuple(line for line in lines if isinstance(line, Token)):
                    context.deliver(TokenDelta(branch.index, tokens, attempt))
                if isinstance(last := lines[-1], Done):
                    return last, batches
        raise BranchError("broken", "The worker ended the response before its last line.")

    def _protocol(self, spec: GenerationSpec, slot: int) -> int:
        """What the worker knows of scores, if any are wanted: one of an earlier version answers without them."""
        state = self._admission.states().get(slot) if spec.num_scored_tokens or spec.scores_prior else None
        return state.protocol if state is not None else 0
