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

from tests.workers.engine.helpers import SMOLLM2, TINY_LLAMA
from workers.engine.cuda.kernels.self_check import CHECKS, CheckSetting, check_kernels
from workers.engine.cuda.step_kernels import (
    AT,
    ID,
    POINT,
    POSITION,
    START,
    TOP_P,
    WIDTH,
    Attention,
    Product,
    TorchKernels,
    multiply,
)
from workers.engine.model.config import ModelConfig

CPU = torch.device("cpu")
CODE = [POINT, WIDTH]
CONFIG = ModelConfig(vocab_size=300, n_embd=32, n_head=2, n_positions=256)
SETTING = CheckSetting(CONFIG, torch.float32, 9, CPU)


@pytest.mark.timeout(1200)
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
    """Each row alone, as torch's products may have other bits in a batch."""

    def has_equal_products(self, dtype: torch.dtype) -> bool:
        return True

    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        outs = [multiply(product, x[row : row + 1], None if y is None else y[row : row + 1]) for row in range(len(x))]
        return torch.cat(outs)

    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        parent = super().attend
        rows = [slice(row, row + 1) for row in range(len(qkv))]
        return torch.cat([parent(attention, qkv[row], slots, table[:, row]) for row in rows])


class _WrongPosition(_RowByRow):
    def begin(self, table: Tensor, token_embedding: Tensor, position_embedding: Tensor | None) -> Tensor:
        return super().begin(table, token_embedding, position_embedding) + 1e-3


class _NormIsLeftOut(_RowByRow):
    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        return super().multiply(replace(product, norm=None), x, y if product.norm is None else x)


class _ResidualIsLeftOut(_RowByRow):
    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        return super().multiply(replace(product, is_added=False), x, y)


class _ActivationIsLeftOut(_RowByRow):
    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        return super().multiply(replace(product, activate=None), x, y)


class _ProductDependsOnTheBatch(_RowByRow):
    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        return super().multiply(product, x, y) * (1 + len(x) * 1e-7)


class _NewTokenIsIgnored(_RowByRow):
    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        table = table.clone()
        super().attend(attention, qkv, slots, table)
        table[POSITION] = (table[POSITION] - 1).clamp(min=0)
        return super().attend(attention, qkv, slots.clone(), table)


class _KeysAreNotStored(_RowByRow):
    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        return super().attend(attention, qkv, slots.clone(), table)


class _EntryEndsEarly(_RowByRow):
    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        table = table.clone()
        table[START] = (table[START] - 1).clamp(min=0)
        return super().attend(attention, qkv, slots, table)


class _CounterIsNotReset(_RowByRow):
    num_launches = 0

    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        self.num_launches += 1
        out = super().attend(attention, qkv, slots, table)
        return out if self.num_launches == 1 else out.zero_()


class _RotationIsLeftOut(_RowByRow):
    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        return super().attend(replace(attention, rotations=None), qkv, slots, table)


class _HeadNormsAreLeftOut(_RowByRow):
    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        return super().attend(Attention(rotations=attention.rotations), qkv, slots, table)


class _OtherKeysAreRead(_RowByRow):
    def attend(self, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Tensor:
        flipped = slots.flip(2)
        out = super().attend(attention, qkv, slots, table)
        return out if slots.shape[2] == 1 else super().attend(attention, qkv, flipped, table)


class _GateAndUpAreSwapped(_RowByRow):
    def multiply(self, product: Product, x: Tensor, y: Tensor | None) -> Tensor:
        activate = product.activate
        if activate is None:
            return super().multiply(product, x, y)
        return super().multiply(replace(product, activate=lambda z: activate(z.roll(z.shape[1] // 2, 1))), x, y)


class _LargerIdFirst(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        super().draw(logits.flip(1), table, out)
        out[:, 0] = logits.shape[1] - 1 - out[:, 0]
        table[ID] = logits.shape[1] - 1 - table[ID]


class _PaddingIsRead(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        super().draw(logits.as_strided((len(logits), logits.shape[1] + 1), logits.stride()), table, out)


class _TopPIsIgnored(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        changed = table.clone()
        changed[TOP_P] = 2
        super().draw(logits, changed, out)
        table[[ID, POSITION, *CODE, AT]] = changed[[ID, POSITION, *CODE, AT]]


class _UsedUpPointsAreKept(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        changed = table.clone()
        changed[WIDTH] = 1
        super().draw(logits, changed, out)
        out[:, 3] *= table[WIDTH]
        table[:WIDTH], table[WIDTH], table[AT] = changed[:WIDTH], table[WIDTH] * changed[WIDTH], changed[AT]


class _CodesAreNotAdvanced(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        before = table.clone()
        super().draw(logits, table, out)
        table[CODE] = before[CODE]


class _TableIsNotAdvanced(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        super().draw(logits, table.clone(), out)


class _StoredAtTheNextStep(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        super().draw(logits, table, out)
        out[1:] = out[:-1].clone()


class _NotANumber(_RowByRow):
    def draw(self, logits: Tensor, table: Tensor, out: Tensor) -> None:
        super().draw(logits, table, out)
        out[:, 1] = float("nan")


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        (_WrongPosition, "begin"),
        (_NormIsLeftOut, "multiply"),
        (_ResidualIsLeftOut, "multiply"),
        (_ActivationIsLeftOut, "multiply"),
        (_ProductDependsOnTheBatch, "multiply"),
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
        (_StoredAtTheNextStep, "draw"),
        (_NotANumber, "draw"),
    ],
)
def test_a_faulty_kernel_is_found(kernels: Callable[[int], TorchKernels], name: str) -> None:
    checks = check_kernels(kernels(256), SETTING)
    assert [check.name for check in checks if not check.is_correct] == [name]


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        (_RowByRow, None),
        (_RotationIsLeftOut, "attend"),
        (_HeadNormsAreLeftOut, "attend"),
        (_OtherKeysAreRead, "attend"),
        (_GateAndUpAreSwapped, "multiply"),
    ],
)
def test_a_faulty_kernel_of_llamas_family_is_found(kernels: Callable[[int], TorchKernels], name: str | None) -> None:
    setting = CheckSetting(replace(TINY_LLAMA, n_positions=256), torch.float32, 9, CPU)
    checks = check_kernels(kernels(256), setting)
    assert [check.name for check in checks if not check.is_correct] == ([] if name is None else [name])


def test_an_error_of_the_device_is_raised() -> None:
    class Failing(TorchKernels):
        def draw(self, *_: Any) -> None:
            raise RuntimeError("CUDA error in cuLaunchKernelEx: CUDA_ERROR_ILLEGAL_ADDRESS")

    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        check_kernels(Failing(256), SETTING)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", [*(replace(CONFIG, n_embd=64 * heads, n_head=heads) for heads in (4, 12)), SMOLLM2])
def test_kernels_equal_plain_torch_on_a_gpu(dtype: torch.dtype, config: ModelConfig) -> None:
    pytest.importorskip("triton")
    from workers.engine.cuda.kernels.triton_kernels import TritonKernels

    config = replace(config, n_positions=1024, vocab_size=50257)
    setting = CheckSetting(config, dtype, 96, torch.device("cuda"))
    checks = check_kernels(TritonKernels(config, 96, setting.device), setting)
    assert [check for check in checks if not check.is_correct] == []
