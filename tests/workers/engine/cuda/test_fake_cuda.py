"""The stand-in for `torch.cuda` fails where a GPU would, and the texts of the CUDA path are the same with it."""

from __future__ import annotations

from tests.workers.engine.cuda.fake_cuda import fake_cuda
from tests.workers.engine.cuda.test_runner import assert_same, gpu_texts
from tests.workers.engine.helpers import TINY, peaked_weights
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
