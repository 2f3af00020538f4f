"""The slot table: which slots placement sees, when a model counts as failed, and when as expected; and what a request
for a model that only other machines hold waits for."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.pool import slot_table
from gateway.pool.slot_table import HANDOVER_S, MAX_DOWN_S, ServedModels, SlotTable
from shared.plan import REMOTE, Model, Plan, Remote, Slot, make_slots
from shared.protocol import State

PLAN = Plan({}, [Model("small", "", REMOTE, 0, 0)], [])
WARM = State(state="warm", model="small", n_ctx=64, vocab_size=500)


def make(max_down_s: float = MAX_DOWN_S) -> SlotTable:
    return SlotTable(make_slots(["cpu"], [("small", 2), ("medium", 1)], Path("/run"), 3), max_down_s)


def test_placement_sees_the_warm_slots_of_the_model() -> None:
    table = make()
    table.update(1, State(state="warm", ms_per_token=2.5))
    table.update(2, State(state="warm", ms_per_token=9.0))
    table.reserve([1, 1])
    table.release(1)
    [[entry]] = table.groups("small")
    assert (entry.index, entry.in_flight, entry.max_batch, entry.load(0)) == (1, 1, 3, 2.5)


@pytest.mark.parametrize("next_state", ["draining", "down", "starting", "loading"])
def test_a_model_stays_ready_for_a_moment_while_its_slots_change_their_workers(
    next_state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make()
    assert table.ready_models == set()
    for index in (0, 1):
        table.update(index, State(state="warm", pid=1))
    for index in (0, 1):
        table.update(index, State(state=next_state, pid=2))
    assert table.ready_models == {"small"}
    later = time.monotonic() + HANDOVER_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert table.ready_models == set()
    table.update(1, State(state="warm", pid=2))
    assert table.ready_models == {"small"}


@pytest.mark.parametrize(
    ("state", "is_expected"),
    [("starting", True), ("loading", True), ("warm", True), ("failed", False), ("draining", False), ("down", False)],
)
def test_a_model_is_expected_while_a_slot_is_warm_or_on_its_way(state: Any, is_expected: bool) -> None:
    table = make(max_down_s=0.0)
    assert not table.is_expected("small")
    table.update(0, State(state=state))
    assert table.is_expected("small") == is_expected
    assert not table.is_expected("medium")
    assert bool(table.groups("small")) == (state == "warm")


def test_a_slot_that_went_down_is_expected_back_for_a_while() -> None:
    table = make(max_down_s=0.05)
    time.sleep(0.06)
    assert not table.is_expected("small")
    table.update(0, State(state="warm"))
    table.update(0, State(state="draining"))
    assert table.is_expected("small")
    time.sleep(0.06)
    table.update(0, State(state="down"))  # not counted from here: it has been draining all the time
    assert not table.is_expected("small")


def test_a_slot_whose_workers_die_before_they_are_warm_is_not_expected() -> None:
    table = make()

    def is_expected_after(*states: State) -> bool:
        for state in states:
            table.update(0, state)
        return table.is_expected("small")

    table.update(1, State(state="failed"))
    assert is_expected_after(State(state="loading", pid=1), State(state="down", pid=1))
    assert is_expected_after(State(state="loading", pid=1))  # only the connection was lost
    assert not is_expected_after(State(state="down", pid=1), State(state="starting", pid=2))
    assert not is_expected_after(State(state="loading", pid=2), State(state="down", pid=2))
    assert is_expected_after(State(state="starting", pid=3), State(state="warm", pid=3))
    assert is_expected_after(State(state="down", pid=3), State(state="starting", pid=4))
    # A worker that is stopped while it loads has not died.
    assert is_expected_after(State(state="draining", pid=4), State(state="down", pid=4), State(state="starting", pid=5))


def remote_table() -> SlotTable:
    remote = Remote("https", "gpu.example", "10.0.0.1", 8100)
    return SlotTable([Slot(7, "", "small", "", 0, remote=remote)])


@pytest.mark.parametrize(
    ("max_batch", "num_gateways", "share"),
    [(48, 0, 48), (48, 1, 48), (48, 2, 24), (49, 2, 25), (8, 4, 3), (2, 4, 2), (0, 1, 0)],
)
def test_a_gateway_has_its_share_of_a_worker_on_another_machine(max_batch: int, num_gateways: int, share: int) -> None:
    table = remote_table()
    assert table.groups("small") == []
    table.update(7, State(state="warm", max_batch=max_batch, num_gateways=num_gateways))
    [[entry]] = table.groups("small")
    assert (entry.index, entry.room(), entry.max_batch) == (7, share, share)


def test_the_batch_of_a_worker_on_this_machine_is_that_of_the_plan() -> None:
    table = make()
    table.update(0, State(state="warm", max_batch=48, num_gateways=2))  # as during a reload of the gateway
    assert table.entries[0].max_batch == 3


def test_a_slot_that_leaves_gets_no_branches_and_is_removed_once_it_is_idle() -> None:
    table = remote_table()
    table.update(7, State(state="warm", max_batch=6))
    table.reserve([7])
    assert not table.remove(7)
    table.entries[7].is_leaving = True
    assert table.groups("small") == []
    assert not table.is_expected("small")
    assert table.load_failure("small") is None
    assert not table.remove(7)
    table.release(7)
    assert table.remove(7)
    assert table.states == {}


def test_a_request_waits_for_the_first_state_after_the_start() -> None:
    """A gateway that takes the place of a killed one has clients before it has states."""
    models = ServedModels(PLAN)
    assert models.get("small").n_ctx == 0
    reports = threading.Timer(0.05, models.learn, ("small", WARM))
    reports.start()
    assert models.wait_for("small").n_ctx == 64
    reports.join()


def test_later_it_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_table, "FIRST_STATE_S", 0.0)
    assert ServedModels(PLAN).wait_for("small").n_ctx == 0
