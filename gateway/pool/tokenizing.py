"""Tokens of a text, from a warm slot of its model: the gateway has no tokenizer of its own.

A bulkhead beside `gateway.pool.admission`: a text needs no room in a slot's batch, because the engine takes no part in
it, but a turn. One long text at a time has one, and one other; further texts wait in a queue that is bounded and fair
between owners (API keys). Each ends with its client, or at its deadline. A text is sent to another slot only if
the worker has not begun it. Knows no dialect.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import structlog

from gateway.pool.admission import Admission, Cancelling
from gateway.pool.client import BranchError, SlotClient, TokenizeCall
from gateway.pool.fair_queue import FairQueue
from gateway.pool.slot_table import ASIDE_S
from shared.cpu_share import pause_after
from shared.errors import ClientGone, DeadlineExceeded, NotReady, Overloaded, TercetError
from shared.protocol import LONG_TEXT_CHARS, Tokens

# Long texts at a time, and others. While the gateway reads and encodes the tokens of the largest text, a MiB with a
# token for each byte, it holds some 250 MB, and other threads wait for the interpreter. Beside 60 texts of 1 MB, the
# p99 of completions of another key was 257 to 312 ms with two at a time, and 225 to 233 ms with one (measured by hand,
# two cores, when the tokens were still encoded in one piece).
MAX_TEXTS = 1
# Texts that wait, each with a thread. As many as GATEWAY_RESERVE_THREADS of gunicorn.conf.py, which are the threads
# that completions leave: texts of requests with `max_length` wait in those of completions.
MAX_WAITING = 16
# A worker's refusal while it has a text of another gateway, and the pause after it: some short texts' time.
SLOT_FULL = "slot_full"
TAKEN_PAUSE_S = 0.05
# How long a text waits for a slot that can begin it, and the pause between two looks: in a reload, and after a crash,
# one is ready in a moment.
MAX_NO_SLOT_S, NO_SLOT_PAUSE_S = 2.0, 0.05
log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class _Text:
    """A text that waits for a slot, or has one. It is settled with either `slot` or `error`, or with neither if no slot
    can begin it now."""

    model: str
    owner: str
    is_long: bool  # waits for long ones alone, and no other waits for it
    num_branches: int = 1  # of a `FairQueue`: texts count alike
    tried: set[int] = field(default_factory=set)  # slots that could not begin it
    full: set[int] = field(default_factory=set)  # slots that had a text of another gateway
    number: int = 0
    began_at: float = field(default_factory=time.monotonic)
    slot: int | None = None
    error: TercetError | None = None
    is_waiting: bool = False
    call: TokenizeCall | None = None
    settled: threading.Event = field(default_factory=threading.Event)


class PoolTokenizer:
    """Thread-safe."""

    def __init__(self, admission: Admission, clients: Mapping[int, SlotClient] | Sequence[SlotClient]) -> None:
        """
        Args:
            clients: clients by slot index.
        """
        self._admission = admission
        self._clients = clients
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._busy: dict[bool, set[int]] = {False: set(), True: set()}  # slots that have a text, by whether it is long
        self._queues = {
            (model, is_long): FairQueue[_Text]() for model in admission.models.names for is_long in self._busy
        }
        self._num_waiting: Counter[str] = Counter()  # by owner
        self._num_arrived = 0
        self._texts: set[_Text] = set()
        self._stop_reason: TercetError | None = None

    def tokenize(
        self,
        model: str,
        content: str,
        deadline: float,
        *,
        owner: str = "",
        cancelling: Cancelling = lambda _cancel: nullcontext(),
    ) -> Tokens:
        """The tokens of a text, as the model has them in a prompt.

        Args:
            deadline: `time.monotonic()` time.
            owner: id of the request's API key; turns are fair between owners.
            cancelling: makes a context manager from a function that ends the call; it is entered meanwhile.

        Raises:
            ClientGone: cancelled.
            Overloaded: too many texts wait, and the owner has its share of them.
            NotReady: no warm slot of the model could be reached for `MAX_NO_SLOT_S`, or the worker ended.
            DeadlineExceeded: no tokens before the deadline.
            TercetError: the reason given to `cancel_all`.
        """
        text = _Text(model, owner, len(content) > LONG_TEXT_CHARS)
        with self._lock:
            if self._stop_reason is not None:
                raise copy.copy(self._stop_reason)
            self._texts.add(text)
        try:
            with cancelling(lambda: self._end(text, ClientGone("The client hung up before its answer was ready."))):
                while True:
                    response = self._try_slot(text, content, deadline)
                    if response is not None:
                        return response
        finally:
            with self._lock:
                self._texts.discard(text)

    def give_way(self, busy_s: float) -> None:
        """Pause after a part of the work on a text's tokens, which took `busy_s`, while completions are computed."""
        if any(self._admission.in_flight()):
            time.sleep(pause_after(busy_s))

    def cancel_all(self, reason: TercetError) -> None:
        """End every call, running or waiting, with `reason`; from now on `tokenize` raises it."""
        with self._lock:
            self._stop_reason = reason
            texts = list(self._texts)
        for text in texts:
            self._end(text, copy.copy(reason))

    def _try_slot(self, text: _Text, content: str, deadline: float) -> Tokens | None:
        """The tokens from the next slot that is free. None: no slot has begun the text."""
        slot, is_taken = self._take_slot(text, deadline), False
        if slot is None:
            if time.monotonic() > min(text.began_at + MAX_NO_SLOT_S, deadline):
                raise NotReady(f"No slot of {text.model} is ready to tokenize; try again.")
            text.tried.clear()
            time.sleep(NO_SLOT_PAUSE_S)
            return None
        try:
            call = self._clients[slot].tokenize(content, max(0.001, deadline - time.monotonic()))
            with self._lock:
                text.call = call
                error = text.error
            if error is not None:
                raise error
            return call.result()
        except KeyError:  # a slot of another machine, which has been removed
            text.tried.add(slot)
        except BranchError as error:
            if error.is_lie and self._admission.set_aside(slot, error.detail):
                log.warning("slot_set_aside", slot=slot, code=error.code, reason=error.detail, seconds=ASIDE_S)
            if text.error is not None:
                raise text.error from error
            if not error.is_retryable:
                raise _failure(error) from error
            is_taken = error.code == SLOT_FULL
            (text.full if is_taken else text.tried).add(slot)
        finally:
            with self._lock:
                text.call = text.slot = None
                self._busy[text.is_long].discard(slot)
                self._settle_all()
        if is_taken:
            time.sleep(TAKEN_PAUSE_S)
        return None

    def _take_slot(self, text: _Text, deadline: float) -> int | None:
        """Wait for a turn. None: no slot can begin the text now.

        Raises:
            TercetError: as `tokenize`.
        """
        with self._lock:
            if text.error is not None:
                raise text.error
            text.settled.clear()
            text.is_waiting = True
            self._num_arrived += 1
            text.number = self._num_arrived
            self._queues[text.model, text.is_long].append(text)
            self._num_waiting[text.owner] += 1
            self._settle_all()
            self._refuse_beyond_the_bound()
        text.settled.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if text.is_waiting:
                late = DeadlineExceeded("No worker was free to tokenize the text before the deadline.")
                self._settle(text, error=late)
                self._settle_all()
            if text.error is not None:
                if text.slot is not None:
                    self._busy[text.is_long].discard(text.slot)
                    self._settle_all()
                raise text.error
            return text.slot

    def _end(self, text: _Text, error: TercetError) -> None:
        with self._lock:
            if text.is_waiting:
                self._settle(text, error=error)
                self._settle_all()
            text.error = text.error or error
            call = text.call
        if call is not None:
            call.cancel()

    def _settle(self, text: _Text, *, slot: int | None = None, error: TercetError | None = None) -> None:
        """End the waiting of a text, and wake its thread."""
        queue = self._queues[text.model, text.is_long]
        (queue.remove if slot is None else queue.serve)(text)
        self._num_waiting[text.owner] -= 1
        if not self._num_waiting[text.owner]:
            del self._num_waiting[text.owner]
        text.slot, text.error, text.is_waiting = slot, error, False
        if slot is not None:
            self._busy[text.is_long].add(slot)
        text.settled.set()

    def _settle_all(self) -> None:
        """Give free slots to the texts whose turn it is; those for which there is none wait no longer."""
        for (model, is_long), queue in self._queues.items():
            busy = self._busy[is_long]
            while (head := queue.head()) is not None:
                warm = [row for row in self._admission.slots() if row.slot.model == model and row.state.state == "warm"]
                indices = [row.slot.index for row in warm if row.slot.index not in head.tried]
                if not indices:
                    self._settle(head)
                    continue
                free = [index for index in indices if index not in busy]
                if not free or len(busy) >= MAX_TEXTS:
                    break
                self._settle(head, slot=next((index for index in free if index not in head.full), free[0]))

    def _refuse_beyond_the_bound(self) -> None:
        """Longest queue drop, as of `Admission`: refuse the newest text of the owner that has the most waiting."""
        while self._num_waiting.total() > MAX_WAITING:
            newest = [text for owner in self._num_waiting if (text := self._newest(owner)) is not None]
            victim = max(newest, key=lambda text: (self._num_waiting[text.owner], text.number))
            refusal = f"Too many texts wait to be tokenized: at most {MAX_WAITING} may. Try again shortly."
            self._settle(victim, error=Overloaded(refusal))

    def _newest(self, owner: str) -> _Text | None:
        texts = (queue.newest(owner) for queue in self._queues.values())
        return max((text for text in texts if text is not None), key=lambda text: text.number, default=None)


def _failure(error: BranchError) -> TercetError:
    """The answer where the worker had begun: it is not asked again, because the text may be what ended it."""
    if error.code == "timeout":
        return DeadlineExceeded("The worker has not tokenized the text before the deadline; send a shorter text.")
    return NotReady("The worker ended, or failed, while it tokenized the text; try again shortly.")
