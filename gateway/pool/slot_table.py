"""What admission knows of each slot and each model: the last state of a slot's worker, and how many branches are
reserved in it; what the plan says of a model, or its workers do.

`SlotTable` is plain data without a lock; `Admission` holds its own lock around every call.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from shared.plan import REMOTE, Model, Plan, Slot
from shared.protocol import State

UNKNOWN = State(state="down", reason="its worker has not reported a state yet")
# A worker that has died is replaced and reports again within about 2 s; a stopped worker, about 10 s after its silence
# was noticed, because gunicorn's timeout ends it. A slot that is down for longer is not expected to come back.
MAX_DOWN_S = 15.0
# In a reload a worker ends its state stream when its successor is warm already, and the watcher connects again every
# 0.05 s: twenty tries, for a busy machine. Requests wait for it, so the server is ready, also where all slots of a
# model change their worker at one moment.
HANDOVER_S = 1.0
# Each of several gateways has its share of a worker's batch, but room for a request where the batch has so much.
MIN_SHARE = 3
# Rows of a CPU's step that share each block of weights while it is in registers (`workers/engine/cpu`). Six take 0.9 to
# 1.7 times as long as the three of one request, nine 1.2 to 2.7 times, 36 up to 9.5 times (measured by hand: embedded
# and small, fp32 and int8, after 64 and 900 tokens; AMD EPYC, Zen 4, one core).
CPU_BLOCK_ROWS = 6
# A gateway that starts, in the place of one that was killed for example, has the first state of a worker that can be
# reached well within this time. Requests wait for it; later they are refused at once.
FIRST_STATE_S = 3.0


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of one slot.

    Attributes:
        in_flight: reserved branches.
        peak: the most branches reserved at a time since the worker last reported its state, which it does twice a
            second; `earlier_peak`: between the two reports before.
        down_since: `time.monotonic()` time.
        warm_until: `time.monotonic()` time at which the slot was warm last, unless it is now.
        starting_pid: process id of the worker that started last and has not been warm, 0 for none.
        is_failing: a worker of the slot has died before it was warm. The next one will probably die too.
        is_leaving: gets no further branches, because its address is gone.
    """

    slot: Slot
    state: State = UNKNOWN
    in_flight: int = 0
    peak: int = 0
    earlier_peak: int = 0
    down_since: float = field(default_factory=time.monotonic)
    warm_until: float = -math.inf
    starting_pid: int = 0
    is_failing: bool = False
    is_leaving: bool = False

    @property
    def index(self) -> int:
        return self.slot.index

    @property
    def max_batch(self) -> int:
        """Branches that this gateway may have in the slot. A worker of another machine reports its batch, and how many
        gateways share it; what all of them together have too much there it refuses (`slot_full`)."""
        if self.slot.remote is None:
            return self.slot.max_batch
        share = -(-self.state.max_batch // max(1, self.state.num_gateways))
        return max(share, min(MIN_SHARE, self.state.max_batch))

    @property
    def shared_batch(self) -> int:
        """Branches that the slot may have while an owner that wants no more than its share uses it: as many as make its
        steps at most about twice as long."""
        is_cpu = (self.slot.device or self.state.device) == "cpu"
        return min(self.max_batch, CPU_BLOCK_ROWS) if is_cpu else self.max_batch

    def room(self, taken: int = 0) -> int:
        """Branches that still fit after `taken` more have been placed."""
        return self.max_batch - self.in_flight - taken

    def load(self, extra: int) -> float:
        """Load with `extra` branches more, in milliseconds per token. A slot not measured yet counts as 1 ms."""
        return (self.in_flight + extra) * (self.state.ms_per_token or 1.0)


class SlotTable:
    """Slots by index, in the order in which they were added. An index is never used again."""

    def __init__(self, slots: Iterable[Slot], max_down_s: float = MAX_DOWN_S) -> None:
        """
        Args:
            max_down_s: how long a slot that is down is expected to come back.
        """
        self._max_down_s = max_down_s
        self.entries: dict[int, Entry] = {slot.index: Entry(slot) for slot in slots}

    @property
    def states(self) -> dict[int, State]:
        return {index: self.reported_state(entry) for index, entry in self.entries.items()}

    def reported_state(self, entry: Entry) -> State:
        """The worker's state. A slot that leaves drains, whether its worker knows it or not."""
        if entry.state.state == "warm" and entry.is_leaving:
            return msgspec.structs.replace(entry.state, state="draining", reason="its address is gone")
        return entry.state

    @property
    def in_flight(self) -> list[int]:
        """Reserved branches, in the order of `entries`."""
        return [entry.in_flight for entry in self.entries.values()]

    @property
    def is_any_warm(self) -> bool:
        return any(entry.state.state == "warm" for entry in self.entries.values())

    @property
    def ready_models(self) -> set[str]:
        """Models with a slot that is warm or was until `HANDOVER_S` ago."""
        earliest = time.monotonic() - HANDOVER_S
        return {
            entry.slot.model
            for entry in self.entries.values()
            if self.reported_state(entry).state == "warm" or (entry.warm_until > earliest and not entry.is_leaving)
        }

    def add(self, slot: Slot) -> None:
        self.entries[slot.index] = Entry(slot)

    def remove(self, index: int) -> bool:
        """Remove a slot that leaves, unless branches run there. Returns whether it is gone."""
        entry = self.entries[index]
        if not entry.is_leaving or entry.in_flight:
            return False
        del self.entries[index]
        return True

    def update(self, index: int, state: State) -> None:
        """Set a slot's state."""
        entry = self.entries[index]
        if not _is_gone(entry.state):
            entry.down_since = time.monotonic()
        if entry.state.state == "warm":
            entry.warm_until = time.monotonic()
        if state.state in {"starting", "loading"}:
            if entry.starting_pid not in {0, state.pid}:
                entry.is_failing = True
            entry.starting_pid = state.pid
        elif state.state in {"warm", "draining"}:
            entry.starting_pid = 0
            if state.state == "warm":
                entry.is_failing = False
        entry.state = state
        entry.earlier_peak, entry.peak = entry.peak, entry.in_flight

    def groups(self, model: str, revision: str | None = None) -> list[list[Entry]]:
        """The warm slots of a model that get branches, those with the same weights in one list.

        Args:
            revision: only slots with these weights; None: all.
        """
        groups: dict[str, list[Entry]] = {}
        for entry in self._warm(model):
            if revision in {None, entry.state.revision}:
                groups.setdefault(entry.state.revision, []).append(entry)
        return list(groups.values())

    def _warm(self, model: str) -> Iterator[Entry]:
        return (entry for entry in self._of(model) if entry.state.state == "warm")

    def is_expected(self, model: str, revision: str | None = None) -> bool:
        """Whether a slot of the model is warm, or will probably be soon: it starts, loads, or has just gone down.

        A slot whose worker died before it was warm is not expected: its next worker may die like that again and again.

        Args:
            revision: a warm slot counts only if it has these weights; None: all count.
        """
        if any(revision in {None, entry.state.revision} for entry in self._warm(model)):
            return True
        earliest = time.monotonic() - self._max_down_s
        return any(
            entry.state.state in {"starting", "loading"} or (_is_gone(entry.state) and entry.down_since > earliest)
            for entry in self._of(model)
            if not entry.is_failing
        )

    def describe(self, model: str) -> str:
        """How many slots of the model are in which state, for people."""
        counts = Counter(entry.state.state for entry in self._of(model))
        return ", ".join(f"{number} {state}" for state, number in counts.items()) or "none has an address"

    def load_failure(self, model: str) -> str | None:
        """Why the model cannot be served, if loading failed in every slot that holds it, else None."""
        states = [entry.state for entry in self._of(model)]
        if states and all(state.state == "failed" for state in states):
            return states[0].reason or "the workers' log has the reason"
        return None

    @property
    def peaks(self) -> list[int]:
        """The most branches reserved at a time in each slot, in about the last second."""
        return [max(entry.peak, entry.earlier_peak) for entry in self.entries.values()]

    def reserve(self, indices: Iterable[int]) -> None:
        """Count one branch more in each slot named; a slot may be named several times."""
        for index in indices:
            entry = self.entries[index]
            entry.in_flight += 1
            entry.peak = max(entry.peak, entry.in_flight)

    def release(self, index: int) -> None:
        self.entries[index].in_flight -= 1

    def _of(self, model: str) -> Iterator[Entry]:
        """The slots of a model that get branches."""
        return (entry for entry in self.entries.values() if entry.slot.model == model and not entry.is_leaving)


class ServedModels:
    """The models of the plan. What it lacks of one that only other machines hold, the states of its workers say.
    Thread-safe: a model is replaced, never changed.

    Attributes:
        names: fixed at the start.
        default: model of a request that names none.
    """

    def __init__(self, plan: Plan) -> None:
        self._models = {model.name: model for model in plan.models}
        self.names = list(dict.fromkeys([slot.model for slot in plan.slots] + [model.name for model in plan.models]))
        self.default = plan.default_model
        self._waits_until = time.monotonic() + FIRST_STATE_S
        self._learned = threading.Condition()

    def all(self) -> list[Model]:
        return list(self._models.values())

    def get(self, name: str) -> Model:
        """The model of this name. Its `n_ctx` is 0 as long as no worker has reported it."""
        return self._models[name]

    def wait_for(self, name: str) -> Model:
        """As `get`. In the first seconds of this process it waits until a worker has reported the model's `n_ctx`."""
        with self._learned:
            self._learned.wait_for(lambda: self._models[name].n_ctx, max(0.0, self._waits_until - time.monotonic()))
        return self._models[name]

    def learn(self, name: str, state: State) -> None:
        """Note what a worker reports of its model. A checkpoint on this machine has been read: nothing is learned."""
        model = self._models.get(name)
        if model is None or model.source != REMOTE or not state.n_ctx:
            return
        if (model.n_ctx, model.vocab_size, model.revision) != (state.n_ctx, state.vocab_size, state.revision):
            known = msgspec.structs.replace(
                model, n_ctx=state.n_ctx, vocab_size=state.vocab_size, revision=state.revision
            )
            with self._learned:
                self._models[name] = known
                self._learned.notify_all()


def _is_gone(state: State) -> bool:
    return state.state in {"down", "draining"}
