"""int8 is served where it holds; where it does not, the checkpoint falls back and the verdict is remembered."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from workers.checkpoints.int8_check import PAGE, choose_cpu_dtype, judge, perplexity
from workers.engine.cpu.linear import LinearMaker
from workers.engine.model.gpt2 import Norm
from workers.engine.model.loader import load_model, smooth_quant
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


def test_the_embedded_checkpoint_holds_in_int8_within_one_percent() -> None:
    verdict = judge(lambda dtype: load_model(EMBEDDED, dtype=dtype), TOKENIZER)
    assert verdict.dtype == "int8"
    assert 0.99 < verdict.ratio < 1.01


def test_balanced_channels_give_the_same_product_in_smaller_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    gain, bias, weight = torch.ones(256), torch.zeros(256), torch.randn(64, 256, generator=generator)
    gain[:3] = torch.tensor([40.0, 0.0, 1e-4])  # a large channel, one that says nothing, and a faint one
    weight[:, 3] = 0  # one that nobody listens to
    x = torch.randn(32, 256, generator=generator)
    norm = Norm(gain, bias, 1e-5)
    expected = norm(x) @ weight.T
    new_norm, new_weight = smooth_quant(norm, weight)
    torch.testing.assert_close(new_norm(x) @ new_weight.T, expected, rtol=1e-4, atol=1e-4)

    def error(norm: Norm, weight: torch.Tensor) -> float:
        linear = LinearMaker("int8")(weight.contiguous(), None)
        return float((linear(norm(x)) - expected).norm() / expected.norm())

    assert error(new_norm, new_weight) < error(norm, weight) / 2


def test_a_checkpoint_that_int8_hurts_falls_back_and_is_measured_once(tmp_path: Path) -> None:
    """A few outliers a row take the scale away from all other weights."""
    hurt = tmp_path / "hurt"
    shutil.copytree(EMBEDDED, hurt)
    weights = {name: tensor.float() for name, tensor in load_file(hurt / "model.safetensors").items()}
    for name, tensor in weights.items():
        if name.endswith("attn.c_proj.weight"):
            tensor[0] *= 3000
        if name.endswith(("c_attn.weight", "c_attn.bias")):
            tensor[..., 2 * 256] /= 3000  # the first value, so that in fp32 it is the same model
    save_file(weights, hurt / "model.safetensors")
    verdicts = tmp_path / "verdicts"
    verdict = choose_cpu_dtype(hurt, TOKENIZER, verdicts)
    assert verdict.dtype == "bf16"
    assert verdict.ratio > 1.01
    [kept] = verdicts.iterdir()
    kept.write_text(json.dumps({"dtype": "fp32", "ratio": 7.0}))
    assert choose_cpu_dtype(hurt, TOKENIZER, verdicts).ratio == 7.0
