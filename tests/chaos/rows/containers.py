"""D2: a SageMaker container under full load answers its health check in time, and ends in time when it is stopped."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil

from tests.chaos.http_client import Answer, Connection, Endpoint, request_bytes
from tests.chaos.load import Load, milliseconds, offer, prioritized
from tests.chaos.measure import Context, Findings, Jitter
from tests.e2e.container import running_container

# SageMaker waits 2 s for an answer of /ping, and 30 s from SIGTERM to SIGKILL.
PING_P99_MS = 100.0
EXIT_S = 25.0
PING_INTERVAL_S = 0.02
# Closed-loop clients that keep the slot's batch full, without a queue that grows; and of the overload, requests/s.
NUM_CLIENTS = 24
OVERLOAD_PER_S = 1000.0
# Clients that read nothing of a stream: they hold the stop up until it cuts them.
NUM_UNREAD_STREAMS = 4
PING = request_bytes("GET", "/ping")


def answer_pings_and_stop_in_time(context: Context, findings: Findings) -> None:
    """D2."""
    load_s = float(context.amount(3, 30))
    num_stops = 0
    exits_s: list[float] = []
    for _ in range(context.amount(1, 3)):
        with running_container(context.directory()) as container:
            endpoint = Endpoint(container.port)
            if not num_stops:
                _measure_pings(context, findings, endpoint, load_s)
            exits_s.append(_stop_under_load(context, findings, endpoint, container.process))
        num_stops += 1
    findings.figures["stops under load"] = num_stops
    findings.at_most("exit after TERM, max s", max(exits_s), EXIT_S)


def _measure_pings(context: Context, findings: Findings, endpoint: Endpoint, load_s: float) -> None:
    load = Load(endpoint, NUM_CLIENTS, seed=context.seed, make_request=invocation)
    with load.running(), pinging(endpoint) as pings, Jitter().running() as jitter:
        time.sleep(load_s)
    served = [answer for answer in load.answers if answer.status == 200]
    findings.figures |= {
        "answers/s under full load": round(len(served) / load_s, 1), "pings": len(pings),
        "ping p50 ms": milliseconds(pings, 0.5), "this process woke up late, p99 ms": jitter.ms(0.99),
    }  # fmt: skip
    findings.require(bool(served), "the load was not served")
    findings.none_of("pings without 200", _without_200(pings))
    findings.at_most("ping p99 ms", milliseconds(pings, 0.99), PING_P99_MS, is_speed=True)
    findings.at_most("ping max ms", milliseconds(pings, 1.0), 2000.0)
    if context.size == "short":
        return
    with pinging(endpoint) as pings:
        offered = offer(endpoint, OVERLOAD_PER_S, load_s, seed=context.seed, make_request=invocation)
    findings.figures |= {
        "overload, requests/s": OVERLOAD_PER_S,
        "overload, refused": sum(answer.status != 200 for answer in offered.answers),
    }
    findings.none_of("overload, pings without 200", _without_200(pings))
    findings.at_most("overload, ping p99 ms", milliseconds(pings, 0.99), PING_P99_MS, is_speed=True)


def _stop_under_load(
    context: Context, findings: Findings, endpoint: Endpoint, process: subprocess.Popen[bytes]
) -> float:
    """Seconds from SIGTERM to the exit, with clients that ask and, in the full form, clients that never read."""
    load = Load(endpoint, NUM_CLIENTS, seed=context.seed, make_request=invocation)
    family = psutil.Process(process.pid).children(recursive=True)
    with ExitStack() as stack:
        for _ in range(context.amount(0, NUM_UNREAD_STREAMS)):
            stack.enter_context(_unread_stream(endpoint))
        stack.enter_context(load.running())
        load.wait_for(2 * NUM_CLIENTS)
        started_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(timeout=2 * EXIT_S)
        except subprocess.TimeoutExpired:
            findings.require(False, f"no exit within {2 * EXIT_S:g} s of SIGTERM")
            process.kill()
            code = process.wait()
        exit_s = time.monotonic() - started_at
    findings.require(code == 0, f"exit code {code} after SIGTERM")
    left = [each.pid for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    findings.require(not left, f"processes left after the exit: {left}")
    return exit_s


def invocation(rng: random.Random) -> bytes:
    """A request as the Patsnap deployment's clients send it: three texts each."""
    body = {"input": f"She opened door {rng.randrange(10**6)}, and"}
    return request_bytes("POST", "/invocations", json.dumps(body).encode())


@contextmanager
def pinging(endpoint: Endpoint) -> Iterator[list[Answer]]:
    """`GET /ping`, each on a connection of its own, one every `PING_INTERVAL_S` or as fast as they are answered."""
    answers: list[Answer] = []
    stop = threading.Event()

    def ping() -> None:
        with prioritized():
            while not stop.wait(PING_INTERVAL_S):
                with Connection(endpoint) as connection:
                    answers.append(connection.exchange(PING))

    thread = threading.Thread(target=ping)
    thread.start()
    try:
        yield answers
    finally:
        stop.set()
        thread.join()


@contextmanager
def _unread_stream(endpoint: Endpoint) -> Iterator[socket.socket]:
    """A client that asks for a long streamed answer and reads nothing of it."""
    body = {"inputs": "The sea", "parameters": {"max_new_tokens": 200}, "stream": True}
    with endpoint.connect_tcp(5.0, receive_buffer_bytes=1024) as connection:
        connection.sendall(request_bytes("POST", "/invocations", json.dumps(body).encode()))
        yield connection


def _without_200(answers: list[Answer]) -> dict[str, int]:
    found: dict[str, int] = {}
    for answer in answers:
        if answer.status != 200:
            what = f"{answer.status} {answer.body.decode(errors='replace')[:100]}"
            found[what] = found.get(what, 0) + 1
    return found
