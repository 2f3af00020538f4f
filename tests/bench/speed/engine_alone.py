"""The engine alone, without gateway, sockets and tokenization. Runs in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

from deploy.tuning.load.workload import Workload, tokenizer_of
from workers.checkpoints.resolve import Checkpoint
from workers.engine.cpu_kernels import load_kernels
from workers.engine.engine import DEVICE_RUNNERS, Engine, EngineConfig, RunnerFactory
from workers.engine.loader import LoadedModel, load_model, random_model
from workers.engine.request import EngineRequest, SamplingParams
from workers.gunicorn_worker import SWITCH_INTERVAL_S

LOAD_S = 600.0
MAX_TRIES = 8


def load(subject: Checkpoint, device: str, dtype: str, **more: Any) -> LoadedModel:
    """The model under test on `device`, for the instruction set that the environment names (`tests.faulty_workers`)."""
    if device == "cpu":
        more["kernels"] = load_kernels(os.environ.get("TEST_INSTRUCTION_SET"))
    if subject.source != "synthetic":
        return load_model(Path(subject.directory), device=device, dtype=dtype, **more)
    shape: Literal["small", "medium"] = "medium" if subject.name == "synthetic:medium" else "small"
    return random_model(shape, device=device, dtype=dtype, **more)


class EngineAlone:
    """An engine configured as a worker configures it, driven through `Engine.submit`.

    Attributes:
        engine: warm.
    """

    def __init__(
        self,
        subject: Checkpoint,
        device: str,
        dtype: str,
        max_batch: int,
        num_threads: int | None,
        runners: RunnerFactory = DEVICE_RUNNERS,
    ) -> None:
        """
        Raises:
            RuntimeError: the engine does not become warm.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        tokenizer = tokenizer_of(subject)
        self.engine = Engine(
            EngineConfig(device=device, dtype=dtype, max_batch=max_batch, num_threads=num_threads),
            lambda progress: load(subject, device, dtype, progress=progress, tokenizer=tokenizer),
            runners=runners,
            on_fatal=lambda _error: os._exit(70),
        )
        self.engine.start()
        end = time.monotonic() + LOAD_S
        while self.engine.status().state not in {"warm", "failed"} and time.monotonic() < end:
            time.sleep(0.01)
        status = self.engine.status()
        if status.state != "warm":
            raise RuntimeError(f"the engine is {status.state}: {status.reason}")

    def dtype(self) -> str:
        """The dtype in effect."""
        return self.engine.status().dtype

    def run(self, prompt_ids: tuple[int, ...], workload: Workload, seed: int) -> float:
        """Milliseconds of one request: the workload's branches of one prompt, submitted as a prefill group.

        Raises:
            RuntimeError: a branch ended before its last token in every try.
        """
        sampling = SamplingParams(
            max_new_tokens=workload.num_new_tokens,
            temperature=workload.temperature,
            top_k=workload.top_k,
            top_p=workload.top_p,
        )
        for _ in range(MAX_TRIES):
            requests = [
                EngineRequest(prompt_ids, sampling, seed=seed + index, group_size=workload.num_samples)
                for index in range(workload.num_samples)
            ]
            start = time.perf_counter()
            streams = [self.engine.submit(request) for request in requests]
            outputs = [stream.result() for stream in streams]
            wall_ms = 1e3 * (time.perf_counter() - start)
            if all(len(output.token_ids) == workload.num_new_tokens for output in outputs):
                return wall_ms
            # A branch sampled the end-of-text token and did less work. Try again with other seeds, and with another
            # first token, so that the prompt is not in the prefix cache.
            seed += workload.num_samples
            prompt_ids = ((prompt_ids[0] + 1) % 256, *prompt_ids[1:])
        raise RuntimeError(f"a branch ended early in each of {MAX_TRIES} tries")
