"""R26, R27: signals at any moment of a worker's start, storms of SIGHUP, and deaths after refused reloads."""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from contextlib import nullcontext

import psutil

from tests.chaos.load import Load, count_failures
from tests.chaos.measure import Context, Findings
from tests.chaos.rows.workers import pids
from tests.e2e.harness import Tercet, running, until
from tests.e2e.lifecycle import REFUSALS, num_reloads

ROLES = ("workers", "gateway")
NUM_SLOTS = {"workers": 2, "gateway": 1}
GRACE_S = 15.0  # a request waits for a worker that loads, and on a busy machine that takes seconds
MAX_END_S = 6.0
NUM_HUPS, HUP_PERIOD_S = 40, 0.1
MOMENT_S = 0.1
SHORT_MOMENTS = {"workers": 5, "gateway": 2}
TIMEOUT_S = 300.0


def signal_at_any_moment(context: Context, findings: Findings) -> None:
    """R26. Workers get TERM under load. A gateway that is killed loses what it answers, so its moments have no load."""
    with running(context.directory(), models="embedded*2", grace_s=str(GRACE_S)) as tercet:
        masters = {role: tercet.processes()[role][0] for role in ROLES}
        lost: Counter[str] = Counter()
        num_moments, slowest_s = 0, 0.0
        load = Load(tercet.port, 3, seed=context.seed, pause_s=context.pause_s)
        for role in ROLES:
            start_s = _kill_and_wait(tercet, masters[role], role)
            every_s = MOMENT_S if context.size != "short" else start_s / SHORT_MOMENTS[role]
            moments_s = [every_s * number for number in range(math.ceil(start_s / every_s))]
            with load.running() if role == "workers" else nullcontext():
                for moment_s in moments_s:
                    ended_s = _term_replacement(tercet, masters, role, moment_s, lost)
                    slowest_s = max(slowest_s, ended_s)
            num_moments += len(moments_s)
        findings.figures |= {"moments": num_moments, "requests": len(load.answers)}
        findings.none_of("masters and siblings ended", dict(lost))
        findings.none_of("failed requests", dict(count_failures(load.answers)))
        findings.at_most("ended after s", slowest_s, MAX_END_S)
        _storm(tercet, masters, context, findings)
        began_at = time.monotonic()
        tercet.stop()
        findings.at_most("stop after the storm s", time.monotonic() - began_at, MAX_END_S)


def _term_replacement(
    tercet: Tercet, masters: dict[str, psutil.Process], role: str, moment_s: float, lost: Counter[str]
) -> float:
    """Kill a process of the pool, TERM its replacement after `moment_s`; returns how long that took to end."""
    before = masters[role].children()
    siblings = before[1:] if role == "workers" else []
    before[0].kill()
    [new] = until(lambda: [c for c in masters[role].children() if c not in before], TIMEOUT_S, "a replacement")
    time.sleep(moment_s)
    began_at = time.monotonic()
    new.terminate()
    psutil.wait_procs([new], timeout=GRACE_S + 5.0)
    ended_s = time.monotonic() - began_at
    until(lambda: len(masters[role].children()) == NUM_SLOTS[role], TIMEOUT_S, "another replacement")
    tercet.wait_until_warm()
    lost.update(f"{name}'s master" for name, master in masters.items() if not master.is_running())
    lost.update("sibling" for sibling in siblings if not sibling.is_running())
    return ended_s


def _kill_and_wait(tercet: Tercet, master: psutil.Process, role: str) -> float:
    """Kill a process of the pool; returns how long its replacement took to serve."""
    victim = master.children()[0]
    victim.kill()
    began_at = time.monotonic()
    until(lambda: victim not in master.children() and len(master.children()) == NUM_SLOTS[role], TIMEOUT_S, "forked")
    tercet.wait_until_warm()
    return time.monotonic() - began_at


def _storm(tercet: Tercet, masters: dict[str, psutil.Process], context: Context, findings: Findings) -> None:
    num_before = len(tercet.events("reload_finished"))
    most = dict.fromkeys(ROLES, 0)

    def count() -> dict[str, int]:
        found = {role: len(master.children()) for role, master in masters.items()}
        most.update({role: max(most[role], number) for role, number in found.items()})
        return found

    load = Load(tercet.port, 3, seed=context.seed + 1, pause_s=context.pause_s)
    with load.running():
        for _ in range(NUM_HUPS):
            tercet.process.send_signal(signal.SIGHUP)
            count()
            time.sleep(HUP_PERIOD_S)
        twice = Counter({role: 2 * number for role, number in NUM_SLOTS.items()})
        until(lambda: count() and num_reloads(tercet, num_before) >= twice, TIMEOUT_S, "two reloads")
        until(lambda: count() == NUM_SLOTS, TIMEOUT_S, "one process per slot")
        load.wait_for(10)
    findings.figures |= {"HUPs": NUM_HUPS, "requests in the storm": len(load.answers)}
    for role, number in NUM_SLOTS.items():
        findings.figures[f"{role}: reloads"] = num_reloads(tercet, num_before)[role] / number
    findings.none_of("failed requests in the storm", dict(count_failures(load.answers)))
    for role, number in NUM_SLOTS.items():
        findings.at_most(f"{role}: most processes", most[role], 2 * number)


def heal_after_refused_reloads(context: Context, findings: Findings) -> None:
    """R27. One worker dies under load, then the gateway's, while the cause persists."""
    with running(context.directory(), models="embedded*2") as tercet:
        masters = {role: tercet.processes()[role][0] for role in ROLES}
        lost: Counter[str] = Counter()
        num_kills, failures = 0, Counter[str]()
        for cause, refuse_reloads in REFUSALS.items():
            for _ in range(context.amount(1, 3)):
                num_before = len(tercet.events("reload_finished"))
                restore = refuse_reloads(tercet)
                try:
                    tercet.process.send_signal(signal.SIGHUP)
                    until(lambda: len(tercet.events("reload_finished")) >= num_before + 3, TIMEOUT_S, "a refusal")  # noqa: B023
                    load = Load(tercet.port, 3, seed=context.seed, pause_s=context.pause_s)
                    with load.running():
                        load.wait_for(5)
                        victim, sibling = pids(tercet)
                        os.kill(victim, signal.SIGKILL)
                        until(lambda: victim not in pids(tercet), TIMEOUT_S, "the worker is replaced")  # noqa: B023
                        load.wait_for(5)
                    failures += count_failures(load.answers)
                    _kill_and_wait(tercet, masters["gateway"], "gateway")
                finally:
                    restore()
                num_kills += 2
                lost.update(f"{name}'s master: {cause}" for name, it in masters.items() if not it.is_running())
                lost.update([f"sibling: {cause}"] * (sibling not in pids(tercet)))
        outcomes = Counter(event["outcome"] for event in tercet.events("reload_finished"))
        findings.figures |= {"refused reloads": outcomes["failed"] / 3, "kills": num_kills}
        findings.none_of("masters and siblings ended", dict(lost))
        findings.none_of("failed requests", dict(failures))
        findings.require(set(outcomes) == {"failed"}, f"reloads that were to be refused: {dict(outcomes)}")
