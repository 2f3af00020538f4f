"""What admission knows of each slot: the last state of its worker, and how many branches are reserved in it.

Plain data without a lock; `Admission` holds its own lock around every call.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from gateway.pool.placement import SlotView
from shared.plan import Slot
from shared.protocol import State

UNKNOWN = State(state="down", reason="its worker has not reported a state yet")
# A worker that has died is replaced and reports again within about 2 s; a stopped worker, about 10 s after its silence
# was noticed, because gunicorn's timeout ends it. A slot that is down for longer is not expected to come back.
MAX_DOWN_S = 15.0


class SlotTable:
    """`states` and `in_flight` (reserved branches) are in slot order."""

    def __init__(self, slots: Sequence[Slot], max_down_s: float = MAX_DOWN_S) -> None:
        """
        Args:
            max_down_s: how long a slot that is down is expected to come back.
        """
        self._slots = slots
        self._max_down_s = max_down_s
        self._down_since = [time.monotonic()] * len(slots)
        # Process ids of the workers that started last and have not been warm, 0 for none; and whether a worker of the
        # slot has died like that since the slot was warm. The next one will probably die too.
        self._starting_pids = [0] * len(slots)
        self._is_failing = [False] * len(slots)
        self.models = list(dict.fromkeys(slot.model for slot in slots))
        self.states: list[State] = [UNKNOWN] * len(slots)
        self.in_flight: list[int] = [0] * len(slots)
        # The most branches reserved at a time: since the worker last reported its state, which it does twice a second,
        # and between the two reports before.
        self._peaks = [0] * len(slots)
        self._earlier_peaks = [0] * len(slots)

    @property
    def is_any_warm(self) -> bool:
        return any(state.state == "warm" for state in self.states)

    def update(self, index: int, state: State) -> None:
        """Set a slot's state."""
        if not _is_gone(self.states[index]):
            self._down_since[index] = time.monotonic()
        if state.state in {"starting", "loading"}:
            if self._starting_pids[index] not in {0, state.pid}:
                self._is_failing[index] = True
            self._starting_pids[index] = state.pid
        elif state.state in {"warm", "draining"}:
            self._starting_pids[index] = 0
            if state.state == "warm":
                self._is_failing[index] = False
        self.states[index] = state
        self._earlier_peaks[index], self._peaks[index] = self._peaks[index], self.in_flight[index]

    def groups(self, model: str, revision: str | None = None) -> list[list[SlotView]]:
        """The warm slots of a model as placement needs them, those with the same weights in one list.

        Args:
            revision: only slots with these weights; None: all.
        """
        groups: dict[str, list[SlotView]] = {}
        for slot, state in self._of(model):
            if state.state == "warm" and revision in {None, state.revision}:
                view = SlotView(slot.index, self.in_flight[slot.index], slot.max_batch, state.ms_per_token)
                groups.setdefault(state.revision, []).append(view)
        return list(groups.values())

    def is_expected(self, model: str, revision: str | None = None) -> bool:
        """Whether a slot of the model is warm, or will probably be soon: it starts, loads, or has just gone down.

        A slot whose worker died before it was warm is not expected: its next worker may die like that again and again.

        Args:
            revision: a warm slot counts only if it has these weights; None: all count.
        """
        earliest = time.monotonic() - self._max_down_s
        for slot, state in self._of(model):
            if state.state == "warm":
                if revision in {None, state.revision}:
                    return True
            elif not self._is_failing[slot.index] and (
                state.state in {"starting", "loading"} or (_is_gone(state) and self._down_since[slot.index] > earliest)
            ):
                return True
        return False

    def describe(self, model: str) -> str:
        """How many slots of the model are in which state, for people."""
        counts = Counter(state.state for _, state in self._of(model))
        return ", ".join(f"{number} {state}" for state, number in counts.items())

    def load_failure(self, model: str) -> str | None:
        """Why the model cannot be served, if loading failed in every slot that holds it, else None."""
        states = [state for _, state in self._of(model)]
        if all(state.state == "failed" for state in states):
            return states[0].reason or "the workers' log has the reason"
        return None

    @property
    def peaks(self) -> list[int]:
        """The most branches reserved at a time in each slot, in about the last second."""
        return list(map(max, self._peaks, self._earlier_peaks))

    def reserve(self, indices: Iterable[int]) -> None:
        """Count one branch more in each slot named; a slot may be named several times."""
        for index in indices:
            self.in_flight[index] += 1
            self._peaks[index] = max(self._peaks[index], self.in_flight[index])

    def release(self, index: int) -> None:
        self.in_flight[index] -= 1

    def _of(self, model: str) -> Iterator[tuple[Slot, State]]:
        pairs = zip(self._slots, self.states, strict=True)
        return ((slot, state) for slot, state in pairs if slot.model == model)


def _is_gone(state: State) -> bool:
    return state.state in {"down", "draining"}
