"""A sequence's output to its caller: tokens as they are generated, then the whole."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator

from workers.engine.request import GeneratedToken, SequenceOutput

# A step is not kept from its reader for longer, if another follows.
MAX_HELD_S = 0.01
NUM_TOLD_AT_ONCE = 4  # it takes two or three to say a word


class ResultStream:
    """The caller's end of one sequence. Any thread may call it; one at a time should read it.

    Each time that the reader is woken costs the engine something, so steps that follow each other quickly come
    together: the first four one by one, then each time as many as have come before, or those of ten milliseconds.
    """

    __slots__ = ("_finished", "_held", "_num_told", "_on_cancel", "_queue", "_told", "_told_at", "is_cancelled")

    def __init__(self, on_cancel: Callable[[], None] = lambda: None) -> None:
        self._queue: queue.SimpleQueue[list[GeneratedToken | SequenceOutput]] = queue.SimpleQueue()
        # The engine's.
        self._held: list[GeneratedToken | SequenceOutput] = []
        self._num_told = 0
        self._told_at = 0.0
        # The reader's.
        self._told: deque[GeneratedToken | SequenceOutput] = deque()
        self._finished: SequenceOutput | None = None
        self._on_cancel = on_cancel
        self.is_cancelled = False

    def next(self, timeout_s: float | None = None) -> GeneratedToken | SequenceOutput | None:
        """What comes next, or None if nothing does in time; `SequenceOutput` stays the answer."""
        if self._finished is not None:
            return self._finished
        if not self._told:
            try:
                self._told.extend(self._queue.get(timeout=timeout_s))
            except queue.Empty:
                return None
        item = self._told.popleft()
        if isinstance(item, SequenceOutput):
            self._finished = item
        return item

    @property
    def has_more(self) -> bool:
        """Whether something has come already with what `next` gave last."""
        return bool(self._told)

    def outputs(self) -> Iterator[GeneratedToken | SequenceOutput]:
        """All steps (of a streamed sequence; others have none), then `SequenceOutput`."""
        while True:
            item = self.next()
            assert item is not None  # no timeout was given
            yield item
            if isinstance(item, SequenceOutput):
                return

    def result(self) -> SequenceOutput:
        """Waits for the end."""
        for item in self.outputs():
            if isinstance(item, SequenceOutput):
                return item
        raise AssertionError("steps() ends with SequenceOutput")

    def cancel(self) -> None:
        """Ends the sequence after at most one more step, with `finish_reason` "cancelled"."""
        if self._finished is None and not self.is_cancelled:
            self.is_cancelled = True
            self._on_cancel()

    def put(self, item: GeneratedToken | SequenceOutput) -> None:
        """The engine's end."""
        now = time.monotonic()
        self._held.append(item)
        is_due = (
            self._num_told < NUM_TOLD_AT_ONCE or len(self._held) >= self._num_told or now - self._told_at >= MAX_HELD_S
        )
        if is_due or isinstance(item, SequenceOutput):
            self._num_told += len(self._held)
            self._told_at = now
            self._queue.put(self._held)
            self._held = []
