"""A step that cannot be captured as a CUDA graph fails the load, with the stand-in for `torch.cuda`."""

from __future__ import annotations

import pytest
import torch

from tests.workers.engine.cuda.fake_cuda import fake_cuda
from tests.workers.engine.helpers import TINY, peaked_weights
from workers.engine.cuda.graphs import GraphRecorder
from workers.engine.cuda.runner import CudaRunner
from workers.engine.failures import LoadFailure
from workers.engine.loader import LoadedModel, build


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel(build(TINY, peaked_weights(TINY), "fp32", device="cpu:0"), "cuda", "fp32")


@pytest.mark.parametrize("after", [0, 7])
def test_a_failed_capture_fails_the_load(model: LoadedModel, after: int) -> None:
    with fake_cuda() as fake:
        before = torch.cuda.current_stream()
        fake.fail("capture", "capture_error", after=after)
        with pytest.raises(LoadFailure, match="CUDA graph") as raised:
            CudaRunner(model, 2)
        assert isinstance(raised.value.__cause__, torch.AcceleratorError)
        assert torch.cuda.current_stream() is before
        assert CudaRunner(model, 2).num_entries > 0  # the next try


def test_a_capture_without_memory_is_out_of_memory(model: LoadedModel) -> None:
    with fake_cuda() as fake:
        fake.fail("capture", "out_of_memory")
        with pytest.raises(torch.OutOfMemoryError):
            CudaRunner(model, 2)


def test_a_device_that_fails_during_a_capture_is_no_failed_capture(model: LoadedModel) -> None:
    """The process can never use the device again, so the error must not look like one after which it could."""
    with fake_cuda() as fake:
        fake.fail("capture", "device_error")
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            CudaRunner(model, 2)


@torch.inference_mode()
def test_the_stream_is_restored_after_an_invalidated_capture() -> None:
    with fake_cuda():
        x = torch.ones(3, device="cuda")
        before = torch.cuda.current_stream()
        with pytest.raises(torch.AcceleratorError):
            GraphRecorder().record(lambda: x[x > 0].sum().item())
        assert torch.cuda.current_stream() is before
