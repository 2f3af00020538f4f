"""Our engine by itself, in a child process: through `Engine.submit`, without a gateway, a socket or a text."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from pathlib import Path

from deploy.bench.harness.workload import Run, Subject, Workload
from workers.engine.engine import Engine, EngineConfig
from workers.engine.model.loader import load_model, random_model
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput
from workers.gunicorn_worker import SWITCH_INTERVAL_S

LOAD_S = 600.0
MAX_TRIES = 8


class EngineAlone:
    """An engine set up as `workers.app` sets it up, minus the app."""

    def __init__(self, subject: Subject, device: str, dtype: str, max_batch: int, num_threads: int | None) -> None:
        """
        Raises:
            RuntimeError: it does not get warm.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        make = (
            partial(random_model, "medium" if subject.name == "synthetic:medium" else "small")
            if subject.source == "synthetic"
            else partial(load_model, Path(subject.directory))
        )
        self._changed = threading.Condition()
        self._num_requests = 0
        self._engine = Engine(
            EngineConfig(device=device, dtype=dtype, max_batch=max_batch, num_threads=num_threads),
            lambda progress: make(device=device, dtype=dtype, progress=progress),
            on_change=self._announce,
            on_fatal=lambda _error: os._exit(70),
        )
        self._engine.start()
        with self._changed:
            self._changed.wait_for(lambda: self._engine.status().state in {"warm", "failed"}, LOAD_S)
        status = self._engine.status()
        if status.state != "warm":
            raise RuntimeError(f"the engine is {status.state}: {status.reason}")

    def dtype(self) -> str:
        """The one in effect."""
        return self._engine.status().dtype

    def request(self, prompt_ids: tuple[int, ...], workload: Workload, seed: int) -> Run:
        """Siblings of one prompt, submitted together.

        Raises:
            RuntimeError: they kept ending early.
        """
        sampling = SamplingParams(
            max_new_tokens=workload.num_new_tokens,
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
        )
        for _ in range(MAX_TRIES):
            self._num_requests += 1
            group = (f"bench-{self._num_requests}", workload.num_samples)
            requests = [
                EngineRequest(prompt_ids, sampling, seed=seed + index, group=group)
                for index in range(workload.num_samples)
            ]
            start = time.perf_counter()
            results = [generation.result() for generation in [self._engine.submit(one) for one in requests]]
            wall_ms = 1e3 * (time.perf_counter() - start)
            if all(len(one.token_ids) == workload.num_new_tokens for one in results):
                return Run(wall_ms, min(one.cached_tokens for one in results), _ms_per_step(results))
            # One that drew the end of the text did less work: again, with other draws (and the prompt's first token
            # changed, so that it is as new as it was).
            seed += workload.num_samples
            prompt_ids = ((prompt_ids[0] + 1) % 256, *prompt_ids[1:])
        raise RuntimeError(f"the engine's texts ended early {MAX_TRIES} times")

    def _announce(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _ms_per_step(results: list[SequenceOutput]) -> float:
    times = sorted(one.decode_ms / (len(one.token_ids) - 1) for one in results)
    return times[len(times) // 2]
