"""int8 where a checkpoint keeps its quality in it, else bf16; the result is cached."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from workers.checkpoints.int8_check import PAGE, check_int8, choose_cpu_dtype, perplexity
from workers.engine.cpu.linear import LinearMaker
from workers.engine.loader import load_model, smooth_quant
from workers.engine.model.gpt2 import Norm
from workers.text.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parents[3] / "workers/checkpoints/embedded"
TOKENIZER = Tokenizer.from_directory(EMBEDDED, 8192)


def test_perplexity_is_that_of_transformers() -> None:
    ids = TOKENIZER.encode(PAGE.read_text(encoding="utf-8"))[:512]
    model = GPT2LMHeadModel.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    with torch.inference_mode():
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    ours = perplexity(load_model(EMBEDDED, dtype="fp32"), ids)
    assert ours == pytest.approx(math.exp(float(loss)), rel=1e-4)


def test_the_embedded_checkpoint_keeps_its_perplexity_in_int8_within_one_percent() -> None:
    check = check_int8(lambda dtype: load_model(EMBEDDED, dtype=dtype), TOKENIZER)
    assert check.dtype == "int8"
    assert 0.99 < check.ratio < 1.01


def test_smoothquant_keeps_the_product_and_lowers_the_int8_error() -> None:
    generator = torch.Generator().manual_seed(0)
    gain, bias, weight = torch.ones(256), torch.zeros(256), torch.randn(64, 256, generator=generator)
    gain[:3] = torch.tensor([40.0, 0.0, 1e-4])  # a large channel, a constant one, and a small one
    weight[:, 3] = 0  # an unused channel
    x = torch.randn(32, 256, generator=generator)
    norm = Norm(gain, bias, 1e-5)
    expected = norm(x) @ weight.T
    new_norm, new_weight = smooth_quant(norm, weight)
    torch.testing.assert_close(new_norm(x) @ new_weight.T, expected, rtol=1e-4, atol=1e-4)

    def error(norm: Norm, weight: torch.Tensor) -> float:
        linear = LinearMaker("int8")(weight.contiguous(), None)
        return float((linear(norm(x)) - expected).norm() / expected.norm())

    assert error(new_norm, new_weight) < error(norm, weight) / 2


def test_a_checkpoint_that_loses_quality_in_int8_is_served_in_bf16_and_measured_once(tmp_path: Path) -> None:
    """Outlier weights raise each row's scale, so all other weights of the row lose precision."""
    spoiled = tmp_path / "spoiled"
    shutil.copytree(EMBEDDED, spoiled)
    weights = {name: tensor.float() for name, tensor in load_file(spoiled / "model.safetensors").items()}
    for name, tensor in weights.items():
        if name.endswith("attn.c_proj.weight"):
            tensor[0] *= 3000
        if name.endswith(("c_attn.weight", "c_attn.bias")):
            tensor[..., 2 * 256] /= 3000  # the first value, so that in fp32 it is the same model
    save_file(weights, spoiled / "model.safetensors")
    cache = tmp_path / "cache"
    check = choose_cpu_dtype(spoiled, TOKENIZER, cache)
    assert check.dtype == "bf16"
    assert check.ratio > 1.01
    [kept] = cache.iterdir()
    kept.write_text(json.dumps({"dtype": "fp32", "ratio": 7.0}))
    assert choose_cpu_dtype(spoiled, TOKENIZER, cache).ratio == 7.0
