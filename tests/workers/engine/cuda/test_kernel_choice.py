"""Which kernels a GPU's worker uses.

The device is the stand-in for `torch.cuda`, and the check a function of the test: what a check finds on a GPU can only
be seen there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from structlog.testing import capture_logs

from tests.workers.engine.cuda.fake_cuda import FakeCuda, fake_cuda
from tests.workers.engine.helpers import TINY_LLAMA, load_peaked, running_engine
from workers.engine.cuda import kernel_choice
from workers.engine.cuda.kernel_choice import KernelChoice, choose_kernels
from workers.engine.failures import LoadFailure
from workers.engine.model.config import SHAPES, ModelConfig

DIFFERS = "attend differs from plain torch by 0.5"


def choose(check: Callable[..., str | None], config: ModelConfig = SHAPES["small"]) -> KernelChoice:
    return choose_kernels(config, torch.bfloat16, 48, torch.device("cuda"), check)


@pytest.mark.parametrize(("found", "kernels"), [(None, "triton"), (DIFFERS, "torch")])
def test_each_start_checks(fake: FakeCuda, found: str | None, kernels: str) -> None:
    check = Mock(return_value=found)
    for _ in range(2):
        assert choose(check) == KernelChoice(kernels, found or "")  # type: ignore[arg-type]
    assert check.call_count == 2


@pytest.mark.parametrize("shows_in_check", [True, False])
def test_a_device_error_of_the_check_is_raised(fake: FakeCuda, shows_in_check: bool) -> None:
    """After it no call of CUDA succeeds, so the load must fail; it is not the compiler's fault either."""

    def fault(*_: object) -> str | None:
        fake.fail("synchronize", "device_error")
        if shows_in_check:
            torch.cuda.synchronize()
        return None

    with pytest.raises(RuntimeError, match="device-side assert"):
        choose(fault)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("ptxas fatal: /home/user/x"), kernel_choice.CHECK_FAILED),  # clients see no path
        (PermissionError(13, "Permission denied", "/root/.triton"), kernel_choice.NOT_COMPILED),
    ],
)
def test_kernels_that_do_not_compile_are_rejected(fake: FakeCuda, error: Exception, reason: str) -> None:
    with capture_logs() as logs:
        assert choose(Mock(side_effect=error)) == KernelChoice("torch", reason)
    assert [line["event"] for line in logs] == ["kernel_check_failed", "kernels_chosen"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_too_little_memory_says_nothing_about_the_kernels(fake: FakeCuda, error: Exception) -> None:
    with pytest.raises(type(error)):
        choose(Mock(side_effect=error))


@pytest.mark.parametrize("capability", [(7, 0), (10, 0), (12, 0)])
def test_a_gpu_that_the_kernels_are_not_compiled_for(capability: tuple[int, int]) -> None:
    with fake_cuda(capability=capability):
        check = Mock(return_value=None)
        choice = choose(check)
    assert (choice.kernels, check.call_count) == ("torch", 0)
    assert f"this GPU has {capability[0]}.{capability[1]}" in choice.reason


def test_a_longer_context_than_the_kernels_attend_to(fake: FakeCuda) -> None:
    longest = replace(TINY_LLAMA, n_positions=kernel_choice.MAX_POSITIONS)
    assert choose(Mock(return_value=None), longest) == KernelChoice("triton")
    longer = replace(longest, n_positions=longest.n_positions + 1)
    assert choose(Mock(return_value=None), longer) == KernelChoice("torch", kernel_choice.TOO_LONG)


@pytest.mark.parametrize("module", ["triton", "cuda.bindings"])
def test_a_missing_package_is_named(fake: FakeCuda, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object:
        if name == module and "." in name:
            raise ModuleNotFoundError(name=name.partition(".")[0])
        return None if name == module else object()

    monkeypatch.setattr(kernel_choice, "find_spec", find)
    with pytest.raises(LoadFailure, match=f"pip install {module.replace('.', '-')}"):
        choose(Mock(return_value=None))


def test_the_engine_says_which_kernels_it_uses(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_self_check", Mock(return_value=DIFFERS))
    with running_engine(load_peaked("cuda"), max_batch=1) as engine:
        assert engine.status().kernels == f"torch: {DIFFERS}; graphs: on"
