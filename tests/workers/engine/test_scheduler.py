"""What the next step computes: plain Python, without a model."""

from __future__ import annotations

import pytest

from tests.workers.engine.helpers import make_sequence
from workers.engine.batch import EntryCopy, SchedulerOutput, SuffixCopy
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams
from workers.engine.scheduler import MAX_CHUNK, MAX_CHUNK_WITH_ROWS, MAX_SCORED_AT_ONCE, MAX_SIBLING_WAIT_S, Scheduler
from workers.engine.sequence import Sequence


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(2, 4)


def sequence(prompt: tuple[int, ...], number: int = 4, group_size: int = 1) -> Sequence:
    return make_sequence(EngineRequest(prompt, SamplingParams(number), 0, group_size=group_size))


def step(scheduler: Scheduler, now: float = float("inf"), token: int = 7) -> SchedulerOutput:
    """One step in which every sequence draws the same token; removes the sequences that end."""
    output = scheduler.schedule(now)
    scheduler.complete(output)
    for drawn in output.sampled_sequences:
        drawn.append(GeneratedToken(token, 0.0), (), 0.0)
        if drawn.finish_reason is not None:
            scheduler.remove(drawn)
    return output


def run(scheduler: Scheduler, *sequences: Sequence) -> list[SchedulerOutput]:
    """All steps until these have ended."""
    for one in sequences:
        scheduler.add(one)
    scheduled = []
    while any(one.finish_reason is None for one in sequences):
        scheduled.append(step(scheduler))
        assert len(scheduled) < 200
    return scheduled


def chunks(output: SchedulerOutput) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for chunk in output.chunks]


def test_a_prompt_is_prefilled_in_chunks_and_then_decoded_token_by_token(scheduler: Scheduler) -> None:
    size = MAX_CHUNK
    scheduled = run(scheduler, sequence((1,) * (2 * size + 5), number=3))
    assert [chunks(output) for output in scheduled] == [
        [(0, size)],
        [(size, 2 * size)],
        [(2 * size, 2 * size + 5)],
        [],
        [],
    ]
    assert [len(output.rows) for output in scheduled] == [0, 0, 0, 1, 1]


def test_a_long_prompt_is_prefilled_in_smaller_chunks_between_decode_steps(scheduler: Scheduler) -> None:
    scheduler.add(sequence((1, 2, 3), number=50))
    step(scheduler)
    scheduler.add(sequence((9,) * 300))
    output = step(scheduler)
    assert len(output.rows) == 1
    assert chunks(output) == [(0, MAX_CHUNK_WITH_ROWS)]


def test_a_short_prompt_does_not_wait_for_a_long_one_that_came_first() -> None:
    scheduler = Scheduler(4, 4, max_chunk=32)
    scheduler.add(sequence((9,) * 100))
    scheduler.add(sequence((8,) * 10))
    scheduler.add(sequence((7,) * 100))
    assert chunks(step(scheduler)) == [(0, 10), (0, 22)]
    assert chunks(step(scheduler)) == [(22, 54)]  # of equals the older first


def test_short_prompts_leave_half_of_each_step_to_the_oldest() -> None:
    scheduler = Scheduler(16, 16, max_chunk=32)
    scheduler.add(oldest := sequence((20,) * 64))
    for token in range(10):
        scheduler.add(sequence((token,) * 15, number=1))
    scheduled = [step(scheduler) for _ in range(4)]
    found = [(c.start, c.stop) for output in scheduled for c in output.chunks if oldest in c.group.sequences]
    assert found == [(0, 16), (16, 32), (32, 48), (48, 64)]


@pytest.mark.parametrize("num_forced", [10, 32])
def test_positions_with_logits_are_computed_together_even_beyond_the_bound_of_a_step(num_forced: int) -> None:
    scheduler = Scheduler(16, 16, max_chunk=16)
    request = EngineRequest((9,) * 40, SamplingParams(4), 0, forced_ids=(5,) * num_forced)
    healed = make_sequence(request)
    scheduler.add(healed)
    for token in range(10):
        scheduler.add(sequence((token,) * 15, number=1))
    found: list[tuple[int, int]] = []
    while not healed.token_ids:
        found += [(c.start, c.stop) for c in step(scheduler).chunks if healed in c.group.sequences]
        assert len(found) < 20
    assert found[-1] == (39, 40 + num_forced)


def test_few_prompts_are_scored_at_a_time_and_others_keep_their_entries() -> None:
    scheduler = Scheduler(8, 8)
    run(scheduler, sequence((9,) * 20))
    scored = [
        make_sequence(EngineRequest((1,) * 20 + (2, end), SamplingParams(1), 0, echo_logprobs=True, echo_from=20))
        for end in range(10)
    ]
    scheduled = run(scheduler, *scored)
    assert [len(output.chunks) for output in scheduled] == [MAX_SCORED_AT_ONCE, MAX_SCORED_AT_ONCE, 2]
    assert {chunk for output in scheduled[1:] for chunk in chunks(output)} == {(19, 22)}
    [again] = run(scheduler, sequence((9,) * 20, number=1))
    assert chunks(again) == []


@pytest.mark.parametrize("group_size", [3, 1])
def test_siblings_share_one_prompt(scheduler: Scheduler, group_size: int) -> None:
    """Announced as a group or not, as long as they arrive together."""
    siblings = [sequence((1, 2, 3), group_size=group_size) for _ in range(3)]
    scheduled = run(scheduler, *siblings)
    assert [chunks(output) for output in scheduled] == [[(0, 3)], [], [], []]
    assert [len(output.sampled_sequences) for output in scheduled] == [3, 3, 3, 3]


def test_a_group_waits_for_its_siblings_while_its_prompt_is_computed(scheduler: Scheduler) -> None:
    first, second = (sequence((1, 2, 3), group_size=2) for _ in range(2))
    scheduler.add(first)
    output = step(scheduler, first.submitted_at)
    assert (chunks(output), output.sampled_sequences) == ([(0, 3)], [])
    assert not step(scheduler, first.submitted_at)
    assert scheduler.wake_at == first.submitted_at + MAX_SIBLING_WAIT_S
    scheduler.add(second)
    output = step(scheduler, first.submitted_at)
    assert (chunks(output), output.sampled_sequences) == ([], [first, second])
    assert scheduler.wake_at == float("inf")
    assert step(scheduler, first.submitted_at).sampled_sequences == [first, second]


def test_a_group_stops_waiting_for_siblings_at_its_deadline(scheduler: Scheduler) -> None:
    alone = sequence((1, 2, 3), group_size=2)
    scheduler.add(alone)
    assert chunks(step(scheduler, alone.submitted_at)) == [(0, 3)]
    assert step(scheduler, scheduler.wake_at).sampled_sequences == [alone]


def test_a_sequence_that_waits_for_siblings_can_be_removed() -> None:
    scheduler = Scheduler(1, 4)
    alone = sequence((1, 2, 3), group_size=2)
    scheduler.add(alone)
    step(scheduler, alone.submitted_at)
    scheduler.remove(alone)
    assert (scheduler.sequences, scheduler.wake_at) == ([], float("inf"))
    assert run(scheduler, sequence((4, 5)))  # its entry is unused again


@pytest.mark.parametrize("other", [(1, 2, 3, 4), (1, 2), (1, 2, 5)])
def test_the_logits_that_siblings_will_draw_from_are_not_overwritten(
    scheduler: Scheduler, other: tuple[int, ...]
) -> None:
    first = sequence((1, 2, 3), group_size=2)
    scheduler.add(first)
    entry = step(scheduler, first.submitted_at).chunks[0].entry
    scheduler.add(sequence(other))
    assert step(scheduler, first.submitted_at).chunks[0].entry is not entry
    assert [row.entry for row in step(scheduler).prefilled_rows] == [entry]


def test_a_late_sibling_prefills_nothing(scheduler: Scheduler) -> None:
    first, second = (sequence((1, 2, 3), group_size=2) for _ in range(2))
    scheduler.add(first)
    assert chunks(step(scheduler)) == [(0, 3)]
    scheduler.add(second)
    output = step(scheduler)
    assert not output.chunks
    assert output.sampled_sequences == [first, second]


def test_a_group_does_not_wait_in_an_entry_whose_logits_will_be_replaced(scheduler: Scheduler) -> None:
    run(scheduler, sequence((1, 2, 3)))
    longer, again = sequence((1, 2, 3) + (4,) * 100), sequence((1, 2, 3), group_size=2)
    scheduler.add(longer)
    scheduler.add(again)
    output = step(scheduler, again.submitted_at)
    assert {tuple(chunk.group.sequences) for chunk in output.chunks} == {(longer,), (again,)}
    assert output.chunks[0].entry is not output.chunks[1].entry


def test_a_cached_prompt_needs_no_prefill(scheduler: Scheduler) -> None:
    run(scheduler, sequence((1, 2, 3)))
    again = sequence((1, 2, 3))
    scheduler.add(again)
    output = step(scheduler)
    assert [row.sequence for row in output.prefilled_rows] == [again]
    assert not output.chunks


def test_only_the_new_tokens_of_a_prompt_are_prefilled(scheduler: Scheduler) -> None:
    run(scheduler, sequence((1, 2, 3, 4, 5)))
    assert chunks(run(scheduler, sequence((1, 2, 3, 4, 5, 6, 8)))[0]) == [(5, 7)]
    assert chunks(run(scheduler, sequence((1, 2, 3, 4, 9)))[0]) == [(4, 5)]


def test_an_accepted_suggestion_is_cached(scheduler: Scheduler) -> None:
    run(scheduler, sequence((1, 2, 3), number=5))  # generates 7 7 7 7 7; the last has no keys and values yet
    scheduled = run(scheduler, sequence((1, 2, 3, 7, 7, 7, 7, 7, 8)))
    assert SuffixCopy(suffix=0, entry=0, start=3, length=4) in scheduled[0].copies
    assert chunks(scheduled[0]) == [(7, 9)]


def test_an_entry_in_use_is_copied_not_changed(scheduler: Scheduler) -> None:
    long = tuple(range(1, 41))
    scheduler.add(sequence(long, number=50))
    step(scheduler)
    scheduler.add(sequence((*long[:30], 99)))
    output = step(scheduler)
    assert EntryCopy(source=0, target=1, length=30) in output.copies
    assert chunks(output) == [(30, 31)]


def test_a_prompt_waits_until_an_entry_is_unused() -> None:
    scheduler = Scheduler(1, 4)
    first, second = sequence((1, 2, 3)), sequence((4, 5, 6))
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler).sampled_sequences == [first]
    while first.finish_reason is None:
        assert second not in step(scheduler).sampled_sequences
    assert step(scheduler).sampled_sequences == [second]
