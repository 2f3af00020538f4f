"""Steps as CUDA graphs, with the stand-in for `torch.cuda`: the same texts, and what a capture that fails leaves."""

from __future__ import annotations

import pytest
import torch

from tests.workers.engine.cuda.fake_cuda import FakeCuda, fake_cuda
from tests.workers.engine.cuda.test_runner import assert_all_same, gpu_texts
from tests.workers.engine.helpers import load_peaked
from workers.engine.cuda.graphs import GraphRecorder
from workers.engine.cuda.runner import CudaRunner
from workers.engine.failures import LoadFailure


def make_runner() -> CudaRunner:
    return CudaRunner(load_peaked("cuda"), 2)


def test_captured_programs_give_the_same_texts_while_every_other_result_is_poisoned() -> None:
    expected = gpu_texts(load_peaked("cpu:0"), max_batch=4)
    with fake_cuda() as fake:
        captured = gpu_texts(load_peaked("cuda"), max_batch=4)
    assert fake.num_captures > 20
    assert fake.num_replays > 300
    assert_all_same(captured, expected)


@pytest.mark.parametrize("after", [0, 7])
def test_a_failed_capture_fails_the_load(fake: FakeCuda, after: int) -> None:
    before = torch.cuda.current_stream()
    fake.fail("capture", "capture_error", after=after)
    with pytest.raises(LoadFailure, match="CUDA graph") as raised:
        make_runner()
    assert isinstance(raised.value.__cause__, torch.AcceleratorError)
    assert torch.cuda.current_stream() is before
    assert make_runner().num_entries > 0  # the next try


def test_a_capture_without_memory_is_out_of_memory(fake: FakeCuda) -> None:
    fake.fail("capture", "out_of_memory")
    with pytest.raises(torch.OutOfMemoryError):
        make_runner()


def test_a_device_that_fails_during_a_capture_is_no_failed_capture(fake: FakeCuda) -> None:
    """The process can never use the device again, so the error must not look like one after which it could."""
    fake.fail("capture", "device_error")
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        make_runner()


@pytest.mark.usefixtures("fake")
@torch.inference_mode()
def test_the_stream_is_restored_after_an_invalidated_capture() -> None:
    x = torch.ones(3, device="cuda")
    before = torch.cuda.current_stream()
    with pytest.raises(torch.AcceleratorError):
        GraphRecorder().record(lambda: x[x > 0].sum().item())
    assert torch.cuda.current_stream() is before
