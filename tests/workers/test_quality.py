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

from workers.engine.gpt2 import load_model
from workers.engine.tokens import Tokenizer
from workers.quality import PAGE, choose_cpu_dtype, judge, perplexity

EMBEDDED = Path(__file__).parents[2] / "workers/embedded/checkpoint"
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


def test_a_checkpoint_that_int8_hurts_falls_back_and_is_measured_once(tmp_path: Path) -> None:
    """A few outliers a row take the scale away from all other weights."""
    hurt = tmp_path / "hurt"
    shutil.copytree(EMBEDDED, hurt)
    weights = {name: tensor.float() for name, tensor in load_file(hurt / "model.safetensors").items()}
    for name, tensor in weights.items():
        if name.endswith("c_fc.weight"):
            tensor[0] *= 3000
        if name.endswith(("ln_2.weight", "ln_2.bias")):
            tensor[0] /= 3000  # so that in fp32 it is the same model
    save_file(weights, hurt / "model.safetensors")
    verdicts = tmp_path / "verdicts"
    verdict = choose_cpu_dtype(hurt, TOKENIZER, verdicts)
    assert verdict.dtype == "bf16"
    assert verdict.ratio > 1.01
    [kept] = verdicts.iterdir()
    kept.write_text(json.dumps({"dtype": "fp32", "ratio": 7.0}))
    assert choose_cpu_dtype(hurt, TOKENIZER, verdicts).ratio == 7.0
