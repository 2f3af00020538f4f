"""The fused products and layers in Triton's interpreter; run by test_fused_layer.py in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.engine.helpers import CHECKPOINT, peaked_weights
from workers.engine.cuda.forward import decode
from workers.engine.cuda.kernels.compile import Kernel
from workers.engine.cuda.kernels.fused_check import check_products, operands
from workers.engine.cuda.kernels.fused_layer import (
    FusedLayers,
    Product,
    Target,
    layer_products,
    multiply,
    multiply_reference,
)
from workers.engine.cuda.kernels.launch import Grid, Launcher
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.cuda.step_kernels import AT, MAX_STEPS, POINT, StepKernels, TorchKernels
from workers.engine.loader import build, read_config
from workers.engine.model.gpt2 import GPT2, SHAPES, GPT2Config

CPU = torch.device("cpu:0")
TARGET = Target.of(None)
# Neither widths nor depths are powers of two, and a head's row is padded.
ODD = GPT2Config(vocab_size=200, n_positions=64, n_embd=96, n_layer=2, n_head=2, n_inner=384, eos_token_id=None)
CONFIGS = {**SHAPES, "embedded": read_config(CHECKPOINT), "odd": ODD}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# The interpreter rounds to bfloat16 towards 0.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
MAX_COLUMNS = 20  # of a result; not a multiple of a block's
NUM_ROWS = 48


def products(dtype: torch.dtype) -> Iterator[Product]:
    """All of ODD; of the others up, which is qkv with a GELU, and those without a norm."""
    for config in CONFIGS.values():
        for name, product in layer_products(config, dtype).items():
            if config is ODD or name in ("out", "up", "down"):
                yield replace(product, num_out=min(product.num_out, MAX_COLUMNS))


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_equal_their_twins(launcher: Launcher, dtype: torch.dtype) -> None:
    """With a number of rows that fills no tile; what is behind the result stays as it was."""
    for product in products(dtype):
        num_rows = 19
        x, weights, residual = operands(product, num_rows, CPU)
        expected = multiply_reference(product, x, weights, residual)
        if residual is None:
            ours = multiply(launcher, product, x, weights, target=TARGET)
            assert ours.stride(0) == product.stride
        else:
            room = torch.cat([residual, torch.full_like(residual[:13], 7.0)])
            ours = multiply(launcher, product, x, weights, room[:num_rows], target=TARGET)
            assert ours.equal(room[:num_rows])
            assert (room[num_rows:] == 7).all()
        assert ours.dtype == (torch.float32 if product.is_float_out else dtype)
        difference = ((ours - expected).abs() / (1 + expected.abs())).max()
        assert difference <= TOLERANCE[dtype], product


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_finds_products_correct_and_equal_alone_and_among_others(
    launcher: Launcher, dtype: torch.dtype
) -> None:
    """Depths of a part of a chunk, and of a chunk and a part."""
    kinds = {name: replace(one, num_out=MAX_COLUMNS) for name, one in layer_products(ODD, dtype).items()}
    for check in check_products(kinds, launcher, TARGET, CPU):
        assert check.is_correct, check


class FaultyLauncher(Launcher):
    """Changes the weights' first column, for batches of the given sizes."""

    def __init__(self, sizes: range) -> None:
        super().__init__(CPU)
        self._sizes = sizes

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Any, **constants: Any) -> None:
        x, gain, shift, weight, *others = arguments
        if len(x) in self._sizes:
            weight = weight.clone()
            weight[:, 0] += 1e-3
        super().launch(kernel, grid, x, gain, shift, weight, *others, **constants)


def test_the_check_finds_faults() -> None:
    kinds = {"up": replace(layer_products(ODD, torch.float32)["up"], num_out=8)}
    (wrong,) = check_products(kinds, FaultyLauncher(range(100)), TARGET, CPU)
    assert not wrong.is_correct
    assert not wrong.faults
    (unequal,) = check_products(kinds, FaultyLauncher(range(3, 4)), TARGET, CPU)
    assert unequal.difference <= unequal.bound
    assert [fault.partition(" have")[0] for fault in unequal.faults] == ["rows 4 to 6", "rows 14 to 16"]


def make_table(num_rows: int) -> Tensor:
    """Sequences of 1 to 48 tokens: some of an entry's, the others of their suffixes."""
    columns = []
    for row in range(num_rows):
        start = row * 5 % 40
        suffix = 64 * (1 + row)
        draw = (0.8, 20, 0.9, row / 50, 1, 0)
        columns.append([row, start, 0, suffix - start, 1, start + row % 8, *draw, *[0.5] * MAX_STEPS])
    return torch.tensor(columns, dtype=torch.float64).T.contiguous()


@pytest.fixture(scope="module")
def model() -> GPT2:
    return build(ODD, peaked_weights(ODD), "fp32", device="cpu:0")


@pytest.fixture(scope="module")
def layers() -> Tensor:
    """Random keys and values."""
    shape = (ODD.n_layer, 64 * (NUM_ROWS + 1), 2, ODD.n_head, ODD.head_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def run(model: GPT2, kernels: StepKernels, layers: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return decode(model, layers, table, kernels, FusedLayers(model, kernels))


def test_a_step_equals_the_plain_path(model: GPT2, layers: Tensor) -> None:
    kernels = TorchKernels(ODD.n_positions)
    ours, theirs = layers.clone(), layers.clone()
    table, other_table = make_table(5), make_table(5)
    logits, tokens = run(model, kernels, ours, table)
    expected, expected_tokens = decode(model, theirs, other_table, kernels)
    assert len(set(expected.argmax(-1).tolist())) > 1  # the logits depend on the row
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(tokens, expected_tokens, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    # The code of the next draw depends on the logits' last bits; the rest is counted.
    torch.testing.assert_close(table[POINT:AT], other_table[POINT:AT], rtol=1e-4, atol=1e-4)
    assert table[:POINT].equal(other_table[:POINT])
    assert table[AT:].equal(other_table[AT:])
    assert not ours.equal(layers)


class QuickDraw(TritonKernels):
    """Without the sort of all logits, which takes the interpreter minutes; a draw reads only its row."""

    def draw(self, logits: Tensor, table: Tensor) -> Tensor:
        return logits


def test_a_step_has_the_same_bits_alone_and_among_others(model: GPT2, layers: Tensor) -> None:
    kernels = QuickDraw(ODD, NUM_ROWS, CPU)
    shallow = replace(model, layers=model.layers[:1])

    def step(first: int, stop: int) -> tuple[Tensor, Tensor]:
        own_layers, table = layers[:1].clone(), make_table(NUM_ROWS)[:, first:stop].contiguous()
        logits, _ = run(shallow, kernels, own_layers, table)
        return logits, own_layers[:, 64 * (1 + first) : 64 * (1 + stop)]

    logits, slots = step(0, NUM_ROWS)
    for first, stop in [(5, 6), (15, 18)]:
        own_logits, own_slots = step(first, stop)
        assert own_logits.equal(logits[first:stop])
        assert own_slots.equal(slots[:, 64 * first : 64 * stop])
