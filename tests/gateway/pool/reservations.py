"""Admission over warm slots, and reservations that wait in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway.pool.admission import Admission
from gateway.pool.placement import Claim
from gateway.pool.slot_table import MAX_DOWN_S
from shared.plan import Plan, make_slots
from shared.protocol import State

WARM = State(state="warm", ms_per_token=1.0)


def make(
    models: list[tuple[str, int]],
    *,
    device: str = "cpu",
    max_batch: int = 3,
    queue: int = 6,
    warm: bool = True,
    max_down_s: float = MAX_DOWN_S,
) -> Admission:
    plan = Plan({}, [], make_slots([device], models, Path("/run"), max_batch))
    admission = Admission(plan, "auto", queue, max_down_s)
    for slot in plan.slots if warm else ():
        admission.update(slot.index, WARM)
    return admission


def claim(model: str = "small", *, timeout_s: float = 5.0, **fields: Any) -> Claim:
    return Claim(model=model, deadline=time.monotonic() + timeout_s, **fields)


class Waiting:
    """A reservation in a thread of its own; the constructor returns when it waits, or has room. `cancel` cancels it."""

    def __init__(self, pool: ThreadPoolExecutor, admission: Admission, *args: Any, **kwargs: Any) -> None:
        self.cancel: Callable[[], None] = lambda: None
        is_queued = threading.Event()

        @contextmanager
        def cancelling(cancel: Callable[[], None]) -> Iterator[None]:
            self.cancel = cancel
            is_queued.set()
            yield

        self.future: Future[list[int]] = pool.submit(admission.reserve, *args, cancelling=cancelling, **kwargs)
        self.future.add_done_callback(lambda _: is_queued.set())
        assert is_queued.wait(5)
