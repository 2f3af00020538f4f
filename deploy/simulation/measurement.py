"""Measures a server under loads in turns: calibration runs for the fit, and open loops that check it.

A real `tercet serve` with two slots, clients in a process of their own on the same cores. Knows the harness of the
benchmarks; does not know the simulation.
"""

from __future__ import annotations

import math
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from statistics import median

import msgspec
import numpy as np
from rich.console import Console

from deploy.load import machine
from deploy.load.clients import LOOPBACK, LoadResult, arrival_offsets_s, raise_for_status
from deploy.load.contender_process import ContenderProcess
from deploy.load.run import progress
from deploy.load.server import ROOT, Server
from deploy.load.workload import Subject, W
from deploy.simulation.observations import SPAN_S, LoadPlan, Observations, Observed, Role, Span, Turn
from deploy.simulation.writers import Typed, keys_per_s, press_keys
from deploy.tune.trial import QUIET_SHARE, OthersMeter
from workers.checkpoints.resolve import resolve

NUM_SLOTS = 2
CLIENT_COUNTS = (1, 8)
CALIBRATION_SHARES = (0.2, 0.45, 0.65, 0.8)  # of the capacity
FULL_CLIENTS = 8  # of a closed loop that saturates the server
NUM_CAPACITY_LOOPS = 5
REFUSED = 503
SAMPLE_S = 0.05
CHECK_SHARES = (0.3, 0.55, 0.75)
CALIBRATION_S = 1.0
CHECK_S = 8.0
SEED = 1
CLIENTS = "deploy.load.clients:Clients"
WRITERS = "deploy.simulation.writers:WriterClients"
# Every branch has the same number of tokens: no top-ups, and nothing is trimmed.
FIELDS = {"clean": False}
Plans = Callable[[float], Sequence[LoadPlan]]


def fixed_length_plans(capacity_qps: float) -> list[LoadPlan]:
    """Closed loops for the fit, open loops at shares of the capacity for the check."""
    closed = [
        LoadPlan(role="calibration", num_clients=1, num_tokens=1, seconds=CALIBRATION_S),
        *(LoadPlan(role="calibration", num_clients=number, seconds=CALIBRATION_S) for number in CLIENT_COUNTS),
    ]
    shares: list[tuple[Role, float]] = [
        *(("calibration", share) for share in CALIBRATION_SHARES),
        *(("check", share) for share in CHECK_SHARES),
    ]
    opened = [
        LoadPlan(role=role, rate_qps=round(share * capacity_qps, 2), seconds=CHECK_S)
        for role, share in sorted(shares, key=lambda each: each[1])
    ]
    return [*closed, *opened]


def writer_plans(numbers: Sequence[int]) -> list[LoadPlan]:
    """The first number of writers for the fit, the others for the check."""
    roles: list[Role] = ["calibration", *["check"] * (len(numbers) - 1)]  # type: ignore[list-item]
    return [
        LoadPlan(role=role, num_writers=number, keys_per_s=round(keys_per_s(), 2), seconds=CHECK_S)
        for role, number in zip(roles, numbers, strict=True)
    ]


def commit() -> str:
    """Of the checkout that is measured; "unknown" outside of one."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


class Measurement:
    """A warm server with its clients, measured turn by turn."""

    def __init__(
        self, models: str, console: Console, max_others_share: float = QUIET_SHARE, devices: str = "cpu"
    ) -> None:
        """
        Args:
            models: a model by its name, of which `NUM_SLOTS` workers are started.
            max_others_share: of all cores; a turn during which other processes use more of them is repeated once.
            devices: the value of TERCET_DEVICES.
        """
        self._devices = devices
        self._max_others_share = max_others_share
        self._models = models
        self._console = console
        self._rng = random.Random(SEED)  # draws what the open loops' clients draw

    def run(self, num_rounds: int, plans: Plans, share: float = 1.0, max_s: float = math.inf) -> Observations:
        """Measure the loads in turns, `num_rounds` times.

        Args:
            plans: makes the loads from the capacity in answers per second, which is measured before the first round.
            share: of each turn's seconds; below 1 the figures are not to be quoted.
            max_s: no further round begins that would end later, counted from the first.

        Raises:
            StartError: the server does not get warm, or a request failed.
        """
        with ExitStack() as stack:
            self._start(stack)
            loads = plans(self._capacity_per_s(share))
            turns: list[list[Turn]] = [[] for _ in loads]
            start_s = time.monotonic()
            with progress(self._console, "Turns", num_rounds * len(loads)) as on_turn:
                for number in range(num_rounds):
                    if (time.monotonic() - start_s) * (number + 1) > max_s * number > 0:
                        break
                    for load, of_load in zip(loads, turns, strict=True):
                        on_turn(f"round {number + 1}, {load.name}")
                        turn = self._quiet_turn(msgspec.structs.replace(load, seconds=share * load.seconds))
                        of_load.append(msgspec.structs.replace(turn, round=number))
        return Observations(
            models=self._models,
            commit=commit(),
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=machine.describe(),
            num_slots=NUM_SLOTS,
            num_prompt_tokens=W.num_prompt_tokens,
            max_others_share=self._max_others_share,
            loads=[Observed(plan=load, turns=of_load) for load, of_load in zip(loads, turns, strict=True)],
        )

    def _start(self, stack: ExitStack) -> None:
        """The server and the clients, each of which has sent a request."""
        subject = Subject.of(resolve(self._models))
        self._server = stack.enter_context(Server(f"{self._models}*{NUM_SLOTS}", {"devices": self._devices}))
        port = self._server.port
        workloads = [msgspec.structs.replace(W, num_new_tokens=number) for number in (1, W.num_new_tokens)]
        self._clients = {
            workload.num_new_tokens: stack.enter_context(
                ContenderProcess(CLIENTS, LOOPBACK, port, subject, workload, SEED, FIELDS)
            )
            for workload in workloads
        }
        self._writers = stack.enter_context(ContenderProcess(WRITERS, LOOPBACK, port, subject, SEED))
        for clients in self._clients.values():
            clients.call("send_concurrently", 2 * NUM_SLOTS, 2)
        self._writers.call("press", press_keys(random.Random(SEED), 2, 1.0), 2)

    def _quiet_turn(self, load: LoadPlan) -> Turn:
        """One turn. If other processes disturb it, it is repeated once, and the less disturbed one counts."""
        turn = self._turn(load)
        if turn.others_share <= self._max_others_share:
            return turn
        return min(turn, self._turn(load), key=lambda each: each.others_share)

    def _capacity_per_s(self, share: float) -> float:
        """Answers per second of a closed loop that saturates the server, median of some."""
        clients = self._clients[W.num_new_tokens]
        loops: list[LoadResult] = [
            clients.call("send_for", FULL_CLIENTS, CALIBRATION_S * share) for _ in range(NUM_CAPACITY_LOOPS)
        ]
        return median(len(each.replies) / each.elapsed_s for each in loops)

    def _turn(self, load: LoadPlan) -> Turn:
        self._server.wait_until_idle()
        meter, before = OthersMeter(), self._server.cpu_s()
        offsets_s: list[float] = []
        spans: list[Span] = []
        num_superseded = num_failed = 0
        if load.num_writers:
            keys = press_keys(self._rng, load.num_writers, load.seconds)
            typed: Typed = self._writers.call("press", keys, load.num_writers)
            wall_ms, engine_ms = typed.wall_ms, typed.engine_ms
            num_superseded, num_failed = typed.num_superseded, typed.num_failed
            elapsed_s, client_cpu_s = typed.elapsed_s, typed.client_cpu_s
        else:
            clients = self._clients[load.num_tokens]
            if load.num_clients:
                result: LoadResult = clients.call("send_for", load.num_clients, load.seconds)
            else:
                seed = self._rng.randrange(2**31)
                offsets_s = arrival_offsets_s(random.Random(seed), load.rate_qps, load.seconds)
                with self._sampled_cpu() as samples:
                    result = clients.call("send_at", offsets_s)
                    start_s = time.perf_counter() - result.elapsed_s
                spans = _spans([reply.planned_s + 1e-3 * reply.wall_ms for reply in result.replies], samples, start_s)
            replies = raise_for_status([reply for reply in result.replies if reply.status != REFUSED])
            num_failed = len(result.replies) - len(replies)
            wall_ms = [round(reply.wall_ms, 3) for reply in replies]
            engine_ms = [round(reply.engine_ms, 3) for reply in replies]
            elapsed_s, client_cpu_s = result.elapsed_s, result.client_cpu_s
        used = {role: after - before[role] for role, after in self._server.cpu_s().items()}
        return Turn(
            offsets_s=[round(offset, 6) for offset in offsets_s],
            spans=spans,
            wall_ms=wall_ms,
            engine_ms=engine_ms,
            num_superseded=num_superseded,
            num_failed=num_failed,
            elapsed_s=elapsed_s,
            gateway_cpu_s=used["gateway"],
            workers_cpu_s=used["workers"],
            client_cpu_s=client_cpu_s,
            others_share=round(meter.share(), 3),
        )

    @contextmanager
    def _sampled_cpu(self) -> Iterator[list[tuple[float, float]]]:
        """Samples of `time.perf_counter()` and of the pools' CPU seconds, complete after the block."""
        samples: list[tuple[float, float]] = []
        is_over = threading.Event()

        def sample() -> None:
            is_last = False
            while not is_last:
                is_last = is_over.wait(SAMPLE_S)
                samples.append((time.perf_counter(), sum(self._server.cpu_s().values())))

        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield samples
        finally:
            is_over.set()
            thread.join()


def _spans(ends_s: Sequence[float], samples: Sequence[tuple[float, float]], start_s: float) -> list[Span]:
    """What ended, and what was computed, in each whole span of a loop.

    Args:
        ends_s: of the answers, after the loop's start.
    """
    bounds_s = np.arange(0.0, max(ends_s), SPAN_S)
    times_s, cpu_s = np.transpose(samples)
    used_s = np.diff(np.interp(bounds_s + start_s, times_s, cpu_s))
    numbers, _ = np.histogram(ends_s, bounds_s)
    return [Span(int(number), round(float(used), 4)) for number, used in zip(numbers, used_s, strict=True)]
