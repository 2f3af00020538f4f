"""Failures while a model is loaded: which end the process, which are retried, and what a retry releases."""

from __future__ import annotations

import gc
import textwrap
import time
import weakref

import pytest
import torch

from tests.workers.engine.helpers import TINY, loading_engine
from tests.workers.faults import FaultyRunner
from tests.workers.helpers import run_python, wait_until
from workers.engine.core import Runner
from workers.engine.cuda.runner import CudaRunner
from workers.engine.engine import Engine, EngineConfig, RunnerFactory
from workers.engine.failures import DeviceFailure, EngineFailure, LoadFailure
from workers.engine.foreign_errors import is_device_error, load_failure
from workers.engine.loader import LoadedModel, ProgressFn, random_model


def chained(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


DEVICE_ERRORS = {
    "accelerator": torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    "no driver": RuntimeError("Found no NVIDIA driver on your system."),
    "initialization": RuntimeError("CUDA driver initialization failed, you might not have a CUDA gpu."),
    "no GPU": RuntimeError("No CUDA GPUs are available"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    "launch": RuntimeError("Triton Error [CUDA]: device-side assert triggered"),
    "cause": chained(ValueError("the kernel check failed"), torch.AcceleratorError("CUDA error: unspecified")),
}


def load_tiny(_: ProgressFn) -> LoadedModel:
    return random_model(TINY, device="cpu:0", dtype="fp32")


@pytest.mark.parametrize("stage", ["load", "runner", "warm-up"])
def test_a_device_error_while_loading_is_fatal_and_not_retried(stage: str) -> None:
    error = DEVICE_ERRORS["cause"]
    attempts: list[int] = []

    def load(progress: ProgressFn) -> LoadedModel:
        attempts.append(1)
        if stage == "load":
            raise error
        return load_tiny(progress)

    class Runners(RunnerFactory):
        def make(self, loaded: LoadedModel, config: EngineConfig, _interrupt: object) -> Runner:
            if stage == "runner":
                raise error
            return FaultyRunner(CudaRunner(loaded, config.max_batch), {0: "device"})  # 0 is the warm-up's seed

    with loading_engine(load, Runners(), device="cpu:0", max_batch=3) as (engine, fatal):
        wait_until(lambda: bool(fatal) or len(attempts) > 1)
        assert [type(failure) for failure in fatal] == [DeviceFailure]
        assert len(attempts) == 1
        assert (engine.status().state, engine.status().failures) == ("failed", {"device_error": 1})
        assert str(error) not in (engine.status().reason or "")


def test_only_errors_of_a_device_count_as_such() -> None:
    """A kernel that does not compile, or whose results are wrong, is replaced by plain torch; after a device error
    nothing that the process computes can be trusted."""
    for error in DEVICE_ERRORS.values():
        assert is_device_error(error)
        assert isinstance(load_failure(error, "cuda"), DeviceFailure)
    others = [
        ImportError("No module named 'triton'"),
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        AssertionError("Torch not compiled with CUDA enabled"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        OSError("libcuda.so.1: cannot open shared object file"),
    ]
    for other in others:
        assert not is_device_error(other)
        assert isinstance(load_failure(other, "cuda"), LoadFailure)
    is_full = load_failure(torch.AcceleratorError("CUDA error: out of memory"), "cuda")
    assert isinstance(is_full, DeviceFailure)
    assert "GPU memory" in is_full.detail


@pytest.mark.parametrize("stage", ["runner", "warm-up"])
def test_a_retried_load_has_released_what_the_failed_one_made(stage: str) -> None:
    """Two models, or two sets of graphs, do not fit where one just fits."""
    made: list[weakref.ref[object]] = []
    alive: list[int] = []

    def load(progress: ProgressFn) -> LoadedModel:
        alive.append(sum(reference() is not None for reference in made))
        loaded = load_tiny(progress)
        made.append(weakref.ref(loaded.model.token_embedding))
        return loaded

    class Runners(RunnerFactory):
        def make(self, loaded: LoadedModel, config: EngineConfig, _interrupt: object) -> Runner:
            runner = CudaRunner(loaded, config.max_batch)
            made.append(weakref.ref(runner))
            if len(alive) > 1:
                return runner
            if stage == "runner":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return FaultyRunner(runner, {0: "oom_step"})

    gc.disable()  # the engine must not depend on a collection that happens by chance
    try:
        with loading_engine(load, Runners(), device="cpu:0", max_batch=3) as (engine, _):
            wait_until(lambda: engine.status().state == "warm")
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_a_load_that_hangs_is_ended_by_its_own_deadline() -> None:
    """By the watchdog of steps, which also ends what holds the interpreter lock (`test_failures`)."""
    script = textwrap.dedent(
        """
        import os, threading, time
        from workers.engine.engine import Engine, EngineConfig

        printed = threading.Event()

        def end(failure):
            print(type(failure).__name__, engine.status().state, failure.detail, flush=True)
            os._exit(70)

        engine = Engine(EngineConfig(hang_s=30, load_s=1.0), lambda _: (printed.wait(), time.sleep(60)), on_fatal=end)
        engine.start()
        print("started", flush=True)
        printed.set()
        time.sleep(20)
        """
    )
    began = time.monotonic()
    done = run_python(script)
    assert done.stdout.startswith("started\n")
    assert done.returncode == 70, done.stderr
    assert "<lambda>" in done.stderr  # the stack shows where it hung
    assert time.monotonic() - began < 20
    assert "Hang failed" in done.stdout
    assert "TERCET_LOAD_S" in done.stdout


def test_the_pause_before_a_load_does_not_count_as_loading(tiny: LoadedModel) -> None:
    fatal: list[EngineFailure] = []
    engine = Engine(EngineConfig(hang_s=0, load_s=0.4), lambda _: tiny, on_fatal=fatal.append)
    engine.start(pause_s=1.0)
    assert engine.status().state in {"starting", "loading"}
    wait_until(lambda: engine.status().state == "warm" or bool(fatal))
    time.sleep(0.8)  # nor does what follows the load
    assert not fatal
    engine.stop(0)
