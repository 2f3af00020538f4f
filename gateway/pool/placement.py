"""Which slots a request's branches go to. Pure: it sees numbers and returns slot indices.

A slot's load is its branches in flight times its measured time per token, so a slot that is twice as slow is
as loaded with half the work, and unequal GPUs are fed unequally.

Figures: the linear layers of GPT-2 small on two cores of an AMD EPYC.

`pack`    all branches on one slot. The prompt is computed once instead of three times (int8, 64 tokens: 23.7 ms
          each), and three rows of a decode step cost what one costs (int8: 3.2 ms against 3.0 ms).
`spread`  each branch on a slot of its own. Where rows are not nearly free (fp32: 87 ms for three, 33.9 for one) and
          each slot has a device of its own, three branches finish in the time of one.
`auto`    packs while a slot has room for all branches, else spreads: a request that waited for one slot to empty
          could pay a whole generation (20 steps of 3.2 ms) to save two prompts (2 × 23.7 ms), and would leave room
          unused elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shared.settings import Placement


@dataclass(frozen=True, slots=True)
class SlotView:
    """What placement knows of a warm slot: branches in flight, branches it may hold, milliseconds per token."""

    index: int
    in_flight: int
    max_batch: int
    ms_per_token: float

    def room(self, taken: int = 0) -> int:
        return self.max_batch - self.in_flight - taken

    def load(self, extra: int) -> float:
        """Load with `extra` branches more, in milliseconds per token. A slot not measured yet counts as 1 ms."""
        return (self.in_flight + extra) * (self.ms_per_token or 1.0)


# A document stays where it is remembered while that slot is at most so many times as loaded as the best one.
STAY_FACTOR = 2.0


def place(
    slots: Sequence[SlotView],
    num_branches: int,
    policy: Placement,
    avoid: Collection[int] = (),
    prefer: int | None = None,
) -> list[int] | None:
    """Slot indices for the branches, in branch order, or None while they do not fit together.

    Args:
        slots: warm slots that hold the model asked for.
        avoid: slots that just failed this request; taken only where there is no other.
        prefer: the slot that remembers this document's last prompt; taken unless it is busy.
    """
    slots = [slot for slot in slots if slot.index not in avoid] or slots
    if policy != "spread":
        roomy = [slot for slot in slots if slot.room() >= num_branches]
        if roomy:
            best = min(roomy, key=lambda slot: (slot.load(num_branches), slot.index))
            for slot in roomy:
                if slot.index == prefer and slot.load(num_branches) <= STAY_FACTOR * best.load(num_branches):
                    best = slot
            return [best.index] * num_branches
        if policy == "pack":
            return None
    taken: dict[int, int] = {slot.index: 0 for slot in slots}
    chosen: list[int] = []
    for _ in range(num_branches):
        open_slots = [slot for slot in slots if slot.room(taken[slot.index]) > 0]
        if not open_slots:
            return None
        best = min(open_slots, key=lambda slot: (taken[slot.index], slot.load(taken[slot.index] + 1), slot.index))
        taken[best.index] += 1
        chosen.append(best.index)
    return chosen


def largest_wave(slots: Sequence[SlotView], policy: Placement) -> int:
    """How many branches could ever be placed together on these slots, were they idle."""
    sizes = [slot.max_batch for slot in slots]
    return max(sizes, default=0) if policy == "pack" else sum(sizes)
