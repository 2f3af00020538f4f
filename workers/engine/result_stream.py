"""The result stream of a sequence: tokens as they are generated, then the whole result.

Knows two threads: the engine's, which delivers, and a reader's. Does not know text and the wire.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable

from workers.engine.request import GeneratedToken, SequenceOutput

# A token is delivered after this time at the latest, if another token follows.
MAX_DELIVERY_DELAY_S = 0.01
# The first tokens are delivered one at a time: a word takes two or three of them.
NUM_DELIVERED_SINGLY = 4


class ResultStream:
    """The output of one sequence. Any thread may cancel it; one thread at a time should read it.

    Waking the reader costs the engine time, so tokens in quick succession are delivered in batches: the first
    NUM_DELIVERED_SINGLY one at a time, after that as many as were delivered before, or those of MAX_DELIVERY_DELAY_S.
    """

    def __init__(self, on_cancel: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            on_cancel: called once, in the thread that cancels.
        """
        self._queue: queue.SimpleQueue[list[GeneratedToken | SequenceOutput]] = queue.SimpleQueue()
        # State of the engine's thread.
        self._pending: list[GeneratedToken | SequenceOutput] = []
        self._num_delivered = 0
        self._delivered_at = 0.0
        # State of the reader's thread.
        self._delivered: deque[GeneratedToken | SequenceOutput] = deque()
        self._finished: SequenceOutput | None = None
        self._on_cancel = on_cancel
        self.is_cancelled = False

    def next(self, timeout_s: float | None = None) -> GeneratedToken | SequenceOutput | None:
        """Waits for the next output; None on timeout. After the `SequenceOutput`, returns it again."""
        if self._finished is not None:
            return self._finished
        if not self._delivered:
            try:
                self._delivered.extend(self._queue.get(timeout=timeout_s))
            except queue.Empty:
                return None
        output = self._delivered.popleft()
        if isinstance(output, SequenceOutput):
            self._finished = output
        return output

    @property
    def has_more(self) -> bool:
        """Whether further outputs were delivered together with the one that `next` returned last."""
        return bool(self._delivered)

    def result(self) -> SequenceOutput:
        """Waits for the end of the sequence."""
        while not isinstance(output := self.next(), SequenceOutput):
            pass
        return output

    def cancel(self) -> None:
        """Ends the sequence after at most one more decode step, with `finish_reason` "cancelled"."""
        if self._finished is None and not self.is_cancelled:
            self.is_cancelled = True
            self._on_cancel()

    def deliver(self, output: GeneratedToken | SequenceOutput) -> None:
        """Adds an output and wakes the reader, or keeps the output for the next batch. For the engine's thread."""
        now = time.monotonic()
        self._pending.append(output)
        is_due = (
            self._num_delivered < NUM_DELIVERED_SINGLY
            or len(self._pending) >= self._num_delivered
            or now - self._delivered_at >= MAX_DELIVERY_DELAY_S
        )
        if is_due or isinstance(output, SequenceOutput):
            self._num_delivered += len(self._pending)
            self._delivered_at = now
            self._queue.put(self._pending)
            self._pending = []
