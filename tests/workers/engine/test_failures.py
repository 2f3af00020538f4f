"""Failures of the engine: each kind has one class, one counter and one way to be handled; no foreign text gets out."""

from __future__ import annotations

import mmap
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from structlog.testing import capture_logs

from tests.chaos.measure import Jitter
from tests.workers.engine.helpers import CPU_DTYPES, TINY, loading_engine, peaked_weights, running_engine
from tests.workers.faults import Fault, Faults
from tests.workers.helpers import run_python, wait_until
from workers.engine.engine import Engine, EngineState
from workers.engine.failures import (
    DeviceFailure,
    EngineFailure,
    EngineNotReady,
    InternalFailure,
    InvalidOutput,
    LoadFailure,
    OutOfMemory,
)
from workers.engine.foreign_errors import load_failure, step_failure
from workers.engine.loader import LoadedModel, build
from workers.engine.request import EngineRequest, SamplingParams

GOOD, OOM, DEVICE, OOM_STEP = 1, 900, 901, 902
FAULTS: dict[int, Fault] = {OOM: "oom", DEVICE: "device", OOM_STEP: "oom_step"}


def request(seed: int, num_tokens: int = 5, prompt: tuple[int, ...] = (1, 2, 3)) -> EngineRequest:
    return EngineRequest(prompt, SamplingParams(num_tokens), seed)


@contextmanager
def faulty_engine(
    loaded: LoadedModel, *, step_delay_s: float = 0.0, max_batch: int = 48
) -> Iterator[tuple[Engine, list[EngineFailure]]]:
    """A warm engine with FAULTS, and its fatal failures."""
    with loading_engine(lambda _: loaded, Faults(step_delay_s, FAULTS), max_batch=max_batch) as (engine, fatal):
        wait_until(lambda: engine.status().state == "warm")
        yield engine, fatal


def test_out_of_memory_in_one_request_fails_that_request_only(tiny: LoadedModel) -> None:
    with faulty_engine(tiny, step_delay_s=0.005) as (engine, fatal):
        alone = engine.submit(request(GOOD, 100, prompt=(7, 8))).result().token_ids
        for number in range(2):  # never twice in a row
            mate = engine.submit(request(GOOD, 100, prompt=(7, 8)))
            wait_until(lambda: engine.status().num_running == 1)
            prompt = (20 + number, 9)
            victims = [engine.submit(request(OOM, prompt=prompt)) for _ in range(2)]  # siblings: one prefill
            for victim in victims:
                assert isinstance(victim.result().failure, OutOfMemory)
                assert victim.result().token_ids == ()
            after = engine.submit(request(GOOD, prompt=prompt)).result()
            assert (after.finish_reason, after.cached_tokens) == ("length", 0)  # what failed is not in the cache
            assert (mate.result().finish_reason, mate.result().token_ids) == ("length", alone)
        assert engine.status().failures == {"out_of_memory": 2}
    assert fatal == []


def test_out_of_memory_of_a_step_fails_its_batch_drops_the_cache_and_the_engine_continues(tiny: LoadedModel) -> None:
    with faulty_engine(tiny, step_delay_s=0.005) as (engine, fatal):
        expected = engine.submit(request(GOOD)).result().token_ids
        assert engine.submit(request(GOOD)).result().cached_tokens == 3
        for _ in range(3):  # never twice in a row
            mate = engine.submit(request(GOOD, 200, prompt=(7, 8)))
            wait_until(lambda: engine.status().num_running == 1)
            victim = engine.submit(request(OOM_STEP, prompt=(9, 9)))
            for output in (victim.result(), mate.result()):
                assert output.finish_reason == "error"
                assert isinstance(output.failure, OutOfMemory)
            after = engine.submit(request(GOOD)).result()
            assert (after.token_ids, after.cached_tokens) == (expected, 0)
        assert engine.status().failures == {"out_of_memory": 3}
    assert fatal == []


def test_a_second_out_of_memory_in_a_row_is_fatal(tiny: LoadedModel) -> None:
    """A running batch changes nothing: its tokens need no new memory, so they do not show that there is some again."""
    with faulty_engine(tiny, step_delay_s=0.005) as (engine, fatal):
        mate = engine.submit(request(GOOD, 600, prompt=(7, 8)))
        for number in range(2):
            assert engine.status().state == "warm"
            assert isinstance(engine.submit(request(OOM, prompt=(number,))).result().failure, OutOfMemory)
        wait_until(lambda: bool(fatal))
        assert [type(failure) for failure in fatal] == [OutOfMemory]
        assert isinstance(mate.result().failure, OutOfMemory)
        assert (engine.status().state, engine.status().failures) == ("failed", {"out_of_memory": 2})
        with pytest.raises(EngineNotReady):
            engine.submit(request(GOOD))


def test_after_a_fatal_device_error_no_later_request_is_served(tiny: LoadedModel) -> None:
    """Five times; the host, which ends the process, learns of it within 100 ms."""
    for _ in range(5):
        with capture_logs() as logs, faulty_engine(tiny, max_batch=6) as (engine, fatal):
            mates = [engine.submit(request(GOOD, 400, prompt=(seed, 5))) for seed in range(3)]
            began = time.monotonic()
            victim = engine.submit(request(DEVICE))
            output = victim.result()
            with pytest.raises(EngineNotReady):
                engine.submit(request(GOOD))
            assert isinstance(output.failure, DeviceFailure)
            assert isinstance(output.failure.__cause__, RuntimeError)
            assert [type(mate.result().failure) for mate in mates] == [DeviceFailure] * 3
            wait_until(lambda: bool(fatal))
            assert time.monotonic() - began < 0.1
            [failure] = fatal
            assert [line["kind"] for line in logs if line["event"] == "engine_failed"] == ["device_error"]
            status = engine.status()
            assert (status.state, status.reason) == (EngineState.FAILED, failure.detail)
            assert status.failures == {"device_error": 1}


@pytest.mark.parametrize("device", ["cpu", "cpu:0"], ids=["CPU path", "GPU path on a CPU"])
def test_values_that_are_not_numbers_fail_the_request_and_repeated_are_fatal(device: str) -> None:
    """Positions whose embedding is NaN: so are the keys and values that prompts of that length leave in the cache."""
    model = build(TINY, peaked_weights(TINY), "fp32", device=device)
    assert model.position_embedding is not None
    embedding = model.position_embedding.clone()
    embedding[400:] = float("nan")
    damaged = LoadedModel(replace(model, position_embedding=embedding), device, "fp32")
    with faulty_engine(damaged) as (engine, fatal):
        good = engine.submit(request(GOOD)).result()
        bad = engine.submit(request(GOOD, prompt=(3,) * 410)).result()
        assert isinstance(bad.failure, InvalidOutput)
        assert bad.token_ids == ()
        assert engine.submit(request(GOOD)).result().token_ids == good.token_ids
        assert engine.status().failures == {"invalid_output": 1}
        assert fatal == []
        for _ in range(2):
            engine.submit(request(GOOD, prompt=(3,) * 410)).result()
        wait_until(lambda: bool(fatal))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_weights_that_are_not_numbers_never_reach_a_sampling_kernels_memory(dtype: str) -> None:
    """The kernel's candidates would be uninitialised memory, and the next step's input a wild address."""
    weights = peaked_weights(TINY)
    loaded = LoadedModel(build(TINY, weights, dtype), "cpu", dtype)
    loaded.model.norm.weight[:] = float("nan")
    with loading_engine(lambda _: loaded) as (engine, _):
        wait_until(lambda: engine.status().state == "failed")
        assert "not numbers" in (engine.status().reason or "")


HANGS = {"looping": "time.sleep(60)", "holding the interpreter lock": "ctypes.PyDLL(None).sleep(60)"}


@pytest.mark.parametrize("how", HANGS)
def test_a_hang_is_reported_as_fatal_and_ends_the_process_in_any_case(how: str) -> None:
    script = textwrap.dedent(
        f"""
        import ctypes, os, time
        from tests.workers.engine.helpers import TINY
        from workers.engine.engine import Engine, EngineConfig
        from workers.engine.failures import EngineNotReady
        from workers.engine.loader import random_model
        from workers.engine.cpu.runner import CpuRunner
        from workers.engine.request import EngineRequest, SamplingParams

        def end(failure):
            try:
                engine.submit(request)
            except EngineNotReady:
                status = engine.status()
                print(type(failure).__name__, status.state, status.failures, flush=True)
            os._exit(70)

        request = EngineRequest((1,), SamplingParams(), 0)
        engine = Engine(EngineConfig(hang_s=0.5), lambda _: random_model(TINY), on_fatal=end)
        engine.start()
        while engine.status().state != "warm":
            time.sleep(0.01)
        time.sleep(0.8)  # idle for longer than hang_s is no hang
        print("warm", flush=True)
        CpuRunner.run = lambda *_: {HANGS[how]}
        engine.submit(request).result()
        """
    )
    done = run_python(script)
    assert done.stdout.startswith("warm\n")
    assert done.stdout.endswith("Hang failed {'hang': 1}\n" if how == "looping" else "warm\n")
    assert done.returncode == (70 if how == "looping" else 1)
    assert "<lambda>" in done.stderr  # the stack shows where it hung


def test_every_foreign_exception_becomes_a_failure_with_a_sentence_of_ours() -> None:
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as no_memory:
        torch.empty(1 << 60)
    with pytest.raises(OSError, match="memory") as no_pages:
        mmap.mmap(-1, 1 << 60)
    cases: list[tuple[Exception, type[EngineFailure]]] = [
        (no_memory.value, OutOfMemory),
        (no_pages.value, OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfMemory),
        (MemoryError("secret"), OutOfMemory),
        (RuntimeError("CUDA error: secret"), DeviceFailure),
        (ValueError("CUDA_ERROR_ILLEGAL_ADDRESS"), DeviceFailure),
        (IndexError("secret"), InternalFailure),
        (InvalidOutput(), InvalidOutput),
    ]
    for error, kind in cases:
        failure = step_failure(error)
        assert type(failure) is kind
        assert failure is error or failure.__cause__ is error
        assert "secret" not in failure.detail + load_failure(error, "cpu").detail
        assert failure.detail.endswith(".")
    for error in (MemoryError(), no_pages.value):
        assert "TERCET_MAX_BATCH" in load_failure(error, "cpu").detail
    missing = load_failure(FileNotFoundError(2, "No such file or directory", "/models/x"), "cpu")
    assert missing.detail.startswith("/models/x cannot be read (No such file or directory)")
    assert load_failure(missing, "cpu") is missing
    assert isinstance(missing, LoadFailure)


def test_a_deadline_and_a_cancellation_end_generation_within_one_step(tiny: LoadedModel) -> None:
    """100 sequences, four at a time: each ends at its deadline or cancellation, plus the step under way."""
    late: list[float] = []
    with running_engine(tiny, max_batch=8, step_delay_s=0.004) as engine, Jitter() as jitter:
        for number in range(25):
            now = time.monotonic()
            deadlines = [now + 0.02 + 0.007 * ((number + index) % 5) for index in range(4)]
            streams = [
                engine.submit(EngineRequest((index, 9), SamplingParams(500), number, deadline=deadline))
                for index, deadline in enumerate(deadlines)
            ]
            time.sleep(max(0.0, deadlines[0] - time.monotonic() - 0.01))
            cancelled_at = time.monotonic()
            streams[0].cancel()
            ends = [cancelled_at, *deadlines[1:]]
            for stream, end in zip(streams, ends, strict=True):
                output = stream.result()
                assert output.finish_reason in {"cancelled", "deadline"}
                assert output.ended_at is not None
                late.append(output.ended_at - end)
    assert len(late) == 100
    # A busy machine wakes any thread late.
    assert sorted(late)[98] < 0.05 + jitter.ms(0.99) / 1e3
    assert max(late) < 0.25 + jitter.ms(1.0) / 1e3
