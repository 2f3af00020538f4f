"""R1: workers that are killed."""

from __future__ import annotations

import os
import random
import signal

import psutil

from tests.chaos.load import Load, count_failures, milliseconds
from tests.chaos.measure import Context, Findings
from tests.e2e.harness import Tercet, running, until

# The pause before a second attempt in `gateway.generation.fanout`.
RETRY_PAUSE_MS = 25.0


def pids(tercet: Tercet) -> list[int]:
    """The workers' processes by slot, once all slots are warm."""
    return [int(slot["pid"]) for slot in tercet.wait_until_warm()]


def wait_until_replaced(tercet: Tercet, old_pids: list[int], timeout_s: float = 30.0) -> None:
    """Wait until none of these processes lives, and all slots are warm again."""
    until(
        lambda: not any(map(psutil.pid_exists, old_pids)) and not set(old_pids) & set(pids(tercet)),
        timeout_s,
        f"workers {old_pids} are replaced",
    )


def kill_workers(context: Context, findings: Findings) -> None:
    """R1. One retry costs what an answer costs, and the pause before it. Calm: before and after the kills."""
    num_kills = context.amount(2, 10)
    rng = random.Random(context.seed)
    with running(context.directory(), models="embedded*3") as tercet:
        Load(tercet.port, 4, seed=context.seed).run_for(1.0)
        calm = Load(tercet.port, 4, seed=context.seed).run_for(3.0)
        load = Load(tercet.port, 4, seed=context.seed + 1)
        with load.running():
            for _ in range(num_kills):
                before = pids(tercet)
                load.wait_for(20)
                victim = rng.randrange(len(before))
                os.kill(before[victim], signal.SIGKILL)
                wait_until_replaced(tercet, [before[victim]])
            load.wait_for(20)
        calm += Load(tercet.port, 4, seed=context.seed).run_for(3.0)
    calm_p99_ms = milliseconds(calm, 0.99)
    findings.figures |= {"kills": num_kills, "answers": len(load.answers), "calm p99 ms": calm_p99_ms}
    findings.none_of("failed requests", count_failures(load.answers))
    findings.at_most("p99 ms", milliseconds(load.answers, 0.99), 2 * calm_p99_ms + RETRY_PAUSE_MS, is_speed=True)
