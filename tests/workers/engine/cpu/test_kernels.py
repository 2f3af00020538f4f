"""The CPU backend as a whole against transformers, and that nothing changes a bit: threads, programs, instruction sets.

Every test of kernels runs with those of each instruction set that this CPU has.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

from shared import cpu_features
from tests.workers.engine.helpers import TINY, generate, peaked_weights, running_engine
from workers.engine import cpu_kernels
from workers.engine.cpu import forward
from workers.engine.cpu.kernel_source.build import build as build_kernels
from workers.engine.cpu.layouts import (
    ACTIVATIONS,
    INT8,
    LAYER,
    LAYER_NORM,
    NORM,
    PLAIN,
    RMS_NORM,
    ROW,
    ROW_TILE,
    STEP,
    TILE,
    VECTOR,
)
from workers.engine.cpu.linear import HugePages, PackedInt8Linear
from workers.engine.cpu.team import KernelCall, ThreadTeam
from workers.engine.cpu_kernels import Kernels, load_kernels
from workers.engine.failures import LoadFailure
from workers.engine.loader import LoadedModel, build
from workers.engine.model.config import ModelConfig
from workers.engine.request import SamplingParams

PROMPT = [*range(7, 300, 3)]
TOLERANCE = {"fp32": 1e-5, "int8": 0.1}  # of log-probabilities
SETS = [found.name for found in cpu_features.read().instruction_sets]
needs_amx = pytest.mark.skipif(not load_kernels().has_amx, reason="this CPU has no AMX for 8-bit integers")


@pytest.fixture(params=SETS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param)


def theirs(config: ModelConfig, weights: dict[str, torch.Tensor]) -> GPT2LMHeadModel:
    names = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "activation_function")
    model = GPT2LMHeadModel(TheirConfig(**{name: getattr(config, name) for name in names})).eval()
    model.transformer.load_state_dict(weights)
    return model


def load(config: ModelConfig, dtype: str, kernels: Kernels, weights: dict[str, torch.Tensor]) -> LoadedModel:
    return LoadedModel(build(config, weights, dtype, kernels=kernels), "cpu", dtype, kernels=kernels)


def check_logprobs(config: ModelConfig, dtype: str, weights: dict[str, torch.Tensor] | None = None) -> None:
    """A prompt's log-probabilities, computed in chunks of rows and after a decode step, are transformers', and have the
    same bits on every instruction set; so has a sampled text."""
    weights = weights or peaked_weights(config, seed=5)
    found = []
    for name in SETS:
        with running_engine(load(config, dtype, load_kernels(name), weights)) as engine:
            text = generate(engine, PROMPT, SamplingParams(40, temperature=0))
            ids = [*PROMPT, *text.token_ids]
            echoed = generate(engine, ids, SamplingParams(1), echo_logprobs=True)
            sampled = generate(engine, PROMPT * 5, SamplingParams(30), seed=4)
        found.append((text.logprobs, echoed.prompt_logprobs, sampled.token_ids, sampled.logprobs))
    assert all(other == found[0] for other in found)
    with torch.inference_mode():
        logprobs = theirs(config, weights)(torch.tensor([ids])).logits[0].log_softmax(-1)
    reference = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    assert list(echoed.prompt_logprobs[1:]) == pytest.approx(reference, abs=TOLERANCE[dtype])
    assert list(text.logprobs) == pytest.approx(reference[-40:], abs=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "head_size", "inner", "activation"),
    [
        (2, 8, 64, "gelu_new"),
        (3, 16, 192, "gelu"),
        (1, 24, 96, "relu"),
        (2, 48, 384, "silu"),
        (5, 24, 500, "tanh"),
        (1, 144, 576, "gelu_new"),
        (3, 7, 84, "gelu"),
        (5, 20, 403, "tanh"),
    ],
)
def test_every_activation_and_any_head_size_is_transformers(
    heads: int, head_size: int, inner: int, activation: str, dtype: str
) -> None:
    """A value's width, the one behind it and the padding depend on the size, and so do a row's last lanes."""
    sized = replace(TINY, n_embd=heads * head_size, n_head=heads, n_inner=inner)
    check_logprobs(replace(sized, activation_function=activation), dtype)


def test_keys_beyond_float16_are_stored_as_its_largest_number() -> None:
    """All keys have the same number there, so attention does not depend on it, unless it becomes infinite."""
    weights = peaked_weights(TINY, seed=5)
    weights["h.0.attn.c_attn.weight"][:, TINY.n_embd] = 0
    weights["h.0.attn.c_attn.bias"][TINY.n_embd] = 1e5
    check_logprobs(TINY, "int8", weights)


@pytest.mark.parametrize("can_use_amx", [False, pytest.param(True, marks=needs_amx)])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 4), (100, 64), (5, 6), (768, 3072), (8200, 256)])
def test_packed_products_are_exact(outputs: int, inputs: int, can_use_amx: bool, kernels: Kernels) -> None:
    """To the bit, for any number of rows, whatever is left of the last block of outputs and the last four inputs."""
    rng = np.random.default_rng(3)
    weight = rng.integers(-127, 128, (outputs, inputs), np.int8)
    weight[:, :8] = 127
    scales = np.abs(rng.standard_normal(outputs, np.float32))
    x = rng.integers(-127, 128, (100, -(-inputs // 4) * 4), np.int16)  # what is behind the inputs does not count
    x[0], x[1] = 127, -127
    product = PackedInt8Linear.pack(
        torch.from_numpy(weight), torch.from_numpy(scales), HugePages(), kernels, can_use_amx=can_use_amx
    )
    sums = x[:, :inputs].astype(np.int64) @ weight.astype(np.int64).T
    expected = sums.astype(np.float32) * (scales * np.float32(1 / 127))
    x8 = (x + kernels.zero_point).astype(np.uint8)
    for num_rows in (*range(1, 34), 48, 49, 64, 100):
        assert np.array_equal(product(torch.from_numpy(x8[:num_rows])).numpy(), expected[:num_rows])


@pytest.mark.skipif("avx512_vnni" not in SETS, reason="needs a CPU with AVX-512 VNNI")
def test_products_by_tiles_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """amx.h, with tiles.h in place of the instructions."""
    found = load_kernels("avx512_vnni").instruction_set
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(cpu_kernels, "COMPILED", tmp_path)
    header = Path(__file__).with_name("tiles.h")
    library = ctypes.CDLL(str(build_kernels(found, tmp_path, sys.platform, ["-include", str(header)])))
    kernels = replace(cpu_kernels._load.__wrapped__(found, has_amx=False), has_amx=True)
    for outputs, inputs in ((64, 64), (100, 128), (192, 640)):
        test_packed_products_are_exact(outputs, inputs, True, kernels)
    assert ctypes.c_int64.in_dll(library, "num_tile_products").value > 0
    assert ctypes.c_int64.in_dll(library, "num_tile_faults").value == 0


@pytest.mark.parametrize("activation", ["relu", "tanh"])  # without and with negative numbers
def test_activated_rows_are_rounded_to_8_bits_exactly(activation: str, kernels: Kernels) -> None:
    """To the bit: the scale is max |x|, ties of level + 128 go to even."""
    rng = np.random.default_rng(3)
    inner = 100_002  # enough for some ties; the rows of levels are padded
    product, bias = 3 * rng.standard_normal((5, inner), np.float32), rng.standard_normal(inner, np.float32)
    scales = np.array([1, 0.5, 2, 0.25, 4], np.float32)
    product[4] = -bias / 4  # a row of zeros has a scale, too
    activated = product * scales[:, None] + bias
    prepared = np.zeros((5, inner + 2), np.uint8)
    step, layer = np.zeros(1, STEP), np.zeros(1, LAYER)
    step["num_rows"], step["inner"] = product.shape
    step["mode"], step["activation"] = INT8, ACTIVATIONS[activation]
    step["prepared_at"], step["scales_at"] = prepared.ctypes.data, scales.ctypes.data
    layer["up_bias_at"] = bias.ctypes.data
    run(kernels, kernels.activate, step, layer, product)
    if activation == "relu":
        assert np.array_equal(product, np.maximum(activated, 0))
    largest = np.maximum(np.abs(product).max(1, keepdims=True), np.finfo(np.float32).tiny)
    levels = np.rint((np.float64(product / largest) * 127 + 128).astype(np.float32))
    assert np.array_equal(scales, largest[:, 0])
    assert np.array_equal(prepared[:, :inner], (levels - 128 + kernels.zero_point).astype(np.uint8))


def run(kernels: Kernels, kernel: int, step: np.ndarray, layer: np.ndarray, product: np.ndarray) -> None:
    ThreadTeam(kernels, 1).run(KernelCall(kernel, step.ctypes.data, layer.ctypes.data, product.ctypes.data), False)


@pytest.mark.parametrize("kind", [LAYER_NORM, RMS_NORM])
@pytest.mark.parametrize("has_biases", [False, True])
def test_both_kinds_of_norm_follow_their_formula(kind: int, has_biases: bool, kernels: Kernels) -> None:
    rng = np.random.default_rng(3)
    width = 200
    x, product = rng.standard_normal((2, 3, width), np.float32)
    weight, bias, bias_in = rng.standard_normal((3, width), np.float32)
    scales = np.array([1, 0.5, 2], np.float32)
    step, norm, new_scales = np.zeros(1, STEP), np.zeros(1, NORM), np.zeros(3, np.float32)
    prepared, stream, scratch = np.zeros((3, width), np.float32), x.copy(), np.zeros(width + VECTOR, np.float32)
    step["num_rows"], step["width"], step["mode"], step["norm"], step["epsilon"] = 3, width, PLAIN, kind, 1e-5
    step["stream_at"], step["prepared_at"] = stream.ctypes.data, prepared.ctypes.data
    step["scales_in_at"], step["scales_at"] = scales.ctypes.data, new_scales.ctypes.data
    step["scratch_at"], norm["weight_at"] = scratch.ctypes.data, weight.ctypes.data
    if has_biases:
        norm["bias_in_at"], norm["bias_at"] = bias_in.ctypes.data, bias.ctypes.data
    run(kernels, kernels.add_and_norm, step, norm, product)
    added = x + product * scales[:, None] + has_biases * bias_in
    centred = added - added.mean(1, keepdims=True) if kind == LAYER_NORM else added
    expected = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * weight + has_biases * bias
    np.testing.assert_allclose(stream, added, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(prepared, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("item", [np.float32, np.float16])
def test_query_heads_share_keys_and_values(heads: int, kv_heads: int, item: type, kernels: Kernels) -> None:
    """Attention of five prompt tokens over themselves, with heads wider together than the residual stream."""
    rng = np.random.default_rng(3)
    rows, size, blocks, value_width = 5, 24, 1, 32
    qkv = rng.standard_normal((rows, heads + 2 * kv_heads, size), np.float32)
    step, layer = np.zeros(1, STEP), np.zeros(1, LAYER)
    table, tiles = np.zeros(rows, ROW), np.zeros(2, ROW_TILE)
    table["entry"], table["num_in_entry"], table["suffix"] = 0, np.arange(1, rows + 1), -1
    tiles["num_rows"], tiles["rows"] = (TILE, rows - TILE), ((0, 1, 2, 3), (4, 0, 0, 0))
    keys: np.ndarray = np.zeros((kv_heads, blocks, size, VECTOR), item)
    values: np.ndarray = np.zeros((kv_heads, blocks * VECTOR, value_width), item)
    query, mean, prepared = np.zeros((3, rows, heads * size), np.float32)
    scratch, scales, done = np.zeros(10_000, np.float32), np.ones(rows, np.float32), np.zeros(2, np.int64)
    step["num_rows"], step["num_tiles"], step["mode"], step["item_bytes"] = rows, 2, PLAIN, keys.itemsize
    step["num_heads"], step["num_kv_heads"], step["head_size"], step["score_stride"] = heads, kv_heads, size, 64
    step["entry_key_bytes"], step["entry_value_bytes"] = keys.nbytes, values.nbytes
    layer["entry_keys_at"], layer["entry_values_at"] = keys.ctypes.data, values.ctypes.data
    arrays: tuple[np.ndarray, ...] = query, mean, prepared, scratch, scales, table, tiles, done
    names = "query", "mean", "prepared", "scratch", "scales", "rows", "tiles", "heads_done"
    for name, array in zip(names, arrays, strict=True):
        step[f"{name}_at"] = array.ctypes.data
    run(kernels, kernels.store_kv, step, layer, qkv.copy())
    run(kernels, kernels.attend, step, layer, qkv)
    kept = qkv[:, heads:].astype(item).astype(np.float32)
    for row in range(rows):
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = kept[: row + 1, shared] @ qkv[row, head]
            weights = np.exp(scores - scores.max())
            expected = weights @ kept[: row + 1, kv_heads + shared] / weights.sum()
            np.testing.assert_allclose(mean.reshape(rows, heads, size)[row, head], expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(prepared, mean)


def test_float16_is_rounded_as_numpy_rounds_it(kernels: Kernels) -> None:
    """Ties, subnormal numbers and what lies beyond, by way of a cached key and value."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)].astype(np.float32)
    between = np.sort(halves)
    numbers = np.concatenate(
        [halves, (between[1:] + between[:-1]) / 2, np.array([7e4, -1e30, 1e-10, -3e-8], np.float32)]
    )
    size = 1024
    numbers = np.resize(numbers, -(-len(numbers) // size) * size).reshape(-1, size)
    for row in numbers:
        qkv, scales, query = np.stack([row, row, row]), np.ones(1, np.float32), np.zeros(size, np.float32)
        keys, values = np.zeros((size, VECTOR), np.float16), np.zeros((VECTOR, size), np.float16)
        step, layer, table = np.zeros(1, STEP), np.zeros(1, LAYER), np.zeros(1, ROW)
        table["num_in_entry"], table["suffix"] = 1, -1
        step["num_rows"] = step["num_heads"] = step["num_kv_heads"] = 1
        step["head_size"], step["item_bytes"], step["rows_at"] = size, 2, table.ctypes.data
        step["scales_at"], step["query_at"] = scales.ctypes.data, query.ctypes.data
        layer["entry_keys_at"], layer["entry_values_at"] = keys.ctypes.data, values.ctypes.data
        run(kernels, kernels.store_kv, step, layer, qkv)
        expected = np.clip(row + np.float32(0), -65504, 65504).astype(np.float16)
        assert np.array_equal(keys[:, 0].view(np.uint16), expected.view(np.uint16))
        assert np.array_equal(values[0].view(np.uint16), expected.view(np.uint16))


def texts(model: LoadedModel, num_threads: int = 2) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    with running_engine(model, num_threads=num_threads) as engine:
        ends = [generate(engine, PROMPT[:length], SamplingParams(20), seed=length) for length in (1, 2, 9, 98)]
        ends.append(generate(engine, PROMPT * 5, SamplingParams(30), seed=4))
    return [(end.token_ids, end.logprobs) for end in ends]


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_threads_change_no_text(tiny_of: dict[str, LoadedModel], dtype: str) -> None:
    assert texts(tiny_of[dtype], 1) == texts(tiny_of[dtype], 2)


def test_a_program_gives_the_same_bits_on_any_number_of_threads(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, n_embd=128, n_head=2, n_inner=512)
    model = load(config, "int8", kernels, peaked_weights(config))
    monkeypatch.setattr(forward, "MIN_SHARED_SIZE_IN_PROGRAM", 1 << 40)
    on_one_thread = texts(model)
    monkeypatch.setattr(forward, "MIN_SHARED_SIZE_IN_PROGRAM", 0)
    on_all = texts(model)
    on_more_than_there_are = texts(model, 2 * (os.cpu_count() or 1) + 1)  # some wait long, and sleep
    assert on_one_thread == on_all == on_more_than_there_are


def test_an_instruction_set_that_the_cpu_lacks_is_refused() -> None:
    with pytest.raises(LoadFailure, match="cannot run kernels for neon_of_tomorrow"):
        load_kernels("neon_of_tomorrow")
