"""The fused products and layers in Triton's interpreter; run by test_fused_layer.py in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.workers.engine.helpers import CHECKPOINT, peaked_weights
from workers.engine.cuda.kernels.fused_layer import (
    FusedLayers,
    Product,
    Weights,
    layer_products,
    multiply,
    multiply_reference,
)
from workers.engine.cuda.kernels.launch import Launcher
from workers.engine.cuda.kernels.triton_kernels import TritonKernels
from workers.engine.cuda.step_kernels import MAX_STEPS, StepKernels, TorchKernels
from workers.engine.loader import build, read_config
from workers.engine.model.gpt2 import GPT2, SHAPES, GPT2Config, Norm, gelu_new

CPU = torch.device("cpu:0")
# Neither widths nor depths are powers of two, and a head's row is padded.
ODD = GPT2Config(vocab_size=200, n_positions=64, n_embd=96, n_layer=2, n_head=2, n_inner=384, eos_token_id=None)
CONFIGS = {**SHAPES, "embedded": read_config(CHECKPOINT), "odd": ODD}
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# The interpreter rounds to bfloat16 towards 0.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
MAX_COLUMNS = 20  # of a result; not a multiple of a block's
NUM_ROWS = 48


def products(dtype: torch.dtype) -> Iterator[Product]:
    for config in CONFIGS.values():
        for product in layer_products(config, dtype).values():
            yield replace(product, num_out=min(product.num_out, MAX_COLUMNS))


def operands(product: Product, num_rows: int) -> tuple[Tensor, Weights, Tensor | None]:
    """Random numbers around 0 and, for a norm, other means and scales."""
    generator = torch.Generator().manual_seed(product.num_in)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    depth, width, dtype = product.num_in, product.num_out, product.dtype
    x = (3 * normal(num_rows, depth) + 2).to(dtype) if product.has_norm else normal(num_rows, depth).to(dtype)
    norm = Norm((1 + 0.3 * normal(depth)).to(dtype), (0.3 * normal(depth)).to(dtype), 1e-5)
    weight = (depth**-0.5 * normal(width, depth)).to(dtype)
    bias = normal(width).to(dtype) if product.has_bias else None
    residual = normal(num_rows, width).to(dtype) if product.has_residual else None
    return x, Weights(weight, bias, norm if product.has_norm else None), residual


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    return Launcher(CPU)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_equal_their_twins(launcher: Launcher, dtype: torch.dtype) -> None:
    """With a number of rows that fills no tile; what is behind the result stays as it was."""
    for product in products(dtype):
        num_rows = 19
        x, weights, residual = operands(product, num_rows)
        expected = multiply_reference(product, x, weights, residual)
        if residual is None:
            ours = multiply(launcher, product, x, weights)
            assert ours.stride(0) == product.stride
        else:
            room = torch.cat([residual, torch.full_like(residual[:13], 7.0)])
            ours = multiply(launcher, product, x, weights, room[:num_rows])
            assert ours.equal(room[:num_rows])
            assert (room[num_rows:] == 7).all()
        tolerance = TOLERANCE[dtype]
        assert ours.dtype == (torch.float32 if product.is_float_out else dtype)
        difference = ((ours - expected).abs() / (1 + expected.abs())).max()
        assert difference <= tolerance, product


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_others(launcher: Launcher, dtype: torch.dtype) -> None:
    for product in [*products(dtype)][-5:]:  # of ODD: a depth of a part of a chunk, and of a chunk and a part
        x, weights, residual = operands(product, NUM_ROWS)
        together = multiply(launcher, product, x, weights, None if residual is None else residual.clone())
        for first, stop in [(0, 1), (7, 8), (16, 17), (47, 48), (14, 17)]:
            own = None if residual is None else residual[first:stop].clone()
            alone = multiply(launcher, product, x[first:stop], weights, own)
            assert alone.equal(together[first:stop]), (product, first)


def make_table(num_rows: int) -> Tensor:
    """Sequences of 1 to 48 tokens: some of an entry's, the others of their suffixes."""
    columns = []
    for row in range(num_rows):
        start = row * 5 % 40
        suffix = 64 * (1 + row)
        columns.append([row, start, 0, suffix - start, 1, start + row % 8, 0, 0.8, 20, 0.9, *[row / 50] * MAX_STEPS])
    return torch.tensor(columns, dtype=torch.float64).T.contiguous()


@pytest.fixture(scope="module")
def model() -> GPT2:
    return build(ODD, peaked_weights(ODD), "fp32", device="cpu:0")


@pytest.fixture(scope="module")
def layers() -> Tensor:
    """Random keys and values."""
    shape = (ODD.n_layer, 64 * (NUM_ROWS + 1), 2, ODD.n_head, ODD.head_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def run_plain(model: GPT2, kernels: StepKernels, layers: Tensor, table: Tensor) -> Tensor:
    integers, x = kernels.begin(table, model.token_embedding, model.position_embedding)
    y: Tensor | None = None
    for layer, slots in zip(model.layers, layers, strict=True):
        qkv = layer.qkv(kernels.add_norm(x, y, layer.norm_1))
        y = layer.out(kernels.attend(qkv, slots, integers))
        y = layer.down(gelu_new(layer.up(kernels.add_norm(x, y, layer.norm_2))))
    return model.head(kernels.add_norm(x, y, model.norm))


def run_fused(model: GPT2, kernels: StepKernels, layers: Tensor, table: Tensor) -> Tensor:
    fused = FusedLayers(model, kernels)
    integers, x = kernels.begin(table, model.token_embedding, model.position_embedding)
    for layer, slots in zip(model.layers, layers, strict=False):
        fused.run(layer, x, slots, integers)
    return fused.logits(x, model.norm, model.head)


def test_a_step_equals_the_plain_path(model: GPT2, layers: Tensor) -> None:
    table = make_table(5)
    kernels = TorchKernels(ODD.n_positions)
    ours, theirs = layers.clone(), layers.clone()
    expected = run_plain(model, kernels, theirs, table)
    assert len(set(expected.argmax(-1).tolist())) > 1  # the logits depend on the row
    torch.testing.assert_close(run_fused(model, kernels, ours, table), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not ours.equal(layers)


def test_a_step_has_the_same_bits_alone_and_among_others(model: GPT2, layers: Tensor) -> None:
    """From the table through a layer to the logits; a draw reads only its row."""
    kernels = TritonKernels(ODD, NUM_ROWS, CPU)
    layers = layers[:1]

    def step(first: int, stop: int) -> tuple[Tensor, Tensor]:
        own_layers, table = layers.clone(), make_table(NUM_ROWS)[:, first:stop].contiguous()
        logits = run_fused(model, kernels, own_layers, table)
        return logits, own_layers[:, 64 * (1 + first) : 64 * (1 + stop)]

    logits, slots = step(0, NUM_ROWS)
    for first, stop in [(5, 6), (15, 18)]:
        own_logits, own_slots = step(first, stop)
        assert own_logits.equal(logits[first:stop])
        assert own_slots.equal(slots[:, 64 * first : 64 * stop])
