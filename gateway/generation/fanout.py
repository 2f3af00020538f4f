"""The fan-out: one branch per sentence asked for, each an httpx request on a thread of its own.

The handler's thread waits on a condition with the request's deadline, never on a socket. A branch that fails
is tried again on another slot while time remains. This module knows nothing of the editor's contract.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import structlog

from gateway.generation.selection import BranchResult
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from gateway.pool.client import BranchError, SlotClient
from shared.errors import Superseded, TercetError
from shared.protocol import BranchFailure, Done, GenerateRequest, Group, Sampling

MAX_ATTEMPTS = 3
# Refusals that pass: a sequence that was cancelled leaves its worker a step later than it leaves the gateway.
MOMENTARY = frozenset({"slot_full", "not_ready"})
RETRY_PAUSE_S = 0.025
# The worker is given this much less than what is left, so that what it has by then arrives in time.
RETURN_MARGIN_S = 0.005
# How long past the deadline an answer that is on its way is waited for.
COLLECT_GRACE_S = 0.04

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BranchSpec:
    """One call to be made: its place in the request and what only it has."""

    index: int
    seed: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """A request as the fan-out sees it. `deadline` of `time.monotonic()`."""

    request_id: str
    model: str
    prompt: str
    max_prompt_tokens: int
    deadline: float
    session: str | None = None
    document: int | None = None
    is_streamed: bool = False
    num_likeliest: int | None = None  # tokens to report beside each; None: not even the token's own text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Texts of tokens, as they came from one try of a branch."""

    branch: int
    texts: tuple[str, ...]
    attempt: int = 1


class Fanout:
    """Runs requests' branches on a pool of threads, as many as the slots hold branches."""

    def __init__(self, clients: Sequence[SlotClient], admission: Admission, metrics: Metrics, num_threads: int) -> None:
        self._clients = clients
        self._admission = admission
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="branch")

    def start(self, run: RequestContext, branches: Sequence[BranchSpec]) -> None:
        """Reserve room together and set the branches going; what they bring is for `run.next`.

        Raises:
            Overloaded, NotReady, DeadlineExceeded, ClientGone: from the reservation; nothing was started.
        """
        ask = run.ask
        slots = self._admission.reserve(
            ask.model, len(branches), ask.deadline, document=ask.document, cancelling=run.cancelling
        )
        group = Group(id=ask.request_id, size=len(branches))
        for position, branch in enumerate(branches):
            slot = slots[position] if position < len(slots) else None
            self._executor.submit(self._run_branch, run, branch, group, slot)

    def top_up(self, run: RequestContext, branches: Sequence[BranchSpec]) -> None:
        """Set more branches of a run going. Its request was admitted: they go before those that wait, one by one."""
        group = Group(id=f"{run.ask.request_id}+{branches[0].index}", size=len(branches))
        for branch in branches:
            self._executor.submit(self._run_branch, run, branch, group, None)

    def _run_branch(self, run: RequestContext, branch: BranchSpec, group: Group, slot: int | None) -> None:
        start = time.monotonic()
        # A call is read to its end only when its result has been reported.
        with ExitStack() as rest:
            self._report_branch(run, branch, group, slot, start, rest)

    def _report_branch(
        self, run: RequestContext, branch: BranchSpec, group: Group, slot: int | None, start: float, rest: ExitStack
    ) -> None:
        try:
            run.report(self._attempt(run, branch, group, slot, start, rest))
        except TercetError as error:
            run.report(BranchFailure(branch=branch.index, code=error.code, detail=error.detail))
        except Exception as error:  # nobody asks the pool's future, so it is told here
            log.error("unhandled_exception", request_id=run.ask.request_id, exc_info=error)
            detail = f"The server's log has the reason, under request {run.ask.request_id}."
            run.report(BranchFailure(branch=branch.index, code="internal_error", detail=detail))

    def _attempt(
        self, run: RequestContext, branch: BranchSpec, group: Group, slot: int | None, start: float, rest: ExitStack
    ) -> BranchResult | BranchFailure:
        """Up to three calls, each on a slot that has not failed this branch, if there is one.

        Args:
            slot: reserved already; None for a branch of a later wave or a top-up, which reserves its own.
            rest: what remains to be done with the call that succeeded.
        """
        ask = run.ask
        failed_on: set[int] = set()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if slot is None:
                [slot] = self._admission.reserve(
                    ask.model, 1, ask.deadline, avoid=failed_on, is_retry=True, document=ask.document,
                    cancelling=run.cancelling,
                )  # fmt: skip
            outcome = "ok"
            try:
                done = self._call(run, branch, group, slot, attempt, rest)
                return BranchResult(branch.index, branch.seed, slot, ask.model, done, time.monotonic() - start)
            except BranchError as error:
                outcome = error.code
                is_last = attempt == MAX_ATTEMPTS or not error.is_retryable or run.is_over
                if is_last:
                    return BranchFailure(branch=branch.index, code=error.code, detail=error.detail)
                if error.code in MOMENTARY:
                    run.pause(RETRY_PAUSE_S * 4 ** (attempt - 1))
            finally:
                self._admission.release(slot)
                self._metrics.branches.labels(slot=str(slot), outcome=outcome).inc()
            failed_on.add(slot)
            slot = None
        raise AssertionError("the last attempt returns")

    def _call(
        self, run: RequestContext, branch: BranchSpec, group: Group, slot: int, attempt: int, rest: ExitStack
    ) -> Done:
        ask = run.ask
        left_s = ask.deadline - time.monotonic() - RETURN_MARGIN_S
        if left_s <= 0:
            raise BranchError("deadline_exceeded", "The time limit passed before its turn.", is_retryable=False)
        request = GenerateRequest(
            prompt=ask.prompt,
            max_prompt_tokens=ask.max_prompt_tokens,
            heal=True,
            sampling=branch.sampling,
            seed=branch.seed,
            deadline_ms=left_s * 1e3,
            group=group,
            session=ask.session,
            stream=ask.is_streamed,
            logprobs=ask.num_likeliest,
            request_id=ask.request_id,
        )
        call = self._clients[slot].call(request, ask.deadline, attempt)
        lines = call.lines()
        with run.cancelling(call.cancel):
            for told in lines:
                last = told[-1]
                if isinstance(last, Done):  # it has the text of those before it
                    rest.callback(_read_to_end, lines)
                    return last
                run.report(TextDelta(branch.index, tuple(token.text for token in told), attempt))
        raise BranchError("broken", "The worker ended the answer before its last line.")


def _read_to_end(lines: Iterator[object]) -> None:
    with suppress(BranchError):
        for _ in lines:
            pass


class RequestContext:
    """One request under way: what its branches bring, and a way to end them all."""

    def __init__(self, ask: GenerationSpec) -> None:
        self.ask = ask
        self._changed = threading.Condition()
        self._heard: deque[TextDelta | BranchResult | BranchFailure] = deque()
        self._cancels: list[Callable[[], None]] = []
        self._is_cancelled = False
        self.ended_by: TercetError | None = None
        self.num_top_ups = 0
        self.heard_first_at: float | None = None  # when the last of the first branches had brought something

    @property
    def is_over(self) -> bool:
        """Whether no branch's result would be wanted any more."""
        return self._is_cancelled or time.monotonic() >= self.ask.deadline

    def next(self) -> TextDelta | BranchResult | BranchFailure | None:
        """What comes next, or None: the deadline has passed, with some grace for what is on its way, or the run was
        cancelled."""
        until = self.ask.deadline + COLLECT_GRACE_S
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_cancelled or self._heard, timeout=max(0.0, until - time.monotonic())
            )
            return self._heard.popleft() if self._heard and not self._is_cancelled else None

    def cancel(self, reason: TercetError | None = None) -> None:
        """End every branch that waits or is under way; a waiting `next` returns. The first reason counts."""
        with self._changed:
            if self.ended_by is None and not self._is_cancelled:
                self.ended_by = reason
            self._is_cancelled = True
            cancels = list(self._cancels)
            self._changed.notify_all()
        for cancel in cancels:
            cancel()

    def pause(self, seconds: float) -> None:
        """Wait, unless the run is cancelled meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cancelled, timeout=seconds)

    def report(self, heard: TextDelta | BranchResult | BranchFailure) -> None:
        with self._changed:
            self._heard.append(heard)
            self._changed.notify_all()

    @contextmanager
    def cancelling(self, cancel: Callable[[], None]) -> Iterator[None]:
        """A block that ends early, by `cancel`, when the run is cancelled (at once if it is already)."""
        with self._changed:
            self._cancels.append(cancel)
            is_cancelled = self._is_cancelled
        if is_cancelled:
            cancel()
        try:
            yield
        finally:
            with self._changed:
                self._cancels.remove(cancel)


class Sessions:
    """The newest run of each session; a newer one ends the older at once, wherever that is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, RequestContext] = {}

    @contextmanager
    def newest(self, run: RequestContext) -> Iterator[None]:
        """While the block runs, `run` is its session's newest, until a newer one comes."""
        session = run.ask.session
        if session is None:
            yield
            return
        with self._lock:
            older = self._newest.get(session)
            self._newest[session] = run
        if older is not None:
            older.cancel(Superseded("A newer request of this session came.", headers={"x-should-retry": "false"}))
        try:
            yield
        finally:
            with self._lock:
                if self._newest.get(session) is run:
                    del self._newest[session]
