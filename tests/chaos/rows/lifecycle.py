"""R3, R20, R23: stops under load, and a supervisor that is killed."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.http_client import Answer, Endpoint, exchange, find_fault, request_bytes
from tests.chaos.instance import end, endpoint_of, make_tercet, start
from tests.chaos.measure import Context, Findings
from tests.chaos.rows.deadlines import long_request
from tests.e2e.harness import Tercet, until

READY = request_bytes("GET", "/health/ready")
# Of `stop`: an exit may take this much longer than the grace.
EXIT_MARGIN_S = 1.0


@dataclass
class _Stops:
    """What several stops showed together."""

    faults: Counter[str] = field(default_factory=Counter)  # of accepted requests
    attempts: Counter[str] = field(default_factory=Counter)  # connections tried during a stop, by outcome
    over_grace_s: list[float] = field(default_factory=list)
    num_left: int = 0  # processes that outlived the instance
    readiness: Counter[str] = field(default_factory=Counter)
    streams: Counter[str] = field(default_factory=Counter)  # by last event


def _stops(context: Context) -> _Stops:
    return context.once("stops", lambda: _measure_stops(context))


def _measure_stops(context: Context) -> _Stops:
    """Stops under load, two at a time; in every second, the grace is shorter than a stream that runs."""
    directories = [context.directory() for _ in range(context.amount(2, 20))]
    stops = _Stops()
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(_start_and_stop, directories, itertools.cycle((False, True))):
            stops.faults += found.faults
            stops.attempts += found.attempts
            stops.over_grace_s += found.over_grace_s
            stops.num_left += found.num_left
            stops.readiness += found.readiness
            stops.streams += found.streams
    return stops


def _start_and_stop(base: Path, cuts_streams: bool) -> _Stops:
    stops = _Stops()
    grace_s = 2.0 if cuts_streams else 15.0
    tercet = make_tercet(
        base, None, models="embedded*2", grace_s=f"{grace_s:g}", drain_s="0.3", test_step_delay_ms="0=20,1=20"
    )
    start(tercet)
    try:
        _measure_stop(tercet, grace_s, cuts_streams, stops)
    finally:
        end(tercet)
        tercet.client.close()
    return stops


def _measure_stop(tercet: Tercet, grace_s: float, cuts_streams: bool, stops: _Stops) -> None:
    endpoint = endpoint_of(tercet)
    family = [process for processes in tercet.processes().values() for process in processes]
    # 20 ms a token: two seconds where they may finish, five where they are cut.
    length = 240 if cuts_streams else 60
    with ThreadPoolExecutor(8) as pool:
        accepted: list[Future[Answer]] = [
            pool.submit(exchange, endpoint, long_request(length=length, stream=index % 2 == 0)) for index in range(4)
        ]
        until(lambda: 'in_flight_branches{slot="0"} 0.0' not in tercet.client.get("/metrics").text, 10, "in flight")
        time.sleep(0.2)
        stopping = threading.Event()
        prober = pool.submit(_probe, endpoint, stopping, stops)
        began_at = time.monotonic()
        tercet.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            tercet.process.wait(timeout=grace_s + 30)
        stops.over_grace_s.append(time.monotonic() - began_at - grace_s)
        stopping.set()
        prober.result()
        _, alive = psutil.wait_procs(family, timeout=0.1)
        stops.num_left += len(alive)
        for future in accepted:
            _judge_accepted(future.result(), cuts_streams, stops)


def _judge_accepted(answer: Answer, is_cut: bool, stops: _Stops) -> None:
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        names = [line[7:] for line in answer.body.decode().splitlines() if line.startswith("event: ")]
        last = names[-1] if names else "(none)"
        stops.streams[last] += 1
        if last != ("error" if is_cut else "done"):
            stops.faults[f"a stream whose last event is {last}"] += 1
    elif answer.status == 0 and is_cut and b"event:" in answer.body:
        stops.faults["a stream without an end"] += 1
    elif fault := find_fault(answer):
        stops.faults[fault] += 1
    elif answer.status != 200 and not is_cut:
        stops.faults[f"accepted, then refused with {answer.status}"] += 1


def _probe(endpoint: Endpoint, stopping: threading.Event, stops: _Stops) -> None:
    """New connections, one after another, until the instance has stopped: answered, or refused at once."""
    previous = ""
    while not stopping.is_set():
        answer = exchange(endpoint, READY, timeout_s=5.0)
        if answer.status in {200, 503}:
            outcome = f"answered {answer.status}"
        elif b"ConnectionRefusedError" in answer.body and answer.seconds < 0.5:
            outcome = "refused at once"
            if previous and previous != "refused at once":
                stops.readiness["503 before it closed" if previous == "answered 503" else "closed before a 503"] += 1
        else:
            outcome = f"lost: {answer.body.decode()} after {answer.seconds:.1f} s"
        stops.attempts[outcome] += 1
        previous = outcome
        time.sleep(0.003)


def stop_without_loss(context: Context, findings: Findings) -> None:
    """R3."""
    stops = _stops(context)
    findings.figures["stops"] = len(stops.over_grace_s)
    findings.none_of("accepted requests without a whole answer", dict(stops.faults))
    findings.at_most("exit after the grace, max s", max(stops.over_grace_s), EXIT_MARGIN_S)
    findings.at_most("processes left", stops.num_left, 0)
    findings.figures["readiness 503 before the listener closed"] = stops.readiness["503 before it closed"]
    findings.none_of(
        "stops without a 503",
        {name: count for name, count in stops.readiness.items() if name != "503 before it closed"},
    )


def refuse_while_draining(context: Context, findings: Findings) -> None:
    """R23."""
    stops = _stops(context)
    findings.figures |= {
        "stops": len(stops.over_grace_s),
        **{name: n for name, n in stops.attempts.items() if "lost" not in name},
    }
    findings.none_of(
        "connections that hang or are reset", {name: n for name, n in stops.attempts.items() if "lost" in name}
    )
    findings.figures["streams cut, with an error event"] = stops.streams["error"]
    findings.none_of("streams without their end", {name: n for name, n in stops.faults.items() if "stream" in name})


def survive_a_killed_supervisor(context: Context, findings: Findings) -> None:
    """R20. The instance is started again at once, as a service manager does, until a start is not refused."""
    serving_again_s: list[float] = []
    faults = Counter[str]()
    tercet = make_tercet(context.directory(), None, models="embedded*2", test_step_delay_ms="0=5,1=5")
    endpoint = endpoint_of(tercet)
    start(tercet)
    num_rounds = context.amount(2, 10)
    try:
        for turn in range(num_rounds):
            with ThreadPoolExecutor(8) as pool:
                accepted = [
                    pool.submit(exchange, endpoint, long_request(length=100, max_time=5, stream=False))
                    for _ in range(8)
                ]
                time.sleep(0.25)
                os.kill(tercet.process.pid, signal.SIGKILL)
                tercet.process.wait()
                began_at = time.monotonic()
                tercet.start()
                until(lambda: _serves(tercet, endpoint), 60, f"round {turn}: it serves again; {tercet.log()[-1500:]}")
                serving_again_s.append(time.monotonic() - began_at)
                faults.update(fault for future in accepted if (fault := find_fault(future.result())))
            tercet.wait_until_warm()
    finally:
        end(tercet)
    findings.figures |= {"kills": num_rounds, "accepted requests": 8 * num_rounds}
    findings.none_of("accepted requests without an answer or a refusal", dict(faults))
    findings.at_most("serves again, max s", max(serving_again_s), 15.0)


def _serves(tercet: Tercet, endpoint: Endpoint) -> bool:
    if tercet.process.poll() is not None:
        raise AssertionError(f"the new start was refused: {tercet.log()[-1500:]}")
    return exchange(endpoint, long_request(length=1, max_time=1)).status == 200
