"""Which workers are forked and stopped, in orders of events that real processes seldom show.

The arbiter is a fake that has no processes: `tests/e2e/test_lifecycle.py` runs gunicorn's own.
"""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from shared.generations import Generations


class Arbiter:
    """What `Generations` uses of gunicorn's arbiter. A worker's pid is its age."""

    def __init__(self, num_slots: int) -> None:
        self.WORKERS: dict[int, SimpleNamespace] = {}
        self.worker_age = 0
        self.app = SimpleNamespace(cfg="old", reload=lambda: None)
        self.stopped: list[int] = []
        self.is_refusing = False
        self.generations = Generations(self, num_slots)

    def setup(self, app: object) -> None:
        pass

    def spawn_worker(self) -> None:
        self.worker_age += 1
        slot = self.generations.lease(self.worker_age)
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


@pytest.fixture
def arbiter() -> Arbiter:
    """Two slots with a warm worker each: 1 and 2."""
    made = Arbiter(2)
    made.manage_workers()
    made.warm(1, 2)
    return made


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


def test_a_second_reload_ends_the_successors_that_still_load(arbiter: Arbiter) -> None:
    arbiter.reload()
    arbiter.reload()
    arbiter.manage_workers()
    assert sorted(arbiter.stopped) == [3, 4]
    arbiter.end(3)
    arbiter.warm(5)
    assert arbiter.stopped[2:] == [1]
    assert arbiter.counts(0) == {"reloads.succeeded": 1}


def test_a_refused_configuration_changes_nothing(arbiter: Arbiter) -> None:
    def refuse() -> None:
        arbiter.app.cfg = "new"
        raise SystemExit("TERCET_QUEUE='many' must be a whole number")

    arbiter.app.reload = refuse
    arbiter.reload()
    arbiter.manage_workers()
    assert (arbiter.app.cfg, sorted(arbiter.WORKERS), arbiter.stopped) == ("old", [1, 2], [])
    assert arbiter.counts(1) == {"reloads.failed": 1}


def test_a_stop_is_known_to_the_workers_before_they_are_signalled(arbiter: Arbiter) -> None:
    assert not arbiter.generations.leases.is_stopping
    arbiter.stop()
    assert arbiter.generations.leases.is_stopping
    assert arbiter.stopped == [1, 2]
