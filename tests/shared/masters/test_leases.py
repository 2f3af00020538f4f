"""Leases across crashes and reloads, and under every interleaving of master and workers."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

from shared.masters.leases import Leases


def test_a_reload_gives_each_slot_a_second_generation() -> None:
    leases = Leases(2)
    for slot in (0, 1):
        leases.lease(1 + slot, slot)
        leases.mark_warm(slot, 1 + slot)
    for slot in (0, 1):
        leases.lease(3 + slot, slot)
    assert [leases.holders(slot) for slot in (0, 1)] == [[1, 3], [2, 4]]
    assert (leases.is_warm(0, 3), leases.successor_is_warm(0, 1)) == (False, False)
    leases.mark_warm(0, 3)
    assert (leases.is_warm(0, 3), leases.successor_is_warm(0, 1)) == (True, True)
    assert not leases.successor_is_warm(1, 2)


def test_events_are_counted_by_slot() -> None:
    leases = Leases(2)
    for name in ("restarts", "reloads.failed", "restarts"):
        leases.count(1, name)
    assert leases.counts(0) == {"restarts": 0, "reloads.succeeded": 0, "reloads.failed": 0}
    assert leases.counts(1) == {"restarts": 2, "reloads.succeeded": 0, "reloads.failed": 1}


def test_leases_are_seen_across_fork() -> None:
    leases = Leases(1)
    leases.lease(1, 0)
    leases.lease(2, 0)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        leases.mark_warm(0, 2)
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(10 * leases.is_stopping + int(leases.counts(0)["restarts"]))
    leases.mark_stopping()
    leases.count(0, "restarts")
    os.close(write_end)
    os.close(read_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    assert leases.successor_is_warm(0, 1)


# Linearizability: one process runs its operations, and operations of others come between any two of its accesses to
# shared words. Each outcome must equal that of operations between which the others came.

Operation = tuple[Any, ...]  # a method's name and its arguments
Outcome = tuple[Any, ...]  # what the operations returned, and what every process reads at the end


class Words(list[int]):
    """Shared words: a deep copy of `Leases` models a fork, which copies its state and shares these.

    Attributes:
        num_loads: loads of the process under test.
        interruptions: what others do before the load of that number.
    """

    def __init__(self, size: int) -> None:
        super().__init__([0] * size)
        self.num_loads = 0
        self.interruptions: dict[int, list[Callable[[], object]]] = {}

    def __deepcopy__(self, _memo: object) -> Words:
        return self

    def __getitem__(self, index: Any) -> Any:
        self.interrupt()
        self.num_loads += 1
        return super().__getitem__(index)

    def interrupt(self) -> None:
        before = self.num_loads
        for act in self.interruptions.pop(self.num_loads, []):
            act()
        self.num_loads = before


class Scenario(NamedTuple):
    """Operations on one slot. Processes are named by their age, the master by 0; each has the state of its fork.

    Attributes:
        before: a sequence; `lease` and `free` run in the master, `mark_warm` in its worker.
        process: who runs `operations`.
        others: an operation of another process each.
    """

    before: list[Operation]
    process: int
    operations: list[Operation]
    others: dict[int, Operation]

    def outcome(self, places: Sequence[int]) -> tuple[Outcome, list[int]]:
        """With the others before the loads of these numbers. And how many loads were before each operation."""
        words = Words(Leases.num_words(1))
        forked = {0: Leases(1, words)}
        for name, *args in self.before:
            getattr(forked[args[1] if name == "mark_warm" else 0], name)(*args)
            if name == "lease":
                forked[args[0]] = copy.deepcopy(forked[0])
        words.num_loads = 0
        for place, (age, (name, *args)) in zip(places, self.others.items(), strict=True):
            words.interruptions.setdefault(place, []).append(partial(getattr(forked[age], name), *args))
        returned, borders = [], []
        for name, *args in self.operations:
            borders.append(words.num_loads)
            words.interrupt()
            returned.append(getattr(forked[self.process], name)(*args))
        borders.append(words.num_loads)
        words.interrupt()
        assert not words.interruptions
        seen = [each.successor_is_warm(0, age) for each in forked.values() for age in range(6)]
        return (*returned, forked[0].num_failures(0), *forked[0].holders(0), *seen), borders


SERVING: list[Operation] = [("lease", 1, 0), ("mark_warm", 0, 1)]
RELOADING: list[Operation] = [*SERVING, ("lease", 2, 0)]
FAILING: list[Operation] = [
    *(("lease", 1, 0), ("lease", 2, 0), ("free", 2)),
    *(("lease", 3, 0), ("free", 3), ("lease", 4, 0)),
]
IS_REPLACED: list[Operation] = [("successor_is_warm", 0, 1)] * 2
SCENARIOS = {
    "warm while the old generation is replaced": Scenario(
        RELOADING, 0, [("free", 1), ("lease", 3, 0)], {2: ("mark_warm", 0, 2)}
    ),
    "old generation warm while the new one crashes": Scenario(
        FAILING[:2], 0, [("free", 2), ("lease", 3, 0)], {1: ("mark_warm", 0, 1)}
    ),
    "warm while a third failure is counted": Scenario(
        FAILING, 0, [("free", 4), ("lease", 5, 0)], {1: ("mark_warm", 0, 1)}
    ),
    "two generations warm at once": Scenario(
        FAILING[:2], 0, [("free", 1)], {1: ("mark_warm", 0, 1), 2: ("mark_warm", 0, 2)}
    ),
    "a warm word is reused": Scenario(
        [*RELOADING, ("mark_warm", 0, 2), ("free", 1)], 2, [("successor_is_warm", 0, 2)] * 2, {0: ("lease", 3, 0)}
    ),
    "reads while the new generation crashes again": Scenario(
        [*RELOADING, ("free", 2), ("lease", 3, 0)], 1, IS_REPLACED, {0: ("free", 3)}
    ),
    "reads while the new generation becomes warm": Scenario(RELOADING, 1, IS_REPLACED, {2: ("mark_warm", 0, 2)}),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_every_interleaving_equals_some_order_of_whole_operations(scenario: Scenario) -> None:
    _, borders = scenario.outcome([0] * len(scenario.others))
    orders = itertools.product(borders, repeat=len(scenario.others))
    allowed = {scenario.outcome(places)[0] for places in orders}
    for places in itertools.product(range(borders[-1] + 1), repeat=len(scenario.others)):
        assert scenario.outcome(places)[0] in allowed, places
