"""R1, R4, R5: workers that are killed, stopped, hang or fail."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from datetime import datetime

import psutil

from tests.chaos.http_client import Answer, Connection, completion_request, exchange, find_fault
from tests.chaos.instance import endpoint_of, serving
from tests.chaos.load import Load, count_failures, milliseconds
from tests.chaos.measure import Context, Findings, Jitter
from tests.e2e.harness import Tercet, until

# Of `gateway.generation.fanout`: the pause before a second attempt.
RETRY_PAUSE_MS = 25.0
# `timeout` in gunicorn.conf.py is 10 s; gunicorn checks once a second, and the replacement has to load.
REPLACED_S = 30.0


def pids(tercet: Tercet) -> list[int]:
    """The workers' processes by slot, once all slots are warm."""
    return [int(slot["pid"]) for slot in tercet.wait_until_warm()]


def wait_until_replaced(tercet: Tercet, old_pids: list[int]) -> None:
    """Wait until none of these processes lives, and all slots are warm again."""
    until(
        lambda: not any(map(psutil.pid_exists, old_pids)) and not set(old_pids) & set(pids(tercet)),
        REPLACED_S, f"workers {old_pids} are replaced",
    )  # fmt: skip


def kill_workers(context: Context, findings: Findings) -> None:
    """R1. One retry costs what an answer costs, and the pause before it. Calm: before and after the kills."""
    num_kills = context.amount(2, 10)
    rng = random.Random(context.seed)
    with serving(context.directory(), models="embedded*3") as tercet:
        endpoint = endpoint_of(tercet)
        Load(endpoint, 4, seed=context.seed).run_for(1.0)
        calm = Load(endpoint, 4, seed=context.seed).run_for(3.0)
        load = Load(endpoint, 4, seed=context.seed + 1)
        with load.running():
            for _ in range(num_kills):
                before = pids(tercet)
                load.wait_for(20)
                victim = rng.randrange(len(before))
                os.kill(before[victim], signal.SIGKILL)
                wait_until_replaced(tercet, [before[victim]])
            load.wait_for(20)
        calm += Load(endpoint, 4, seed=context.seed).run_for(3.0)
    calm_p99_ms = milliseconds(calm, 0.99)
    findings.figures |= {"kills": num_kills, "answers": len(load.answers), "calm p99 ms": calm_p99_ms}
    findings.none_of("failed requests", count_failures(load.answers))
    findings.at_most("p99 ms", milliseconds(load.answers, 0.99), 2 * calm_p99_ms + RETRY_PAUSE_MS, is_speed=True)


def answer_despite_hanging_workers(context: Context, findings: Findings) -> None:
    """R4. In each round one slot is stopped (SIGSTOP), and the engine of the other runs into an endless loop.

    The requests' time limits end before either is replaced, so that only their deadline can answer them.
    """
    num_slots = 2
    num_rounds = context.amount(1, num_slots)
    max_time_s, hang_s = 1.0, 3.0
    answers: list[Answer] = []
    with (
        serving(
            context.directory(), models="embedded*2", hang_s=f"{hang_s:g}", test_faults="666=hang", placement="pack"
        ) as tercet,
        Jitter().running() as jitter,
    ):
        endpoint = endpoint_of(tercet)
        with Connection(endpoint) as connection:
            for turn in range(num_rounds):
                before = pids(tercet)
                os.kill(before[turn % num_slots], signal.SIGSTOP)
                # Some are placed on the stopped slot, before its silence is noticed.
                answers += [connection.exchange(completion_request(max_time=max_time_s)) for _ in range(4)]
                until(lambda: _num_warm(tercet) < num_slots, 10, "the stopped slot is noticed")
                answers.append(connection.exchange(completion_request(max_time=max_time_s, seed=666, n_samples=1)))
                findings.require(
                    answers[-1].status != 200, "the request whose seed hangs the engine was served: nothing hung"
                )
                started_at = time.monotonic()
                wait_until_replaced(tercet, before)
                findings.figures["replaced within s"] = time.monotonic() - started_at
                answers.append(connection.exchange(completion_request(max_time=max_time_s)))
                findings.require(answers[-1].status == 200, "the replaced workers do not serve")
    late_ms = 1e3 * (max(answer.seconds for answer in answers) - max_time_s)
    findings.figures |= {"answers": len(answers), "machine's jitter p99 ms": jitter.ms(0.99)}
    findings.none_of("faulty answers", Counter(fault for answer in answers if (fault := find_fault(answer))))
    findings.at_most("past the deadline, max ms", late_ms, 100.0 + jitter.ms(0.99))


def _num_warm(tercet: Tercet) -> int:
    return sum(slot["state"] == "warm" for slot in tercet.slots())


def end_after_device_errors(context: Context, findings: Findings) -> None:
    """R5. Requests whose seed makes the device fail, and different requests whose seed runs out of memory.

    A failed branch is retried on other slots (once, if it ran out of memory), which fail too. Of four slots, one then
    has a second such failure in a row after three requests. Fatal failures and exits are paired in their order: each
    process ends a fixed time after its failure.
    """
    wanted = context.amount(5, 50)
    gone_ms: list[float] = []
    with serving(
        context.directory(), models="embedded*4", test_faults="601=device,602=oom", placement="pack"
    ) as tercet:
        endpoint = endpoint_of(tercet)
        num_rounds = 0
        while len(gone_ms) < wanted and num_rounds < wanted:
            num_rounds += 1
            before = pids(tercet)
            num_events = len(tercet.events("engine_failed"))
            with _Exits(before) as exits:
                seed, num_requests = ((601, 1), (602, 3))[num_rounds % 2]
                for number in range(num_requests):
                    request = completion_request(f"Number {number}", seed=seed, n_samples=1, length=4, max_time=5)
                    exchange(endpoint, request)
                time.sleep(1.0)
            if not exits.times:
                findings.shortfalls.append(f"round {num_rounds}: no process ended after its failure")
                break
            failed_at = [
                datetime.fromisoformat(line["timestamp"]).timestamp()
                for line in tercet.events("engine_failed")[num_events:]
                if line["is_fatal"]
            ]
            gone_ms += [1e3 * (gone - failed) for failed, gone in zip(failed_at, sorted(exits.times), strict=True)]
            wait_until_replaced(tercet, [pid for pid in before if not psutil.pid_exists(pid)])
    findings.figures |= {"rounds": num_rounds, "processes that failed": len(gone_ms)}
    findings.at_most("gone after the failure, max ms", max(gone_ms), 500.0)


class _Exits:
    """When processes end, on the clock of `time.time()`, to a few milliseconds."""

    def __init__(self, pids_: list[int]) -> None:
        self.times: list[float] = []
        self._alive = {psutil.Process(pid) for pid in pids_}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> _Exits:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.003):
            for process in [process for process in self._alive if _has_ended(process)]:
                self.times.append(time.time())
                self._alive.remove(process)


def _has_ended(process: psutil.Process) -> bool:
    """A zombie, which only its parent can remove, holds nothing any more."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
