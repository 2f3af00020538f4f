"""Tokens of a text, from a warm slot of its model: the gateway has no tokenizer of its own.

A text waits for a slot like a branch, and takes the room of one, although the engine takes no part in it. It is sent to
another slot only if the worker has not begun it. Knows no dialect.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from gateway.pool.admission import Admission
from gateway.pool.client import BranchError, SlotClient
from gateway.pool.placement import Claim
from gateway.pool.retries import Attempts
from shared.cancellation import Cancellation, Cancelling
from shared.errors import ClientGone, DeadlineExceeded, NotReady, TercetError
from shared.protocol import LONG_TEXT_CHARS, Tokens

# How long a text waits for a slot where none is ready: in a reload, and after a crash, one is in a moment.
MAX_NOT_READY_S = 2.0
# What a byte of a text costs, in bytes of a completion. A MB of text takes 420 to 520 ms of CPU time in gateway and
# worker; a completion with a context of a MB takes 8 to 10 ms besides its tokens, a request of a MB to any other route
# 3 to 10 ms (measured manually, Intel Xeon, Sapphire Rapids, two cores, embedded checkpoint): 50 times as much. At the
# default rate an owner's texts take less than a tenth of a core.
TEXT_WEIGHT = 50


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
        self._running: set[Cancellation] = set()
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
            owner: as of `Claim`.
            cancelling: makes a context manager from a function that ends the call; it is entered meanwhile.

        Raises:
            ClientGone, Overloaded, NotReady, DeadlineExceeded: as `Admission.reserve`.
            NotReady: no worker could be reached, or the worker ended.
            DeadlineExceeded: no tokens before the deadline.
            TercetError: the reason given to `cancel_all`.
        """
        cancellation = Cancellation()
        with self._lock:
            if self._stop_reason is not None:
                raise copy.copy(self._stop_reason)
            self._running.add(cancellation)
        try:
            with cancelling(cancellation.hang_up):
                return self._tokens(model, content, deadline, owner, cancellation)
        except (ClientGone, NotReady) as error:
            raise cancellation.cancel_reason or error from None
        finally:
            with self._lock:
                self._running.discard(cancellation)

    def cancel_all(self, reason: TercetError) -> None:
        """End every call, running or waiting, with `reason`; from now on `tokenize` raises it."""
        with self._lock:
            self._stop_reason = reason
            running = list(self._running)
        for cancellation in running:
            cancellation.cancel(copy.copy(reason))

    def _tokens(self, model: str, content: str, deadline: float, owner: str, cancellation: Cancellation) -> Tokens:
        if model not in self._admission.ready_models():
            deadline = min(deadline, time.monotonic() + MAX_NOT_READY_S)
        claim = Claim(model=model, deadline=deadline, owner=owner, is_long_text=len(content) > LONG_TEXT_CHARS)
        attempts = Attempts(time.monotonic())
        while True:
            [slot] = self._admission.reserve(
                claim,
                1,
                avoid=attempts.tried_slots,
                is_retry=not attempts.is_first,
                cancelling=cancellation.on_cancel,
            )
            try:
                call = self._clients[slot].tokenize(content, max(0.001, deadline - time.monotonic()))
                with cancellation.on_cancel(call.cancel):
                    return call.result()
            except BranchError as error:
                pause_s = attempts.waits_after(slot, error, time.monotonic())
                if pause_s is None:
                    pause_s = 0.0
                    if not attempts.may_repeat_after(error):
                        raise _failure(error) from error
            finally:
                self._admission.release(slot, claim)
            cancellation.pause(pause_s)


def _failure(error: BranchError) -> TercetError:
    """The answer where the worker had begun: it is not asked again, because the text may be what ended it."""
    if error.code == "timeout":
        return DeadlineExceeded("The worker has not tokenized the text before the deadline; send a shorter text.")
    return NotReady("The worker ended, or failed, while it tokenized the text; try again shortly.")
