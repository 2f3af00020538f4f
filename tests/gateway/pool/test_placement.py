"""Placement: each policy's rules, load, document affinity, and slots that have just failed."""

from typing import Any

import pytest

from gateway.pool import placement
from gateway.pool.placement import DocumentAffinity, OwnerShares, largest_wave, place, place_on_one_revision
from gateway.pool.slot_table import Entry
from shared.plan import Slot
from shared.protocol import State


def entry(index: int, in_flight: int = 0, max_batch: int = 6, ms: float = 1.0) -> Entry:
    return Entry(Slot(index, "cpu", "small", "", max_batch), State(state="warm", ms_per_token=ms), in_flight)


@pytest.mark.parametrize(
    ("slots", "num_branches", "policy", "expected"),
    [
        # One slot while it has room for all, the least loaded; several when none has.
        ([entry(0, 3), entry(1, 0), entry(2, 1)], 3, "auto", [1, 1, 1]),
        ([entry(0, 5), entry(1, 5), entry(2, 4)], 3, "auto", [2, 0, 1]),
        # Wait for a slot with room for all.
        ([entry(0, 4), entry(1, 4)], 3, "pack", None),
        ([entry(0, 4), entry(1, 3)], 3, "pack", [1, 1, 1]),
        # Distinct slots, the least loaded first, while there are enough.
        ([entry(0, 2), entry(1, 0), entry(2, 1), entry(3, 5)], 3, "spread", [1, 2, 0]),
        ([entry(0), entry(1)], 3, "spread", [0, 1, 0]),
        # Load is work in flight times time per token, which is 1 ms where it has not been measured.
        ([entry(0, in_flight=1, ms=10), entry(1, in_flight=3, ms=2)], 1, "auto", [1]),
        ([entry(0, in_flight=0, ms=10), entry(1, in_flight=5, ms=2)], 1, "auto", [0]),
        ([entry(0, 2, ms=0.0), entry(1, 1, ms=2.0)], 1, "auto", [0]),
    ],
)
def test_where_branches_go(slots: list[Entry], num_branches: int, policy: Any, expected: list[int] | None) -> None:
    assert place(slots, num_branches, policy) == expected


def test_requests_that_run_together_are_shared_by_speed() -> None:
    slots = [entry(0, max_batch=48, ms=2.0), entry(1, max_batch=48, ms=10.0)]
    for _ in range(36):
        [index] = place(slots, 1, "auto") or []
        slots[index].in_flight += 1
    assert [slot.in_flight for slot in slots] == [30, 6]


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
def test_nothing_is_placed_beyond_the_batch(policy: Any) -> None:
    assert place([entry(0, 6), entry(1, 5)], 2, policy) is None
    assert place([], 1, policy) is None


def test_the_largest_wave_is_one_batch_with_pack_and_all_batches_otherwise() -> None:
    assert largest_wave([entry(0, 6), entry(1)], "auto") == 12
    assert largest_wave([entry(0, 6), entry(1)], "pack") == 6


def test_branches_never_mix_revisions() -> None:
    assert place_on_one_revision([[entry(0, 5)], [entry(1, 4)]], 2, "auto") == [1, 1]
    assert place_on_one_revision([[entry(0, 5)], [entry(1, 5)]], 2, "auto") is None
    assert place_on_one_revision([], 1, "auto") is None


def test_of_several_revisions_the_one_with_the_larger_wave_or_the_lower_load_is_taken() -> None:
    groups = [[entry(0, max_batch=2)], [entry(1, 2), entry(2)]]
    assert sorted(place_on_one_revision(groups, 8, "auto") or []) == [1, 1, 1, 1, 2, 2, 2, 2]
    assert place_on_one_revision([[entry(0, 2)], [entry(1, 1)]], 1, "auto") == [1]
    assert place_on_one_revision([[entry(0, 2, ms=1)], [entry(1, 1, ms=4)]], 1, "auto") == [0]


def test_the_least_recently_used_document_is_forgotten() -> None:
    affinity = DocumentAffinity(max_documents=2)
    affinity.remember(1, 0)
    affinity.remember(2, 0)
    affinity.remember(1, 1)
    affinity.remember(3, 0)
    affinity.remember(None, 1)
    assert [affinity.slot_of(document) for document in (1, 2, 3, None)] == [1, None, 0, None]


@pytest.mark.parametrize(
    ("running", "waiting", "must_wait"),
    [
        ({"burst": 21}, {}, False),  # it is alone
        ({"burst": 18, "other": 0}, {}, False),  # an eighth is left
        ({"burst": 21, "other": 0}, {}, True),
        ({"burst": 12, "other": 12}, {}, True),
        ({"burst": 12, "other": 12}, {"other": 3}, False),  # all want more than their share
        ({"burst": 9, "other": 15}, {}, False),  # within its share it waits for room alone
        ({"burst": 0, "other": 24}, {}, False),
    ],
)
def test_an_owner_beyond_its_share_leaves_room_to_one_that_wants_no_more_than_its_own(
    running: dict[str, int], waiting: dict[str, int], must_wait: bool
) -> None:
    shares = OwnerShares()
    for owner, num_branches in running.items():
        shares.note(owner)
        shares.add((owner, False), num_branches)
    assert shares.must_wait(("burst", False), 3, lambda: 24, waiting) == must_wait
    assert not shares.must_wait(("burst", True), 3, lambda: 24, {"other": 24})
    shares.add(("burst", True), 24 // len(running) - 2)
    assert shares.must_wait(("burst", True), 3, lambda: 24, {"other": 24})  # sessions keep to the share in any case


def test_an_owner_counts_for_a_while_after_its_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = OwnerShares()
    shares.note("other")
    shares.add(("burst", False), 21)
    shares.note("burst")
    assert shares.must_wait(("burst", False), 3, lambda: 24, {})
    monkeypatch.setattr(placement, "RECENT_S", 0.0)
    shares.note("burst")
    assert not shares.must_wait(("burst", False), 3, lambda: 24, {})
