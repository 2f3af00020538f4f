"""Small random models of transformers, and GGUF files of them as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.workers.helpers import EMBEDDED
from workers.checkpoints.gguf_child import ARCHITECTURES

F32 = GGMLQuantizationType.F32
VOCAB_SIZE = 8192  # the embedded tokenizer's
_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 0,
    "bos_token_id": 0,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}


def random_model(architecture: str, **values: Any) -> Any:
    """A model whose every weight matters, biases and norms too."""
    torch.manual_seed(0)
    if architecture == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes, **values))
    else:
        config, kind = {
            "llama": (LlamaConfig, LlamaForCausalLM),
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
            "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        }[architecture]
        model = kind(config(**{**_LLAMA, **values}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3)
    return model.eval()


def write_gguf(
    path: Path,
    model: Any,
    *,
    kind: GGMLQuantizationType = F32,
    pre: str = "gpt-2",
    num_merges: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    more_tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model` with the embedded tokenizer.

    Args:
        kind: of the matrices.
        num_merges: of the tokenizer, and the tokens that they make; None is all.
        metadata: changes; None leaves a key out.
    """
    config, name = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, name)
    values: dict[str, Any] = {
        f"{name}.context_length": 128,
        f"{name}.embedding_length": 64,
        f"{name}.block_count": 2,
        f"{name}.attention.head_count": 4,
    }
    if name == "gpt2":
        values |= {"gpt2.feed_forward_length": 256, "gpt2.attention.layer_norm_epsilon": config.layer_norm_epsilon}
    else:
        values |= {
            f"{name}.feed_forward_length": 96,
            f"{name}.attention.head_count_kv": 2,
            f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{name}.rope.freq_base": config.rope_parameters["rope_theta"],
            **_scaling(name, config.rope_parameters),
            f"{name}.rope.dimension_count": config.head_dim if name == "llama" else None,
            f"{name}.attention.key_length": getattr(config, "head_dim", None),
            f"{name}.attention.value_length": getattr(config, "head_dim", None),
        }
    tokenizer = json.loads((EMBEDDED / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    merges = tokenizer["model"]["merges"][:num_merges]
    vocab = vocab[: 257 + len(merges)]  # <|endoftext|> and the bytes come first
    values |= {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [3 if token == "<|endoftext|>" else 1 for token in vocab],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
        "tokenizer.ggml.eos_token_id": 0,
        **(metadata or {}),
    }
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    architecture = ARCHITECTURES[name]
    for weight_name, tensor in model.state_dict().items():
        if weight_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        if architecture.transposes and ".c_" in weight_name and array.ndim == 2:
            array = np.ascontiguousarray(array.T)
        if name == "llama" and any(f"{part}_proj." in weight_name for part in "qk"):
            array = _permuted(array, config.head_dim)
        _add(writer, _tensor_name(weight_name, name), array, kind if array.ndim == 2 else F32)
    for tensor_name, array in (more_tensors or {}).items():
        _add(writer, tensor_name, array, F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _scaling(name: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "default":
        return {}
    return {f"{name}.rope.scaling.type": rope["rope_type"], f"{name}.rope.scaling.factor": rope["factor"]}


def _permuted(array: Any, head_dim: int) -> Any:
    """As `LlamaModel.permute` of llama.cpp's converter."""
    heads = array.shape[0] // head_dim
    parts = array.reshape(heads, 2, head_dim // 2, *array.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(array.shape))


def _tensor_name(weight_name: str, architecture: str) -> str:
    """The name that the package gguf's own table gives."""
    kind = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    stem, _, suffix = weight_name.rpartition(".")
    found = gguf.get_tensor_name_map(kind, 2).get_name(stem)
    assert found is not None, weight_name
    return f"{found}.{suffix}"


def _add(writer: Any, name: str, array: Any, kind: GGMLQuantizationType) -> None:
    if kind == F32:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
