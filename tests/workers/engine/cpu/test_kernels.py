"""The CPU backend as a whole against transformers, and that neither threads nor programs change a bit."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config as TheirConfig
from transformers import GPT2LMHeadModel

from tests.workers.engine.helpers import TINY, generate, peaked_weights, running_engine
from workers.engine.cpu import forward, kernels
from workers.engine.cpu.kernels import HAS_AMX, HAS_DOT_PRODUCTS, KernelCall, Program, ThreadTeam
from workers.engine.cpu.layouts import ACTIVATIONS, LAYER, STEP, UINT8
from workers.engine.cpu.linear import HugePages, PackedInt8Linear, prepare
from workers.engine.loader import LoadedModel, build
from workers.engine.model.gpt2 import GPT2Config
from workers.engine.request import SamplingParams

PROMPT = [*range(7, 300, 3)]
TOLERANCE = {"fp32": 1e-5, "int8": 0.1}  # of log-probabilities
needs_amx = pytest.mark.skipif(not HAS_AMX, reason="this CPU has no AMX for 8-bit integers")


def theirs(config: GPT2Config, weights: dict[str, torch.Tensor]) -> GPT2LMHeadModel:
    model = GPT2LMHeadModel(
        TheirConfig(
            vocab_size=config.vocab_size,
            n_positions=config.n_positions,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            n_inner=config.n_inner,
            activation_function=config.activation_function,
        )
    ).eval()
    model.transformer.load_state_dict(weights)
    return model


def check_logprobs(config: GPT2Config, dtype: str, weights: dict[str, torch.Tensor] | None = None) -> None:
    """A prompt's log-probabilities, computed in chunks of rows and after a decode step, are transformers'."""
    weights = weights or peaked_weights(config, seed=5)
    with running_engine(LoadedModel(build(config, weights, dtype), "cpu", dtype)) as engine:
        text = generate(engine, PROMPT, SamplingParams(40, temperature=0))
        ids = [*PROMPT, *text.token_ids]
        echoed = generate(engine, ids, SamplingParams(1), echo_logprobs=True)
    with torch.inference_mode():
        logprobs = theirs(config, weights)(torch.tensor([ids])).logits[0].log_softmax(-1)
    reference = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    assert list(echoed.prompt_logprobs[1:]) == pytest.approx(reference, abs=TOLERANCE[dtype])
    assert list(text.logprobs) == pytest.approx(reference[-40:], abs=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu", "silu", "tanh"])
def test_every_activation_is_transformers(activation: str, dtype: str) -> None:
    check_logprobs(replace(TINY, activation_function=activation), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "head_size"), [(2, 8), (3, 16), (1, 24), (2, 48), (5, 20), (1, 144)])
def test_any_head_size_is_served(heads: int, head_size: int, dtype: str) -> None:
    """A value's width, the one behind it and the padding depend on it, and so do a row's last lanes."""
    width = heads * head_size
    check_logprobs(replace(TINY, n_embd=width, n_head=heads, n_inner=4 * width), dtype)


def test_keys_beyond_float16_are_stored_as_its_largest_number() -> None:
    """All keys have the same number there, so attention does not depend on it, unless it becomes infinite."""
    weights = peaked_weights(TINY, seed=5)
    weights["h.0.attn.c_attn.weight"][:, TINY.n_embd] = 0
    weights["h.0.attn.c_attn.bias"][TINY.n_embd] = 1e5
    check_logprobs(TINY, "int8", weights)


@pytest.mark.skipif(not HAS_DOT_PRODUCTS, reason="this CPU has no AVX-512 VNNI, so the kernel does not exist")
@pytest.mark.parametrize("can_use_amx", [False, pytest.param(True, marks=needs_amx)])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 4), (100, 64), (768, 3072), (8200, 256)])
def test_packed_products_are_exact(outputs: int, inputs: int, can_use_amx: bool) -> None:
    """To the bit, for any number of rows; 100 outputs are two blocks that overlap."""
    rng = np.random.default_rng(3)
    weight = rng.integers(-127, 128, (outputs, inputs), np.int8)
    scales = np.abs(rng.standard_normal(outputs, np.float32))
    x = rng.integers(0, 256, (100, inputs), np.uint8)
    product = PackedInt8Linear.pack(
        torch.from_numpy(weight), torch.from_numpy(scales), HugePages(), can_use_amx=can_use_amx
    )
    sums = (x.astype(np.int64) - 128) @ weight.astype(np.int64).T
    expected = sums.astype(np.float32) * (scales * np.float32(1 / 127))
    for num_rows in (*range(1, 10), 15, 16, 17, 31, 32, 33, 48, 49, 64, 100):
        assert np.array_equal(product(torch.from_numpy(x[:num_rows])).numpy(), expected[:num_rows])


@pytest.mark.parametrize("activation", ["relu", "tanh"])  # without and with negative numbers
def test_activated_rows_are_rounded_to_uint8_exactly(activation: str) -> None:
    """To the bit: the scale is max |x|, zero is 128, ties go to even."""
    rng = np.random.default_rng(3)
    inner = 100_001  # enough for some ties
    product, bias = 3 * rng.standard_normal((5, inner), np.float32), rng.standard_normal(inner, np.float32)
    scales = np.array([1, 0.5, 2, 0.25, 4], np.float32)
    product[4] = -bias / 4  # a row of zeros has a scale, too
    activated = product * scales[:, None] + bias
    prepared = np.zeros(product.shape, np.uint8)
    step, layer = np.zeros(1, STEP), np.zeros(1, LAYER)
    step["num_rows"], step["inner"] = product.shape
    step["mode"], step["activation"] = UINT8, ACTIVATIONS[activation]
    step["prepared_at"], step["scales_at"] = prepared.ctypes.data, scales.ctypes.data
    layer["up_bias_at"] = bias.ctypes.data
    ThreadTeam(1).run(KernelCall(kernels.activate, step.ctypes.data, layer.ctypes.data, product.ctypes.data), False)
    if activation == "relu":
        assert np.array_equal(product, np.maximum(activated, 0))
    largest = np.maximum(np.abs(product).max(1, keepdims=True), np.finfo(np.float32).tiny)
    levels = np.rint((np.float64(product / largest) * 127 + 128).astype(np.float32))
    assert np.array_equal(scales, largest[:, 0])
    assert np.array_equal(prepared, levels)
    assert np.array_equal(prepare(torch.from_numpy(product), UINT8)[0].numpy(), levels)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_threads_change_no_text(tiny_of: dict[str, LoadedModel], dtype: str) -> None:
    texts = []
    for num_threads in (1, 2):
        with running_engine(tiny_of[dtype], num_threads=num_threads) as engine:
            alone = generate(engine, PROMPT, SamplingParams(30), seed=3)
            long = generate(engine, PROMPT * 5, SamplingParams(30), seed=4)
            texts.append((alone.token_ids, long.token_ids, alone.logprobs, long.logprobs))
    assert texts[0] == texts[1]


@pytest.mark.skipif(not HAS_DOT_PRODUCTS, reason="this CPU has no AVX-512 VNNI, so there is no program")
def test_a_program_gives_the_bits_of_single_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed products in one call, on any number of threads, and torch's own products between single kernels."""
    config = replace(TINY, n_embd=128, n_head=2, n_inner=512)
    packed = LoadedModel(build(config, peaked_weights(config), "int8"), "cpu", "int8")
    monkeypatch.setattr(kernels, "HAS_DOT_PRODUCTS", False)
    unpacked = LoadedModel(build(config, peaked_weights(config), "int8"), "cpu", "int8")

    def texts(model: LoadedModel, num_threads: int = 2) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        with running_engine(model, num_threads=num_threads) as engine:
            ends = [generate(engine, PROMPT[:length], SamplingParams(20), seed=length) for length in (1, 2, 9, 98)]
        return [(end.token_ids, end.logprobs) for end in ends]

    num_steps = 0

    def count(self: Program, num_rows: int, num_entries: int, *args: Any, **more: Any) -> int:
        nonlocal num_steps
        num_steps += more.get("num_times", 1) if num_entries > 1 else 0
        return run(self, num_rows, num_entries, *args, **more)

    run = Program.run
    monkeypatch.setattr(Program, "run", count)
    monkeypatch.setattr(forward, "MIN_SHARED_SIZE_IN_PROGRAM", 1 << 40)
    on_one_thread = texts(packed)
    monkeypatch.setattr(forward, "MIN_SHARED_SIZE", 0)
    monkeypatch.setattr(forward, "MIN_SHARED_SIZE_IN_PROGRAM", 0)
    on_all = texts(packed)
    on_more_than_there_are = texts(packed, 2 * (os.cpu_count() or 1) + 1)  # some wait long, and sleep
    assert (num_before := num_steps) >= 2 * 4 * 20
    one_by_one = texts(unpacked)
    assert num_steps == num_before
    assert on_one_thread == on_all == on_more_than_there_are == one_by_one
