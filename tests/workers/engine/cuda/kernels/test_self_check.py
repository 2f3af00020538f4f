"""The Triton kernels in Triton's interpreter, and whether the check that compares them finds faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.engine.cuda.kernels.self_check import CHECKS, CheckSetting, check_kernels
from workers.engine.cuda.step_kernels import AT, ID, POINT, POSITION, START, TOP_P, WIDTH, TorchKernels
from workers.engine.model.config import ModelConfig
from workers.engine.model.transformer import Norm

CPU = torch.device("cpu")
CODE = [POINT, WIDTH]
CONFIG = ModelConfig(vocab_size=300, n_embd=32, n_head=2, n_positions=256)
SETTING = CheckSetting(CONFIG, torch.float32, 9, CPU)


def test_kernels_equal_plain_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    program = Path(__file__).with_name("interpreted_checks.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {result["name"] for result in results} == set(CHECKS)
    assert [result for result in results if not result["is_correct"]] == []


def test_plain_torch_equals_itself() -> None:
    assert all(check.is_correct for check in check_kernels(_RowByRow(256), SETTING))


class _RowByRow(TorchKernels):
    """Attention of each row alone, as torch's products may have other bits in a batch."""

    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        parent = super().attend
        return torch.cat([parent(qkv[row : row + 1], slots, integers[:, row : row + 1]) for row in range(len(qkv))])


class _WrongPosition(_RowByRow):
    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor | None) -> tuple[Tensor, Tensor]:
        integers, x = super().begin(table, token_embedding, position_embedding)
        return integers, x + 1e-3


class _WrongIntegers(_RowByRow):
    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor | None) -> tuple[Tensor, Tensor]:
        integers, x = super().begin(table, token_embedding, position_embedding)
        integers[START] = 0
        return integers, x


class _SumIsNotStored(_RowByRow):
    def add_norm(self, x: Tensor, y: Tensor | None, norm: Norm) -> Tensor:
        return super().add_norm(x.clone(), y, norm)


class _NormDependsOnTheBatch(_RowByRow):
    def add_norm(self, x: Tensor, y: Tensor | None, norm: Norm) -> Tensor:
        return super().add_norm(x, y, norm) + len(x) * 1e-7


class _NewTokenIsIgnored(_RowByRow):
    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        integers = integers.clone()
        super().attend(qkv, slots, integers)
        integers[POSITION] = (integers[POSITION] - 1).clamp(min=0)
        return super().attend(qkv, slots.clone(), integers)


class _KeysAreNotStored(_RowByRow):
    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        return super().attend(qkv, slots.clone(), integers)


class _EntryEndsEarly(_RowByRow):
    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        integers = integers.clone()
        integers[START] = (integers[START] - 1).clamp(min=0)
        return super().attend(qkv, slots, integers)


class _CounterIsNotReset(_RowByRow):
    num_launches = 0

    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        self.num_launches += 1
        out = super().attend(qkv, slots, integers)
        return out if self.num_launches == 1 else out.zero_()


class _LargerIdFirst(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        tokens = super().draw(logits.flip(1), table)
        tokens[0] = logits.shape[1] - 1 - tokens[0]
        table[ID] = tokens[0]
        return tokens


class _PaddingIsRead(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        return super().draw(logits.as_strided((len(logits), logits.shape[1] + 1), logits.stride()), table)


class _TopPIsIgnored(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        changed = table.clone()
        changed[TOP_P] = 2
        tokens = super().draw(logits, changed)
        table[ID] = tokens[0]
        table[[POSITION, *CODE, AT]] = changed[[POSITION, *CODE, AT]]
        return tokens


class _UsedUpPointsAreKept(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        changed = table.clone()
        changed[WIDTH] = 1
        tokens = super().draw(logits, changed)
        tokens[3] *= table[WIDTH]
        table[:WIDTH], table[WIDTH], table[AT] = changed[:WIDTH], tokens[3], changed[AT]
        return tokens


class _CodesAreNotAdvanced(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        before = table.clone()
        tokens = super().draw(logits, table)
        table[CODE] = before[CODE]
        return tokens


class _TableIsNotAdvanced(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        return super().draw(logits, table.clone())


class _NotANumber(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        tokens = super().draw(logits, table)
        tokens[1] = float("nan")
        return tokens


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        (_WrongPosition, "begin"),
        (_WrongIntegers, "begin"),
        (_SumIsNotStored, "add_norm"),
        (_NormDependsOnTheBatch, "add_norm"),
        (_NewTokenIsIgnored, "attend"),
        (_KeysAreNotStored, "attend"),
        (_EntryEndsEarly, "attend"),
        (_CounterIsNotReset, "attend"),
        (_LargerIdFirst, "draw"),
        (_PaddingIsRead, "draw"),
        (_TopPIsIgnored, "draw"),
        (_UsedUpPointsAreKept, "draw"),
        (_CodesAreNotAdvanced, "draw"),
        (_TableIsNotAdvanced, "draw"),
        (_NotANumber, "draw"),
    ],
)
def test_a_faulty_kernel_is_found(kernels: Callable[[int], TorchKernels], name: str) -> None:
    checks = check_kernels(kernels(256), SETTING)
    assert [check.name for check in checks if not check.is_correct] == [name]


def test_an_error_of_the_device_is_raised() -> None:
    class Failing(TorchKernels):
        def draw(self, *_: Any) -> Tensor:
            raise RuntimeError("CUDA error in cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        check_kernels(Failing(256), SETTING)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [4, 12])
def test_kernels_equal_plain_torch_on_a_gpu(dtype: torch.dtype, heads: int) -> None:
    pytest.importorskip("triton")
    from workers.engine.cuda.kernels.triton_kernels import TritonKernels

    config = replace(CONFIG, n_embd=64 * heads, n_head=heads, n_positions=1024, vocab_size=50257)
    setting = CheckSetting(config, dtype, 96, torch.device("cuda"))
    checks = check_kernels(TritonKernels(config, 96, setting.device), setting)
    assert [check for check in checks if not check.is_correct] == []
