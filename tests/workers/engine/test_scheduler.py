"""Who advances next, decided without a tensor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from workers.engine import scheduler
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Generation, GenerationRequest, SamplingParams, Sequence, Step


def sequence(length: int, number: int = 4) -> Sequence:
    request = GenerationRequest((1,) * length, SamplingParams(number), 0)
    return Sequence(request, Generation(), start_id=0, token_bytes=None)


def test_needs_no_torch() -> None:
    script = "import sys, workers.engine.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[3], check=True)


def test_prompts_go_in_chunks_and_then_token_by_token() -> None:
    plan = Scheduler(num_slots=2)
    long = sequence(2 * scheduler.MAX_CHUNK + 5)
    plan.add(long)
    seen = []
    for _ in range(4):
        (work,) = plan.schedule(0.0)
        seen.append((work.start, work.stop, work.is_last))
        long.num_computed = work.stop
        if work.is_last:
            long.append(Step(7, 0.0), None, 0.0)
    chunk = scheduler.MAX_CHUNK
    assert seen == [
        (0, chunk, False),
        (chunk, 2 * chunk, False),
        (2 * chunk, 2 * chunk + 5, True),
        (2 * chunk + 5, 2 * chunk + 6, True),
    ]


def test_slots_are_kept_to_the_end_and_used_again() -> None:
    plan = Scheduler(num_slots=2)
    first, second, third = (sequence(3) for _ in range(3))
    for one in (first, second, third):
        plan.add(one)
    assert [work.sequence for work in plan.schedule(0.0)] == [first, second]
    assert list(plan.waiting) == [third]
    slot = first.slot
    plan.remove(first)
    assert [work.sequence for work in plan.schedule(0.0)] == [second, third]
    assert third.slot == slot
    plan.remove(third)
    plan.remove(second)
    assert plan.sequences == []
    assert plan.schedule(0.0) == []
