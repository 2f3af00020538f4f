"""Which worker holds which slot, as the master and its workers see it through shared memory."""

from __future__ import annotations

import mmap
import struct


class Leases:
    """Which worker holds which slot; a worker is named by its gunicorn age.

    The master alone leases and frees. What workers must see of each other (is there a newer generation for
    my slot, is it warm yet) lies in memory shared across fork: three 64-bit words a slot.
    """

    _WORDS = struct.Struct("=QQQ")  # newest age leased, newest age that became warm, deaths before warm in a row

    def __init__(self, num_slots: int) -> None:
        self._memory = mmap.mmap(-1, num_slots * self._WORDS.size)
        self._num_slots = num_slots
        self._held: dict[int, int] = {}

    def lease(self, age: int) -> int:
        """Give `age` the slot with the fewest holders, the lowest such. Called in the master.

        A free slot has none; during a reload every slot has one, and the second is the next generation.
        """
        held = list(self._held.values())
        slot = min(range(self._num_slots), key=lambda index: (held.count(index), index))
        self._held[age] = slot
        _, warm, failures = self._read(slot)
        self._write(slot, age, warm, failures)
        return slot

    def free(self, age: int) -> None:
        """Take back the slot of a worker that is gone. Called in the master."""
        slot = self._held.pop(age, None)
        if slot is None:
            return
        _, warm, failures = self._read(slot)
        newest = max((other for other, its in self._held.items() if its == slot), default=0)
        self._write(slot, newest, warm, failures + 1 if warm < age else 0)

    def holders(self, slot: int) -> list[int]:
        """Ages that hold a slot, oldest first. Known in the master, and in a worker as of its fork."""
        return sorted(age for age, its in self._held.items() if its == slot)

    def is_superseded(self, slot: int, age: int) -> bool:
        """Whether a newer generation holds the slot too."""
        return self._read(slot)[0] > age

    def successor_is_warm(self, slot: int, age: int) -> bool:
        return self._read(slot)[1] > age

    def mark_warm(self, slot: int, age: int) -> None:
        """Called in a worker once its model is warm."""
        newest, warm, _ = self._read(slot)
        self._write(slot, newest, max(warm, age), 0)

    def num_failures(self, slot: int) -> int:
        """Workers of this slot that died before they were warm, in a row."""
        return self._read(slot)[2]

    def _read(self, slot: int) -> tuple[int, int, int]:
        newest, warm, failures = self._WORDS.unpack_from(self._memory, slot * self._WORDS.size)
        return newest, warm, failures

    def _write(self, slot: int, newest: int, warm: int, failures: int) -> None:
        self._WORDS.pack_into(self._memory, slot * self._WORDS.size, newest, warm, failures)
