"""Which sequences advance in the next step, and by which tokens.

Plain Python: knows sequences, slots and counts. Refuses to know tensors and the device.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from workers.engine.sequence import Sequence

MAX_CHUNK = 128  # prompt tokens of one sequence computed in one step


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens `start` to `stop` of a sequence; with the last of them, draw the next."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.sequence.num_tokens


class Scheduler:
    """Sequences wait in order of arrival for one of `num_slots`, and keep it to the end."""

    def __init__(self, num_slots: int) -> None:
        self._free_slots = list(range(num_slots))[::-1]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not ended, oldest first."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self, now: float) -> list[Work]:
        """The next step's work; empty if there is none."""
        while self.waiting and self._free_slots:
            sequence = self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.scheduled_at = now
            self.running.append(sequence)
        return [
            Work(
                sequence,
                sequence.num_computed,
                min(sequence.num_computed + MAX_CHUNK, sequence.num_tokens),
            )
            for sequence in self.running
        ]

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
