"""The slot table: which slots placement sees, and when a model counts as failed."""

from pathlib import Path

from gateway.pool.placement import SlotView
from gateway.pool.slot_table import SlotTable
from shared.plan import make_slots
from shared.protocol import State


def make() -> SlotTable:
    return SlotTable(make_slots(["cpu"], [("small", 2), ("medium", 1)], Path("/run"), 3))


def test_slots_are_down_until_they_report() -> None:
    table = make()
    assert [state.state for state in table.states] == ["down"] * 3
    assert table.views("small") == []


def test_placement_sees_the_warm_slots_of_the_model() -> None:
    table = make()
    table.states[1] = State(state="warm", ms_per_token=2.5)
    table.states[2] = State(state="warm", ms_per_token=9.0)
    table.reserve([1, 1])
    table.release(1)
    assert table.views("small") == [SlotView(1, in_flight=1, max_batch=3, ms_per_token=2.5)]


def test_a_model_has_failed_when_all_its_slots_have() -> None:
    table = make()
    table.states[0] = State(state="failed", reason="no such file")
    assert table.load_failure("small") is None
    table.states[1] = State(state="failed")
    assert table.load_failure("small") == "no such file"
    assert table.load_failure("medium") is None


def test_a_failure_without_a_reason_refers_to_the_log() -> None:
    table = make()
    table.states[2] = State(state="failed")
    assert "log" in (table.load_failure("medium") or "")
