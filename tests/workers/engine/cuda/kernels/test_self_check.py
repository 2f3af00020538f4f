"""The Triton kernels in Triton's interpreter, and whether the check that compares them finds faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.engine.helpers import SMOLLM2, TINY_LLAMA
from tests.workers.helpers import run_python
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
LLAMA_SETTING = replace(SETTING, config=replace(TINY_LLAMA, n_positions=256))
Method = Callable[..., Any]  # of `StepKernels`


@pytest.mark.timeout(1200)
def test_kernels_equal_plain_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    program = "from tests.workers.engine.cuda.kernels.interpreted_checks import main; main()"
    done = run_python(program, 1200, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert {result["name"] for result in results} == set(CHECKS)
    assert [result for result in results if not result["is_correct"]] == []


@pytest.mark.parametrize("setting", [SETTING, LLAMA_SETTING], ids=["gpt2", "llama"])
def test_plain_torch_equals_itself(setting: CheckSetting) -> None:
    assert all(check.is_correct for check in check_kernels(_RowByRow(256), setting))


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


class _Faulty(_RowByRow):
    """`fault` takes the place of the method; its first argument is the right one."""

    def __init__(self, method: str, fault: Method) -> None:
        super().__init__(256)
        setattr(self, method, partial(fault, getattr(self, method)))


def _swap_gate_and_up(right: Method, product: Product, x: Tensor, y: Tensor | None) -> Any:
    activate = product.activate
    if activate is None:
        return right(product, x, y)
    return right(replace(product, activate=lambda z: activate(z.roll(z.shape[1] // 2, 1))), x, y)


def _ignore_the_new_token(right: Method, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Any:
    table = table.clone()
    right(attention, qkv, slots, table)
    table[POSITION] = (table[POSITION] - 1).clamp(min=0)
    return right(attention, qkv, slots.clone(), table)


def _end_entries_early(right: Method, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Any:
    table = table.clone()
    table[START] = (table[START] - 1).clamp(min=0)
    return right(attention, qkv, slots, table)


def _keep_the_counter(right: Method, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Any:
    before = slots.clone()
    out = right(attention, qkv, slots, table)
    return out.zero_() if slots.equal(before) else out  # a second launch stores the same keys and values


def _read_other_keys(right: Method, attention: Attention, qkv: Tensor, slots: Tensor, table: Tensor) -> Any:
    right(attention, qkv, slots, table)
    return right(attention, qkv, slots.flip(2), table)


def _prefer_larger_ids(right: Method, logits: Tensor, table: Tensor, out: Tensor) -> None:
    right(logits.flip(1), table, out)
    out[:, 0] = logits.shape[1] - 1 - out[:, 0]
    table[ID] = logits.shape[1] - 1 - table[ID]


def _read_padding(right: Method, logits: Tensor, table: Tensor, out: Tensor) -> None:
    right(logits.as_strided((len(logits), logits.shape[1] + 1), logits.stride()), table, out)


def _ignore_top_p(right: Method, logits: Tensor, table: Tensor, out: Tensor) -> None:
    changed = table.clone()
    changed[TOP_P] = 2
    right(logits, changed, out)
    table[[ID, POSITION, *CODE, AT]] = changed[[ID, POSITION, *CODE, AT]]


def _keep_used_up_points(right: Method, logits: Tensor, table: Tensor, out: Tensor) -> None:
    changed = table.clone()
    changed[WIDTH] = 1
    right(logits, changed, out)
    out[:, 3] *= table[WIDTH]
    table[:WIDTH], table[WIDTH], table[AT] = changed[:WIDTH], table[WIDTH] * changed[WIDTH], changed[AT]


def _keep_codes(right: Method, logits: Tensor, table: Tensor, out: Tensor) -> None:
    before = table.clone()
    right(logits, table, out)
    table[CODE] = before[CODE]


def _store_at_the_next_step(right: Method, logits: Tensor, table: Tensor, out: Tensor) -> None:
    right(logits, table, out)
    out[1:] = out[:-1].clone()


def _store_no_number(right: Method, logits: Tensor, table: Tensor, out: Tensor) -> None:
    right(logits, table, out)
    out[:, 1] = float("nan")


# Faults by the method that has them, which is the name of the check that must find them.
FAULTS: dict[str, dict[str, Method]] = {
    "begin": {"wrong numbers": lambda right, *inputs: right(*inputs) + 1e-3},
    "multiply": {
        "no norm": lambda right, product, x, y: right(replace(product, norm=None), x, x if product.norm else y),
        "no residual": lambda right, product, x, y: right(replace(product, is_added=False), x, y),
        "no activation": lambda right, product, x, y: right(replace(product, activate=None), x, y),
        "depends on the batch": lambda right, product, x, y: right(product, x, y) * (1 + len(x) * 1e-7),
    },
    "attend": {
        "ignores the new token": _ignore_the_new_token,
        "stores no keys": lambda right, attention, qkv, slots, table: right(attention, qkv, slots.clone(), table),
        "ends entries early": _end_entries_early,
        "does not reset its counter": _keep_the_counter,
    },
    "draw": {
        "larger ids first": _prefer_larger_ids,
        "reads padding": _read_padding,
        "ignores top-p": _ignore_top_p,
        "keeps used-up points": _keep_used_up_points,
        "keeps codes": _keep_codes,
        "does not advance the table": lambda right, logits, table, out: right(logits, table.clone(), out),
        "stores at the next step": _store_at_the_next_step,
        "stores no number": _store_no_number,
    },
}
LLAMA_FAULTS: dict[str, dict[str, Method]] = {
    "attend": {
        "no rotation": lambda right, attention, *inputs: right(replace(attention, rotations=None), *inputs),
        "no head norms": lambda right, attention, *inputs: right(Attention(rotations=attention.rotations), *inputs),
        "reads other keys": _read_other_keys,
    },
    "multiply": {"gate and up are swapped": _swap_gate_and_up},
}


@pytest.mark.parametrize(
    ("method", "fault", "setting"),
    [
        pytest.param(method, fault, setting, id=f"{method}: {name}")
        for setting, methods in ((SETTING, FAULTS), (LLAMA_SETTING, LLAMA_FAULTS))
        for method, faults in methods.items()
        for name, fault in faults.items()
    ],
)
def test_a_faulty_kernel_is_found(method: str, fault: Method, setting: CheckSetting) -> None:
    checks = check_kernels(_Faulty(method, fault), setting)
    assert [check.name for check in checks if not check.is_correct] == [method]


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
