"""Leases across crashes and reloads, and under every interleaving of master and workers."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

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


def test_a_generation_beyond_the_limit_is_leased_but_never_seen_warm() -> None:
    leases = Leases(1, max_generations=2)
    for age in (1, 2, 3):
        leases.lease(age, 0)
    leases.mark_warm(0, 3)
    assert not leases.successor_is_warm(0, 2)
    leases.free(1)
    leases.lease(4, 0)
    leases.mark_warm(0, 4)
    assert leases.successor_is_warm(0, 2)


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


# Linearizability: each process runs in a thread that stops before each load and store of a shared word, and
# `interleavings` runs every order of these accesses. Each outcome must equal that of some order of whole operations.

Operation = tuple[Any, ...]  # a method's name and its arguments
Outcome = tuple[Any, ...]  # what the operations returned, and what every process reads at the end


class Process:
    """A thread that runs the operations of one process and stops before each access to a shared word."""

    current: Process | None = None  # the process that makes a step; None outside of a schedule

    def __init__(self, leases: Leases, operations: Sequence[Operation]) -> None:
        self.returned: list[Any] = []
        self.is_done = False
        self._go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(leases, operations), daemon=True)
        self._thread.start()

    def _run(self, leases: Leases, operations: Sequence[Operation]) -> None:
        self._go.acquire()
        for name, *args in operations:
            self.returned.append(getattr(leases, name)(*args))
        self.is_done = True
        self._has_stopped.release()

    def stop(self) -> None:
        """Wait for the next step. To be called in the process's own thread."""
        self._has_stopped.release()
        self._go.acquire()

    def step(self) -> None:
        """Run until the next access, or to the end."""
        Process.current = self
        self._go.release()
        assert self._has_stopped.acquire(timeout=10)
        Process.current = None
        if self.is_done:
            self._thread.join()


class Words(list[int]):
    """Shared words: a deep copy of `Leases` models a fork, which copies its state and shares these."""

    def __deepcopy__(self, _memo: object) -> Words:
        return self

    def __getitem__(self, index: Any) -> Any:
        self._stop()
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._stop()
        super().__setitem__(index, value)

    @staticmethod
    def _stop() -> None:
        if Process.current is not None:
            Process.current.stop()


class Scenario:
    """Operations on one slot: a sequence, then processes that run concurrently.

    Args:
        before: the sequence; `lease` and `free` run in the master, `mark_warm` in its worker.
        master: concurrent operations of the master.
        workers: concurrent operations of workers, by age; each has the state of its fork.
    """

    def __init__(self, before: list[Operation], master: list[Operation], workers: dict[int, list[Operation]]) -> None:
        self.before = before
        self.processes = [master, *workers.values()]
        self._ages = list(workers)

    def fork(self) -> list[Leases]:
        """The state of each process before its first operation."""
        master = Leases(1, max_generations=3, words=Words([0] * Leases.num_words(1, 3)))
        forked = {0: master}
        for name, *args in self.before:
            getattr(forked[args[1]] if name == "mark_warm" else master, name)(*args)
            if name == "lease":
                forked[args[0]] = copy.deepcopy(master)
        return [master, *(forked[age] for age in self._ages)]

    def sequential(self) -> set[Outcome]:
        """The outcomes of every order of whole operations."""
        outcomes = set()
        owners = [number for number, operations in enumerate(self.processes) for _ in operations]
        for order in set(itertools.permutations(owners)):
            copies, left = self.fork(), [iter(operations) for operations in self.processes]
            returned: list[list[Any]] = [[] for _ in copies]
            for number in order:
                name, *args = next(left[number])
                returned[number].append(getattr(copies[number], name)(*args))
            outcomes.add(outcome_of(copies, returned))
        return outcomes


def outcome_of(copies: Sequence[Leases], returned: Sequence[Sequence[Any]]) -> Outcome:
    """What was returned, the master's counts and holders, and every process's view of each generation."""
    seen = [copied.successor_is_warm(0, age) for copied in copies for age in range(6)]
    return (*map(tuple, returned), copies[0].num_failures(0), tuple(copies[0].holders(0)), tuple(seen))


def interleavings(scenario: Scenario) -> Iterator[Outcome]:
    """The outcomes of all schedules, enumerated depth first; each schedule runs from the start."""
    prefixes: list[tuple[int, ...]] = [()]
    while prefixes:
        schedule = list(prefixes.pop())
        copies = scenario.fork()
        processes = [Process(*pair) for pair in zip(copies, scenario.processes, strict=True)]
        for number in schedule:
            processes[number].step()
        while ready := [number for number, process in enumerate(processes) if not process.is_done]:
            prefixes += [(*schedule, number) for number in ready[1:]]
            schedule.append(ready[0])
            processes[ready[0]].step()
        yield outcome_of(copies, [process.returned for process in processes])


SERVING: list[Operation] = [("lease", 1, 0), ("mark_warm", 0, 1)]
RELOADING: list[Operation] = [*SERVING, ("lease", 2, 0)]
FAILING: list[Operation] = [
    *(("lease", 1, 0), ("lease", 2, 0), ("free", 2)),
    *(("lease", 3, 0), ("free", 3), ("lease", 4, 0)),
]
SCENARIOS = {
    "warm while the old generation ends": Scenario(RELOADING, [("free", 1)], {2: [("mark_warm", 0, 2)]}),
    "warm while the old generation is replaced": Scenario(
        RELOADING, [("free", 1), ("lease", 3, 0)], {2: [("mark_warm", 0, 2)]}
    ),
    "old generation warm while the new one crashes": Scenario(
        FAILING[:2], [("free", 2), ("lease", 3, 0)], {1: [("mark_warm", 0, 1)]}
    ),
    "warm while a third failure is counted": Scenario(
        FAILING, [("free", 4), ("lease", 5, 0)], {1: [("mark_warm", 0, 1)]}
    ),
    "two generations warm at once": Scenario(
        [*RELOADING, ("lease", 3, 0)], [("free", 1)], {2: [("mark_warm", 0, 2)], 3: [("mark_warm", 0, 3)]}
    ),
    "a warm word is reused": Scenario(
        [*RELOADING, ("mark_warm", 0, 2), ("free", 1)], [("lease", 3, 0)], {2: [("successor_is_warm", 0, 2)] * 2}
    ),
    "reads while the new generation crashes again": Scenario(
        [*RELOADING, ("free", 2), ("lease", 3, 0)], [("free", 3)], {1: [("successor_is_warm", 0, 1)] * 2}
    ),
    "reads while the new generation becomes warm and the next is leased": Scenario(
        RELOADING, [("lease", 3, 0)], {1: [("successor_is_warm", 0, 1)], 2: [("mark_warm", 0, 2)]}
    ),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_every_interleaving_equals_some_order_of_whole_operations(scenario: Scenario) -> None:
    allowed = scenario.sequential()
    num_run = 0
    for outcome in interleavings(scenario):
        assert outcome in allowed
        num_run += 1
    assert num_run > 1
    print(f"{num_run} interleavings")
