"""Placement: each policy's rules, load, document affinity, and slots that have just failed."""

import pytest

from gateway.pool.placement import largest_wave, place, place_on_one_revision
from gateway.pool.slot_table import Entry
from shared.plan import Slot
from shared.protocol import State


def entry(index: int, in_flight: int = 0, max_batch: int = 6, ms: float = 1.0) -> Entry:
    return Entry(Slot(index, "cpu", "small", "", max_batch), State(state="warm", ms_per_token=ms), in_flight)


def test_auto_packs_while_a_slot_has_room_for_all() -> None:
    assert place([entry(0, 3), entry(1, 0), entry(2, 1)], 3, "auto") == [1, 1, 1]


def test_auto_spreads_when_no_slot_has_room_for_all() -> None:
    assert sorted(place([entry(0, 5), entry(1, 5), entry(2, 4)], 3, "auto") or []) == [0, 1, 2]


def test_pack_waits_for_a_slot_with_room_for_all() -> None:
    assert place([entry(0, 4), entry(1, 4)], 3, "pack") is None
    assert place([entry(0, 4), entry(1, 3)], 3, "pack") == [1, 1, 1]


def test_spread_takes_distinct_slots_the_least_loaded_first() -> None:
    slots = [entry(0, 2), entry(1, 0), entry(2, 1), entry(3, 5)]
    assert place(slots, 3, "spread") == [1, 2, 0]


def test_spread_reuses_slots_if_there_are_fewer_than_branches() -> None:
    assert place([entry(0), entry(1)], 3, "spread") == [0, 1, 0]


def test_load_is_work_in_flight_times_time_per_token() -> None:
    assert place([entry(0, in_flight=1, ms=10), entry(1, in_flight=3, ms=2)], 1, "auto") == [1]
    assert place([entry(0, in_flight=0, ms=10), entry(1, in_flight=5, ms=2)], 1, "auto") == [0]


def test_a_slot_that_failed_is_used_only_if_there_is_no_other() -> None:
    assert place([entry(0), entry(1, 5)], 1, "auto", avoid={0}) == [1]
    assert place([entry(0)], 1, "auto", avoid={0}) == [0]


def test_a_document_goes_to_the_slot_with_its_cached_prompt_unless_that_is_busy() -> None:
    assert place([entry(0), entry(1)], 3, "auto", cached_on=1) == [1, 1, 1]
    assert place([entry(0), entry(1, 3)], 3, "auto", cached_on=1) == [1, 1, 1]
    assert place([entry(0, max_batch=12), entry(1, 6, 12)], 3, "auto", cached_on=1) == [0, 0, 0]
    assert place([entry(0), entry(1, 4)], 3, "auto", cached_on=1) == [0, 0, 0]
    assert place([entry(0), entry(1)], 3, "auto", avoid={1}, cached_on=1) == [0, 0, 0]


@pytest.mark.parametrize("policy", ["auto", "pack", "spread"])
def test_nothing_is_placed_beyond_the_batch(policy: str) -> None:
    assert place([entry(0, 6), entry(1, 5)], 2, policy) is None  # type: ignore[arg-type]
    assert place([], 1, policy) is None  # type: ignore[arg-type]


def test_the_largest_wave_is_one_batch_with_pack_and_all_batches_otherwise() -> None:
    assert largest_wave([entry(0, 6), entry(1)], "auto") == 12
    assert largest_wave([entry(0, 6), entry(1)], "pack") == 6


def test_a_slot_not_measured_yet_counts_as_one_millisecond_per_token() -> None:
    assert place([entry(0, 2, ms=0.0), entry(1, 1, ms=2.0)], 1, "auto") == [0]


def test_branches_never_mix_revisions() -> None:
    assert place_on_one_revision([[entry(0, 5)], [entry(1, 4)]], 2, "auto") == [1, 1]
    assert place_on_one_revision([[entry(0, 5)], [entry(1, 5)]], 2, "auto") is None
    assert place_on_one_revision([], 1, "auto") is None


def test_of_several_revisions_the_one_with_the_lower_load_is_taken() -> None:
    assert place_on_one_revision([[entry(0, 2)], [entry(1, 1)]], 1, "auto") == [1]
    assert place_on_one_revision([[entry(0, 2, ms=1)], [entry(1, 1, ms=4)]], 1, "auto") == [0]


def test_of_several_revisions_the_one_with_the_larger_wave_is_taken() -> None:
    groups = [[entry(0, max_batch=2)], [entry(1, 2), entry(2)]]
    assert sorted(place_on_one_revision(groups, 8, "auto") or []) == [1, 1, 1, 1, 2, 2, 2, 2]
