"""R7: many times more requests than the pools can serve, on cores that the load generator does not use."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from tests.chaos.http_client import Answer, find_fault
from tests.chaos.load import Load, milliseconds, offer
from tests.chaos.measure import Context, Findings
from tests.e2e.harness import Tercet, metric, running

OVERLOAD = 10
REFUSAL_P99_MS, REFUSAL_MAX_MS = 50.0, 250.0
# Closed-loop clients that keep every slot busy, without a queue that grows.
PEAK_CLIENTS = 24
# Requests that fill the slots together end together, in waves of about a second.
RAMP_S = 2.0
QUEUE_BRANCHES = 96  # TERCET_QUEUE


def refuse_overload(context: Context, findings: Findings) -> None:
    """Peak and overload in turns on one instance, so that a slow minute of the machine touches both.

    The generator has a core and the server the others: at ten times the peak, sending costs as much CPU time as
    refusing, and an editor's keys cost the server none.
    """
    *server_cores, generator_core = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        with _on_cores(server_cores or [generator_core]):
            tercet = stack.enter_context(running(context.directory(), models="embedded*2"))
        stack.enter_context(_on_cores([generator_core]))
        _measure(context, tercet, findings)
    findings.figures["cores of the server"] = len(server_cores)


@contextmanager
def _on_cores(cores: Collection[int]) -> Iterator[None]:
    """This thread, and the threads and processes that it starts, run on these cores."""
    was = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, was)


def _measure(context: Context, tercet: Tercet, findings: Findings) -> None:
    turn_s = float(context.amount(5, 15))
    num_turns = 1 if context.size == "short" else 3
    served_per_s: dict[str, list[float]] = {"peak": [], "overload": []}
    refusals, faults, num_sent, lag_ms, max_waiting = [], Counter[str](), 0, 0.0, 0.0
    Load(tercet.port, PEAK_CLIENTS, seed=context.seed).run_for(1.0)  # warms caches and threads
    for turn in range(num_turns):
        with _Queue(tercet) as queue:  # beside both: it costs the server a hundredth of its core
            calm = Load(tercet.port, PEAK_CLIENTS, seed=context.seed + turn).run_for(turn_s)
            served_per_s["peak"].append(_served_per_s(calm, turn_s))
            rate = OVERLOAD * served_per_s["peak"][-1]
            offered = offer(tercet.port, rate, turn_s, seed=context.seed + turn)
        max_waiting = max(max_waiting, queue.max_branches)
        served_per_s["overload"].append(_served_per_s(offered.answers, turn_s))
        refusals += [answer for answer in offered.answers if answer.status != 200]
        faults.update(fault for answer in offered.answers if (fault := find_fault(answer)))
        faults.update(
            f"refused with {answer.status}" for answer in offered.answers if answer.status not in {200, 429, 503}
        )
        num_sent += len(offered.answers)
        lag_ms = max(lag_ms, 1e3 * sorted(offered.lag_s)[int(0.99 * len(offered.lag_s))])
    goodput = sum(served_per_s["overload"]) / sum(served_per_s["peak"])
    findings.figures |= {
        "peak answers/s": round(sum(served_per_s["peak"]) / num_turns, 1),
        "requests": num_sent,
        "offered requests/s": round(num_sent / num_turns / turn_s, 1),
        "refused": len(refusals),
        "generator's lag p99 ms": lag_ms,
    }
    findings.at_least("goodput / peak", goodput, 0.9, is_speed=True)
    findings.at_most("refusals p99 ms", milliseconds(refusals, 0.99), REFUSAL_P99_MS, is_speed=True)
    findings.at_most("refusals max ms", milliseconds(refusals, 1.0), REFUSAL_MAX_MS, is_speed=True)
    findings.at_most("branches waiting, max", max_waiting, QUEUE_BRANCHES)
    findings.none_of("faulty answers", faults)
    findings.require(bool(refusals), "nothing was refused: the load was no overload")


def _served_per_s(answers: Sequence[Answer], turn_s: float) -> float:
    """Answers a second after the load's beginning. Each counts by the part of its time that lies inside."""
    start = min(answer.started_at for answer in answers)
    begin, end = start + RAMP_S, start + turn_s
    inside = [max(0.0, min(a.ended_at, end) - max(a.started_at, begin)) / a.seconds for a in answers if a.status == 200]
    return sum(inside) / (turn_s - RAMP_S)


class _Queue:
    """The longest queue that the gateway reports, looked at four times a second."""

    def __init__(self, tercet: Tercet) -> None:
        self.max_branches = 0.0
        self._tercet = tercet
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> _Queue:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.25):
            self.max_branches = max(self.max_branches, metric(self._tercet, "tercet_waiting_branches "))
