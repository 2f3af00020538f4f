"""The stand-in for `torch.cuda` fails where a GPU would, and the texts of the CUDA path are the same with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.workers.engine.cuda.fake_cuda import fake_cuda, process_environment
from tests.workers.engine.cuda.test_runner import assert_same, gpu_texts
from tests.workers.engine.helpers import TINY, peaked_weights
from workers.engine.cuda.graphs import GraphRecorder, Program
from workers.engine.loader import LoadedModel, build


def tiny_on(device: str) -> LoadedModel:
    return LoadedModel(build(TINY, peaked_weights(TINY), "fp32", device=device), device, "fp32")


def test_captured_programs_give_the_same_texts_while_every_other_result_is_poisoned() -> None:
    expected = gpu_texts(tiny_on("cpu:0"), max_batch=4)
    with fake_cuda() as fake:
        captured = gpu_texts(tiny_on("cuda"), max_batch=4)
    assert fake.num_captures > 20
    assert fake.num_replays > 300
    for ours, theirs in zip(captured, expected, strict=True):
        assert_same(ours, theirs)


@torch.inference_mode()
def test_a_replay_writes_the_same_memory_and_poisons_the_results_of_others() -> None:
    with fake_cuda() as fake:
        table = torch.zeros(3, device="cuda")
        first, second = Program(lambda: table + 1), Program(lambda: table.add_(1).sum())
        recorder = GraphRecorder()
        first.capture(recorder)
        second.capture(recorder)
        table.zero_()
        kept = first()
        assert kept.tolist() == [1, 1, 1]
        assert second().item() == 3
        assert table.tolist() == [1, 1, 1]
        assert kept.isnan().all()
        assert first().data_ptr() == kept.data_ptr()
        assert kept.tolist() == [2, 2, 2]
        assert fake.num_captures == 2


@torch.inference_mode()
def test_a_launch_is_recorded() -> None:
    with fake_cuda() as fake:
        x = torch.zeros(2, device="cuda")
        launch = fake.launcher(lambda out: out.add_(1))
        program = Program(lambda: launch(x))
        program.capture(GraphRecorder())
        x.zero_()
        program()
        assert x.tolist() == [1, 1]


@torch.inference_mode()
def test_a_copy_to_the_host_is_done_when_an_event_is_synchronized() -> None:
    with fake_cuda():
        host = torch.empty(2, pin_memory=True)
        host.copy_(torch.ones(2, device="cuda"), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        assert host.isnan().all()
        event.synchronize()
        assert host.tolist() == [1, 1]


@torch.inference_mode()
def test_an_operation_that_waits_for_the_device_cannot_be_captured() -> None:
    with fake_cuda():
        x = torch.ones(2, device="cuda")
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        with pytest.raises(RuntimeError, match="previous error during capture"), torch.cuda.graph(graph):
            x.sum().item()
        assert torch.cuda.current_stream() is not before  # as torch leaves it


@pytest.mark.parametrize(
    ("point", "error", "kind"),
    [
        ("allocate", "out_of_memory", torch.OutOfMemoryError),
        ("capture", "out_of_memory", torch.OutOfMemoryError),
        ("capture", "capture_error", torch.AcceleratorError),
        ("replay", "out_of_memory", torch.OutOfMemoryError),
        ("replay", "device_error", torch.AcceleratorError),
        ("synchronize", "device_error", torch.AcceleratorError),
    ],
)
@torch.inference_mode()
def test_injected_failures(point: str, error: str, kind: type[Exception]) -> None:
    def use() -> None:
        x = torch.zeros(2, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
        graph.replay()
        torch.cuda.synchronize()

    with fake_cuda() as fake:
        use()
        fake.fail(point, error)
        with pytest.raises(kind):
            use()
        if error == "device_error":
            with pytest.raises(kind):
                torch.cuda.synchronize()
        else:
            torch.cuda.set_stream(torch.cuda.default_stream())
            use()


def test_nothing_remains_after_the_test() -> None:
    empty = torch.empty
    with fake_cuda(name="Test", capability=(7, 5)):
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.empty is not empty
    assert torch.empty is empty


def test_other_processes_have_the_stand_in() -> None:
    code = (
        "import sys; assert 'torch' not in sys.modules; import torch, json;"
        "print(json.dumps([torch.cuda.is_available(), torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]]));"
        "torch.zeros(1, device='cuda')"
    )
    failures = [{"point": "allocate", "error": "out_of_memory"}]
    environment = os.environ | process_environment(name="Test", free_bytes=7, failures=failures)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == [True, "Test", 7]
    assert "CUDA out of memory" in done.stderr
