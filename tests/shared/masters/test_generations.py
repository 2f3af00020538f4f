"""Which workers are forked and stopped, in orders of events that real processes seldom show.

The arbiter is a fake that has no processes: `tests/e2e/test_lifecycle.py` runs gunicorn's own.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from shared.masters.generations import Generations


class Arbiter:
    """What `Generations` uses of gunicorn's arbiter. A worker's pid is its age."""

    def __init__(self, num_slots: int, max_successors: Sequence[tuple[set[int], int]] = ()) -> None:
        self.WORKERS: dict[int, SimpleNamespace] = {}
        self.worker_age = 0
        self.app = SimpleNamespace(cfg=SimpleNamespace(workers=num_slots), app_uri="app", reload=lambda: None)
        self.stopped: list[int] = []
        self.cfg = self.app.cfg
        self.is_refusing = False
        self.can_fork = True
        self.now = 0.0
        self.generations = Generations(self, num_slots, max_successors, clock=lambda: self.now)

    def setup(self, app: SimpleNamespace) -> None:
        self.cfg = app.cfg
        if self.is_refusing:
            self.is_refusing = False
            raise RuntimeError("class uri invalid or not found")

    def spawn_worker(self) -> None:
        self.worker_age += 1
        slot = self.generations.lease(self.worker_age)
        if not self.can_fork:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self.WORKERS[self.worker_age] = SimpleNamespace(age=self.worker_age, slot_index=slot)

    def kill_worker(self, pid: int, number: int) -> None:
        assert number == signal.SIGTERM
        self.stopped.append(pid)

    def stop(self, graceful: bool = True) -> None:
        self.stopped += sorted(self.WORKERS)

    def manage_workers(self) -> None:
        raise AssertionError("replaced")

    def reload(self) -> None:
        raise AssertionError("replaced")

    # Events.

    def end(self, age: int) -> None:
        self.generations.free(self.WORKERS.pop(age).slot_index, age)

    def warm(self, *ages: int) -> None:
        for age in ages:
            self.generations.leases.mark_warm(self.WORKERS[age].slot_index, age)
        self.manage_workers()

    def counts(self, slot: int) -> dict[str, float]:
        return {name: count for name, count in self.generations.leases.counts(slot).items() if count}


def serving(num_slots: int, max_successors: Sequence[tuple[set[int], int]] = ()) -> Arbiter:
    """Each slot has a warm worker; their ages begin with 1."""
    made = Arbiter(num_slots, max_successors)
    made.manage_workers()
    made.warm(*range(1, num_slots + 1))
    return made


@pytest.fixture
def arbiter() -> Arbiter:
    return serving(2)


def test_a_worker_is_stopped_once_when_its_own_successor_is_warm(arbiter: Arbiter) -> None:
    arbiter.reload()
    arbiter.manage_workers()
    assert arbiter.stopped == []
    arbiter.warm(4)
    arbiter.manage_workers()
    assert arbiter.stopped == [2]
    arbiter.warm(3)
    assert arbiter.stopped == [2, 1]
    assert arbiter.counts(0) == arbiter.counts(1) == {"reloads.succeeded": 1}


def test_the_predecessor_of_a_successor_that_ended_stays_through_the_next_reload(arbiter: Arbiter) -> None:
    arbiter.reload()
    arbiter.end(3)
    arbiter.warm(4)
    arbiter.end(2)
    arbiter.manage_workers()
    assert (arbiter.stopped, sorted(arbiter.WORKERS)) == ([2], [1, 4])
    arbiter.reload()
    arbiter.manage_workers()
    assert arbiter.stopped == [2]
    arbiter.warm(5)
    assert arbiter.stopped == [2, 1]
    assert arbiter.counts(0) == {"reloads.failed": 1, "reloads.succeeded": 1}


def test_a_dead_worker_is_replaced_during_a_reload(arbiter: Arbiter) -> None:
    arbiter.reload()
    arbiter.end(1)
    arbiter.end(3)
    arbiter.manage_workers()
    assert {worker.slot_index for worker in arbiter.WORKERS.values()} == {0, 1}
    assert arbiter.WORKERS[5].slot_index == 0
    assert arbiter.counts(0) == {"reloads.failed": 1, "restarts": 1}


def test_a_storm_of_reloads_is_one_reload_and_one_that_waits(arbiter: Arbiter) -> None:
    for _ in range(40):
        arbiter.reload()
        arbiter.manage_workers()
        assert sorted(arbiter.WORKERS) == [1, 2, 3, 4]
    arbiter.warm(3, 4)
    assert sorted(arbiter.stopped) == [1, 2]
    arbiter.end(1)
    arbiter.manage_workers()
    assert sorted(arbiter.WORKERS) == [2, 3, 4]  # a predecessor drains: the reload has not ended
    arbiter.end(2)
    arbiter.manage_workers()
    assert sorted(arbiter.WORKERS) == [3, 4, 5, 6]
    arbiter.warm(5, 6)
    arbiter.end(3)
    arbiter.end(4)
    arbiter.manage_workers()
    assert sorted(arbiter.WORKERS) == [5, 6]
    assert arbiter.counts(0) == arbiter.counts(1) == {"reloads.succeeded": 2}


def test_a_reload_that_waits_follows_one_whose_successors_ended(arbiter: Arbiter) -> None:
    arbiter.reload()
    arbiter.reload()
    arbiter.end(3)
    arbiter.end(4)
    arbiter.manage_workers()
    assert (sorted(arbiter.WORKERS), arbiter.stopped) == ([1, 2, 5, 6], [])


def refuse_as_gunicorn(_arbiter: Arbiter) -> None:
    raise SystemExit(1)


def refuse_in_setup(arbiter: Arbiter) -> None:
    arbiter.app.cfg = SimpleNamespace(workers=2)
    arbiter.is_refusing = True


def change_the_number_of_slots(arbiter: Arbiter) -> None:
    arbiter.app.cfg = SimpleNamespace(workers=3)
    arbiter.app.app_uri = "app"


@pytest.mark.parametrize("change", [refuse_as_gunicorn, refuse_in_setup, change_the_number_of_slots])
def test_a_refused_configuration_changes_nothing(arbiter: Arbiter, change: Callable[[Arbiter], None]) -> None:
    """gunicorn sets `app_uri` to None before it reads a configuration; a worker forked then could not start."""

    def refuse() -> None:
        arbiter.app.app_uri = None
        arbiter.app.added = "by gunicorn"
        change(arbiter)

    arbiter.app.reload = refuse
    before = dict(vars(arbiter.app))
    arbiter.reload()
    arbiter.manage_workers()
    assert (vars(arbiter.app), sorted(arbiter.WORKERS), arbiter.stopped) == (before, [1, 2], [])
    assert arbiter.cfg is before["cfg"]
    assert arbiter.counts(0) == arbiter.counts(1) == {"reloads.failed": 1}
    arbiter.end(1)  # a death is healed as before
    arbiter.manage_workers()
    assert sorted(arbiter.WORKERS) == [2, 3]


def test_a_fork_that_fails_is_tried_again_and_ends_no_sibling(arbiter: Arbiter) -> None:
    arbiter.can_fork = False
    arbiter.end(1)
    arbiter.manage_workers()
    assert sorted(arbiter.WORKERS) == [2]
    arbiter.reload()
    assert (sorted(arbiter.WORKERS), arbiter.counts(1)) == ([2], {"reloads.failed": 1})
    arbiter.can_fork = True
    arbiter.manage_workers()
    assert {worker.slot_index for worker in arbiter.WORKERS.values()} == {0, 1}


def test_the_workers_of_a_gpu_are_replaced_one_after_another() -> None:
    """Its memory holds one successor. A predecessor keeps its memory until its process has ended."""
    arbiter = serving(3, [({0, 1}, 1)])
    arbiter.reload()
    assert sorted(arbiter.WORKERS) == [1, 2, 3, 4, 5]
    assert [arbiter.WORKERS[age].slot_index for age in (4, 5)] == [0, 2]
    arbiter.warm(4, 5)
    assert arbiter.stopped == [1, 3]
    arbiter.manage_workers()
    assert 6 not in arbiter.WORKERS
    arbiter.end(1)
    arbiter.manage_workers()
    assert arbiter.WORKERS[6].slot_index == 1
    arbiter.warm(6)
    assert arbiter.stopped == [1, 3, 2]
    assert arbiter.counts(1) == {"reloads.succeeded": 1}


def test_a_second_reload_adds_no_third_generation_to_a_gpu() -> None:
    arbiter = serving(2, [({0, 1}, 1)])
    for _ in range(2):
        arbiter.reload()
        arbiter.manage_workers()
    assert sorted(arbiter.WORKERS) == [1, 2, 3]
    for slot, age in ((0, 3), (1, 4), (0, 5), (1, 6)):  # the reload in progress, then the second
        assert (arbiter.worker_age, arbiter.WORKERS[age].slot_index) == (age, slot)
        arbiter.warm(age)
        arbiter.end(arbiter.stopped[-1])
        arbiter.manage_workers()
    assert sorted(arbiter.WORKERS) == [5, 6]


def test_a_successor_that_failed_makes_room_for_the_next() -> None:
    arbiter = serving(2, [({0, 1}, 1)])
    arbiter.reload()
    arbiter.end(3)
    arbiter.manage_workers()
    assert arbiter.WORKERS[4].slot_index == 1
    arbiter.warm(4)
    assert (arbiter.stopped, arbiter.counts(0), arbiter.counts(1)) == (
        [2],
        {"reloads.failed": 1},
        {"reloads.succeeded": 1},
    )


def test_a_reload_without_memory_for_a_successor_is_refused() -> None:
    arbiter = serving(3, [({0, 1}, 0)])
    with capture_logs() as logs:
        arbiter.reload()
    refused = [entry for entry in logs if entry["event"] == "reload_finished"]
    assert [(entry["slot"], entry["outcome"]) for entry in refused] == [(0, "failed"), (1, "failed")]
    assert all("run `tercet reload`" in entry["reason"] for entry in refused)
    arbiter.warm(4)
    arbiter.end(3)
    assert sorted(arbiter.WORKERS) == [1, 2, 4]


@pytest.mark.parametrize("max_successors", [[], [({0, 1}, 1)]])
def test_a_stop_ends_the_reload_in_progress_and_the_one_that_waits(max_successors: list[tuple[set[int], int]]) -> None:
    """It is known to the workers before they are signalled."""
    arbiter = serving(2, max_successors)
    arbiter.reload()
    arbiter.reload()
    assert not arbiter.generations.leases.is_stopping
    arbiter.stop()
    assert arbiter.generations.leases.is_stopping
    assert arbiter.stopped == ([1, 2, 3] if max_successors else [1, 2, 3, 4])
    for successor in arbiter.stopped[2:]:
        arbiter.end(successor)
    arbiter.manage_workers()
    assert sorted(arbiter.WORKERS) == [1, 2]


def test_a_slot_whose_workers_die_while_they_start_is_forked_with_growing_pauses() -> None:
    """A worker that is killed while it imports cannot pause by itself: 170 were forked in 90 s."""
    arbiter = Arbiter(2)
    arbiter.manage_workers()
    arbiter.warm(2)
    ages = [1]
    for pause_s in (0.0, 0.0, 2.0, 4.0, 8.0):
        arbiter.end(ages[-1])
        if pause_s:
            arbiter.now += pause_s - 0.1
            arbiter.manage_workers()
            assert arbiter.generations.leases.holders(0) == []
            arbiter.now += 0.1
        arbiter.manage_workers()
        ages += arbiter.generations.leases.holders(0)
    arbiter.warm(ages[-1])
    arbiter.end(ages[-1])
    arbiter.manage_workers()
    assert arbiter.generations.leases.holders(0) != []  # it has served: the next follows at once
