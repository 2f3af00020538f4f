"""What admission knows of each slot: the last state of its worker, and how many branches are reserved in it.

Plain data without a lock; `Admission` holds its own lock around every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.pool.placement import SlotView
from shared.plan import Slot
from shared.protocol import State

UNKNOWN = State(state="down", reason="its worker has not reported a state yet")


class SlotTable:
    """`states` and `in_flight` (reserved branches) are in slot order."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self.states: list[State] = [UNKNOWN] * len(slots)
        self.in_flight: list[int] = [0] * len(slots)

    def views(self, model: str) -> list[SlotView]:
        """The warm slots of a model, as placement needs them."""
        return [
            SlotView(slot.index, self.in_flight[slot.index], slot.max_batch, state.ms_per_token)
            for slot, state in zip(self._slots, self.states, strict=True)
            if slot.model == model and state.state == "warm"
        ]

    def load_failure(self, model: str) -> str | None:
        """Why the model cannot be served, if loading failed in every slot that holds it, else None."""
        states = [state for slot, state in zip(self._slots, self.states, strict=True) if slot.model == model]
        if all(state.state == "failed" for state in states):
            return states[0].reason or "the workers' log has the reason"
        return None

    def reserve(self, indices: Iterable[int]) -> None:
        """Count one branch more in each slot named; a slot may be named several times."""
        for index in indices:
            self.in_flight[index] += 1

    def release(self, index: int) -> None:
        self.in_flight[index] -= 1
