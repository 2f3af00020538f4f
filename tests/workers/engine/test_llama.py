"""Llama's family: transformers' greedy text in fp32 for every variant, and what int8 changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from shared import cpu_features
from tests.workers.engine.helpers import assert_greedy, generate, random_ids, results, running_engine
from workers.engine.cpu_kernels import load_kernels
from workers.engine.loader import LoadedModel, build
from workers.engine.model.config import ModelConfig
from workers.engine.model.hadamard import rotate
from workers.engine.request import EngineRequest, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 640,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
VARIANTS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "own head and biases": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "llama3 positions": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3)),
    "linear positions": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_scaling={"rope_type": "linear", "factor": 2.0})),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32)),
}


def make(variant: str) -> tuple[Any, ModelConfig, dict[str, torch.Tensor]]:
    """transformers' model with random weights, biases and norms; its configuration and weights for ours."""
    theirs, config = VARIANTS[variant]
    torch.manual_seed(0)
    model = theirs(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    weights = {name.removeprefix("model."): tensor.detach() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return model, ModelConfig.from_json(config.to_dict()), weights


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [random_ids(rng, length, SHAPE["vocab_size"]) for length in (1, 5, 40, 300)]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="CPU path"),
        pytest.param("cpu:0", id="GPU path on a CPU"),
        pytest.param("cuda", id="GPU", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_continues_as_transformers_does(variant: str, device: str) -> None:
    model, config, weights = make(variant)
    loaded = LoadedModel(build(config, weights, "fp32", device=device), device, "fp32")
    with running_engine(loaded, max_batch=4) as engine:
        params = SamplingParams(20, temperature=0)
        ours = results(engine, [EngineRequest(tuple(prompt), params, 0) for prompt in prompts()])
    for prompt, output in zip(prompts(), ours, strict=True):
        assert len(output.token_ids) == 20
        assert_greedy(model, prompt, output, 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_int8_has_the_same_bits_on_every_instruction_set_and_stays_close(variant: str) -> None:
    """Rotation folds into biases, values and heads: a mistake in one would change the text beyond recognition."""
    _, config, weights = make(variant)
    prompt = prompts()[2]
    params = SamplingParams(20, temperature=0)
    loaded = LoadedModel(build(config, weights, "fp32"), "cpu", "fp32")
    with running_engine(loaded, max_batch=1) as engine:
        exact = generate(engine, prompt, params, echo_logprobs=True)
    found = []
    for instruction_set in cpu_features.read().instruction_sets:
        kernels = load_kernels(instruction_set.name)
        loaded = LoadedModel(build(config, weights, "int8", kernels=kernels), "cpu", "int8", kernels=kernels)
        with running_engine(loaded, max_batch=1) as engine:
            output = generate(engine, prompt, params, echo_logprobs=True)
            found.append((output.token_ids, output.logprobs, output.prompt_logprobs))
    assert found == found[:1] * len(found)
    pairs = zip(found[0][2][1:], exact.prompt_logprobs[1:], strict=True)
    differences = [abs(ours - theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    assert sum(differences) / len(differences) < 0.2


@pytest.mark.parametrize("size", [1, 2, 24, 64, 96, 576])
def test_a_rotation_is_orthogonal_and_spreads_a_channel(size: int) -> None:
    rotation = rotate(torch.eye(size))
    assert torch.allclose(rotation @ rotation.T, torch.eye(size), atol=1e-6)
    assert rotation.abs().max() <= (1.0 if size == 1 else 0.8)
    assert torch.equal(rotate(torch.eye(size)[:1]), rotation[:1])
