"""Live writers: when they press keys, and clients that press them on a real gateway.

A writer types bursts of keys and pauses between them. Each key is a request of the writer's session for predictions, as
the page in live mode makes it, and a newer request supersedes an older one. The simulation presses the same keys.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Lock, local

import msgspec

from deploy.load.clients import Connection
from deploy.load.prompts import PromptGenerator
from deploy.load.workload import Subject

# What the page's debounce starts from (gateway/static/adaptive_debounce.js): interval between keys, and its deviation.
KEY_INTERVAL_S, KEY_DEVIATION_S = 0.18, 0.045
# Assumptions: a burst of about four words, then a pause for thought.
KEYS_PER_BURST, PAUSE_S = 24, 3.0
MIN_INTERVAL_S = 0.03
CONTEXT_TOKENS = 64  # before a writer's first key
THREADS_PER_WRITER = 4
START_DELAY_S = 0.3
SUPERSEDED = 409


class Key(msgspec.Struct, frozen=True):
    """A writer's key, `offset_s` after the start."""

    offset_s: float
    writer: int


class Typed(msgspec.Struct, frozen=True):
    """What became of all keys of a turn. `wall_ms` is of those answered."""

    wall_ms: list[float]
    engine_ms: list[float]
    num_superseded: int
    num_failed: int
    elapsed_s: float
    client_cpu_s: float


def press_keys(rng: random.Random, num_writers: int, seconds: float) -> list[Key]:
    """All keys of writers who are at a random point of their bursts and pauses when the time starts, ascending."""
    keys = []
    period_s = KEYS_PER_BURST * KEY_INTERVAL_S + PAUSE_S
    for writer in range(num_writers):
        now = -rng.uniform(0.0, period_s)
        while now < seconds:
            for _ in range(KEYS_PER_BURST):
                now += max(MIN_INTERVAL_S, rng.gauss(KEY_INTERVAL_S, KEY_DEVIATION_S))
                if 0.0 <= now < seconds:
                    keys.append(Key(now, writer))
            now += rng.expovariate(1 / PAUSE_S)
    return sorted(keys, key=lambda key: key.offset_s)


def keys_per_s() -> float:
    """Average over bursts and pauses, of one writer."""
    return KEYS_PER_BURST / (KEYS_PER_BURST * KEY_INTERVAL_S + PAUSE_S)


class WriterClients:
    """Writers of one gateway; created in a process of its own."""

    def __init__(self, host: str, port: int, subject: Subject, seed: int) -> None:
        self._address = host, port
        self._prompts = PromptGenerator(subject.tokenizer(), seed)
        self._turns = count()
        self._thread = local()

    def press(self, keys: Sequence[Key], num_writers: int) -> Typed:
        """Press the keys at their times; the answers that lack at the end are awaited."""
        turn = next(self._turns)
        texts = [self._prompts.text(CONTEXT_TOKENS) + self._prompts.text(200) for _ in range(num_writers)]
        lengths = [len(text) // 4 for text in texts]
        wall_ms: list[float] = []
        engine_ms: list[float] = []
        statuses: list[int] = []
        lock = Lock()

        def send(key: Key, length: int, start_s: float) -> None:
            if not hasattr(self._thread, "connection"):
                self._thread.connection = Connection(*self._address)
            body = {
                "context": texts[key.writer][:length], "session": f"{turn}-{key.writer}", "strategy": "predict",
            }  # fmt: skip
            reply = self._thread.connection.request(body)
            with lock:
                statuses.append(reply.status)
                if reply.status == 200:
                    wall_ms.append(1e3 * (time.perf_counter() - start_s - key.offset_s))
                    engine_ms.append(reply.engine_ms)

        with ThreadPoolExecutor(THREADS_PER_WRITER * num_writers) as pool:
            cpu_start = time.process_time()
            start_s = time.perf_counter() + START_DELAY_S
            for key in keys:
                time.sleep(max(0.0, start_s + key.offset_s - time.perf_counter()))
                lengths[key.writer] += 1
                pool.submit(send, key, lengths[key.writer], start_s)
        elapsed_s = time.perf_counter() - start_s
        num_superseded = statuses.count(SUPERSEDED)
        num_failed = len(statuses) - num_superseded - len(wall_ms)
        return Typed(wall_ms, engine_ms, num_superseded, num_failed, elapsed_s, time.process_time() - cpu_start)
