"""What the next step computes, decided without a tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workers.engine import scheduler
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams
from workers.engine.result_stream import ResultStream
from workers.engine.scheduler import Scheduler
from workers.engine.scheduler_output import EntryCopy, SchedulerOutput, SuffixCopy
from workers.engine.sequence import Sequence


def sequence(prompt: tuple[int, ...], number: int = 4, group: tuple[str, int] | None = None) -> Sequence:
    request = EngineRequest(prompt, SamplingParams(number), 0, group=group)
    return Sequence(request, ResultStream(), start_id=0, tokenizer=None)


def step(planner: Scheduler, now: float = float("inf"), token: int = 7) -> SchedulerOutput:
    """One turn of the engine's loop, every draw giving the same token; ends what has come to its end."""
    plan = planner.schedule(now)
    planner.complete(plan)
    for drawn in plan.draws:
        drawn.append(GeneratedToken(token, 0.0), None, 0.0)
        if drawn.finish_reason is not None:
            planner.remove(drawn)
    return plan


def run(planner: Scheduler, *sequences: Sequence) -> list[SchedulerOutput]:
    """All steps until these have ended."""
    for one in sequences:
        planner.add(one)
    plans = []
    while any(one.finish_reason is None for one in sequences):
        plans.append(step(planner))
        assert len(plans) < 200
    return plans


def chunks(plan: SchedulerOutput) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.stop) for chunk in plan.chunks]


def test_scheduling_and_stepping_need_no_torch() -> None:
    script = "import sys, workers.engine.core, workers.engine.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True)


def test_a_prompt_goes_in_chunks_and_then_a_token_at_a_time() -> None:
    size = scheduler.MAX_CHUNK
    plans = run(Scheduler(2, 4), sequence((1,) * (2 * size + 5), number=3))
    assert [chunks(plan) for plan in plans] == [[(0, size)], [(size, 2 * size)], [(2 * size, 2 * size + 5)], [], []]
    assert [len(plan.rows) for plan in plans] == [0, 0, 0, 1, 1]


def test_a_long_prompt_does_not_hold_up_those_who_run() -> None:
    planner = Scheduler(2, 4)
    planner.add(sequence((1, 2, 3), number=50))
    step(planner)
    planner.add(sequence((9,) * 300))
    plan = step(planner)
    assert len(plan.rows) == 1
    assert chunks(plan) == [(0, scheduler.MAX_CHUNK_BESIDE_ROWS)]


def test_siblings_share_one_prompt() -> None:
    siblings = [sequence((1, 2, 3), group=("g", 3)) for _ in range(3)]
    plans = run(Scheduler(2, 4), *siblings)
    assert [chunks(plan) for plan in plans] == [[(0, 3)], [], [], []]
    assert [len(plan.draws) for plan in plans] == [3, 3, 3, 3]


def test_siblings_are_waited_for_a_moment_while_their_prompt_is_computed() -> None:
    planner = Scheduler(2, 4)
    first, second = (sequence((1, 2, 3), group=("g", 2)) for _ in range(2))
    planner.add(first)
    plan = step(planner, first.submitted_at)
    assert (chunks(plan), plan.draws) == ([(0, 3)], [])
    assert not step(planner, first.submitted_at)
    assert planner.wake_at == first.submitted_at + scheduler.MAX_SIBLING_WAIT_S
    planner.add(second)
    plan = step(planner, first.submitted_at)
    assert (chunks(plan), plan.draws) == ([], [first, second])
    assert planner.wake_at == float("inf")
    assert step(planner, first.submitted_at).draws == [first, second]


def test_a_lone_sibling_goes_when_its_time_is_over() -> None:
    planner = Scheduler(2, 4)
    alone = sequence((1, 2, 3), group=("g", 2))
    planner.add(alone)
    assert chunks(step(planner, alone.submitted_at)) == [(0, 3)]
    assert step(planner, planner.wake_at).draws == [alone]


def test_who_waits_for_siblings_can_be_removed() -> None:
    planner = Scheduler(1, 4)
    alone = sequence((1, 2, 3), group=("g", 2))
    planner.add(alone)
    step(planner, alone.submitted_at)
    planner.remove(alone)
    assert (planner.sequences, planner.wake_at) == ([], float("inf"))
    assert run(planner, sequence((4, 5)))  # its entry is free


@pytest.mark.parametrize("other", [(1, 2, 3, 4), (1, 2), (1, 2, 5)])
def test_the_logits_that_siblings_will_draw_from_are_left_alone(other: tuple[int, ...]) -> None:
    planner = Scheduler(2, 4)
    first = sequence((1, 2, 3), group=("g", 2))
    planner.add(first)
    held = step(planner, first.submitted_at).chunks[0].entry
    planner.add(sequence(other))
    assert step(planner, first.submitted_at).chunks[0].entry is not held
    assert [row.entry for row in step(planner).ready] == [held]


def test_a_sibling_that_comes_late_computes_nothing_again() -> None:
    planner = Scheduler(2, 4)
    first, second = (sequence((1, 2, 3), group=("g", 2)) for _ in range(2))
    planner.add(first)
    assert chunks(step(planner)) == [(0, 3)]
    planner.add(second)
    plan = step(planner)
    assert not plan.chunks
    assert plan.draws == [first, second]


def test_logits_that_a_longer_prompt_will_replace_are_not_waited_with() -> None:
    planner = Scheduler(2, 4)
    run(planner, sequence((1, 2, 3)))
    longer, again = sequence((1, 2, 3) + (4,) * 100), sequence((1, 2, 3), group=("g", 2))
    planner.add(longer)
    planner.add(again)
    plan = step(planner, again.submitted_at)
    assert [chunk.prompt.members for chunk in plan.chunks] == [[longer], [again]]
    assert plan.chunks[0].entry is not plan.chunks[1].entry


def test_the_same_prompt_again_costs_nothing() -> None:
    planner = Scheduler(2, 4)
    run(planner, sequence((1, 2, 3)))
    again = sequence((1, 2, 3))
    planner.add(again)
    plan = step(planner)
    assert [row.sequence for row in plan.ready] == [again]
    assert not plan.chunks


def test_the_next_keystroke_costs_what_it_adds() -> None:
    planner = Scheduler(2, 4)
    run(planner, sequence((1, 2, 3, 4, 5)))
    assert chunks(run(planner, sequence((1, 2, 3, 4, 5, 6, 8)))[0]) == [(5, 7)]
    assert chunks(run(planner, sequence((1, 2, 3, 4, 9)))[0]) == [(4, 5)]


def test_an_accepted_suggestion_is_remembered() -> None:
    planner = Scheduler(2, 4)
    run(planner, sequence((1, 2, 3), number=5))  # writes 7 7 7 7 7, the last of which nobody has computed
    plans = run(planner, sequence((1, 2, 3, 7, 7, 7, 7, 7, 8)))
    assert SuffixCopy(suffix=0, entry=0, start=3, length=4) in plans[0].copies
    assert chunks(plans[0]) == [(7, 9)]


def test_a_prompt_in_use_is_copied_not_changed() -> None:
    planner = Scheduler(2, 4)
    long = tuple(range(1, 41))
    planner.add(sequence(long, number=50))
    step(planner)
    planner.add(sequence((*long[:30], 99)))
    plan = step(planner)
    assert EntryCopy(source=0, target=1, length=30) in plan.copies
    assert chunks(plan) == [(30, 31)]


def test_who_finds_no_entry_waits_for_one() -> None:
    planner = Scheduler(1, 4)
    first, second = sequence((1, 2, 3)), sequence((4, 5, 6))
    planner.add(first)
    planner.add(second)
    assert step(planner).draws == [first]
    while first.finish_reason is None:
        assert second not in step(planner).draws
    assert step(planner).draws == [second]


def test_what_has_ended_is_gone() -> None:
    planner = Scheduler(2, 4)
    one = sequence((1, 2, 3))
    planner.add(one)
    planner.schedule(float("inf"))
    planner.remove(one)
    assert planner.sequences == []
    assert not planner.schedule(float("inf"))
