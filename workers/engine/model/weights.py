"""Reads a model's float32 weights, whatever its architecture calls them and however it stores them.

Knows names and shapes; knows no files, devices and dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from workers.engine.failures import LoadFailure
from workers.engine.model.config import HEAD, ModelConfig
from workers.engine.model.transformer import Norm


class Affine(NamedTuple):
    """A linear layer: weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None


class LayerWeights(NamedTuple):
    """The weights of one transformer block, as `transformer.Layer` has them."""

    norm_1: Norm
    qkv: Affine
    out: Affine
    norm_2: Norm
    up: Affine
    down: Affine
    query_norm: Norm | None
    key_norm: Norm | None


@dataclass(frozen=True, slots=True)
class _Names:
    """What an architecture calls its weights, without `transformer.` or `model.`. Of parts, the outputs are joined."""

    last_norm: str
    layer: str  # prefix of the names below
    norm_1: str
    qkv: tuple[str, ...]
    out: tuple[str, ...]
    norm_2: str
    up: tuple[str, ...]
    down: tuple[str, ...]


_GPT2 = _Names(
    last_norm="ln_f",
    layer="h.{}.",
    norm_1="ln_1",
    qkv=("attn.c_attn",),
    out=("attn.c_proj",),
    norm_2="ln_2",
    up=("mlp.c_fc",),
    down=("mlp.c_proj",),
)
_LLAMA = _Names(
    last_norm="norm",
    layer="layers.{}.",
    norm_1="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out=("self_attn.o_proj",),
    norm_2="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down=("mlp.down_proj",),
)


class WeightReader:
    """The weights of a checkpoint, checked.

    Raises:
        LoadFailure: by every method, as `loader.build`.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self._config, self._weights, self._shapes = config, weights, config.weight_shapes()
        self._names = _GPT2 if config.architecture == "gpt2" else _LLAMA

    def tensor(self, name: str, shape_of: str | None = None) -> Tensor:
        """A weight in float32, of its own shape or that of another."""
        if name not in self._weights:
            raise LoadFailure(f"The checkpoint lacks the weight {name}: save the model again.")
        tensor, shape = self._weights[name], tuple(self._shapes[shape_of or name])
        if tensor.shape != shape:
            raise LoadFailure(
                f"The weight {name} has the shape {tuple(tensor.shape)} where config.json asks for {shape}: use the "
                "config.json that was saved with the weights."
            )
        tensor = tensor.float()
        # One pass without a copy: a NaN or an infinity makes the sum one.
        if not math.isfinite(tensor.sum()):
            raise LoadFailure(
                f"The weight {name} holds values that are not numbers (NaN or infinity): the checkpoint is damaged, or "
                "its training failed; serve another."
            )
        return tensor

    def layer(self, index: int) -> LayerWeights:
        """The weights of a layer; its queries are scaled by the layer, or by their norm."""
        config, names, prefix = self._config, self._names, self._names.layer.format(index)
        qkv, query_norm, key_norm = self._linear(prefix, names.qkv), None, None
        query_scale = config.query_scale(index)
        if config.has_head_norms:
            norm = self._norm(prefix + "self_attn.q_norm")
            query_norm = Norm(norm.weight * query_scale, None, norm.epsilon)
            key_norm = self._norm(prefix + "self_attn.k_norm")
        else:
            for tensor in qkv:
                if tensor is not None:
                    tensor[: config.query_width] *= query_scale
        return LayerWeights(
            norm_1=self._norm(prefix + names.norm_1),
            qkv=qkv,
            out=self._linear(prefix, names.out),
            norm_2=self._norm(prefix + names.norm_2),
            up=self._linear(prefix, names.up),
            down=self._linear(prefix, names.down),
            query_norm=query_norm,
            key_norm=key_norm,
        )

    def embedding_and_head(self) -> tuple[Tensor, Tensor]:
        """Both [vocab, n_embd]: the same tensor where the checkpoint has only one of them."""
        name = self._config.embedding_name
        if name not in self._weights and HEAD in self._weights:
            head = self.tensor(HEAD, name)
            return head, head
        embedding = self.tensor(name)
        has_head = HEAD in self._weights or self._config.has_own_head
        return embedding, self.tensor(HEAD, name) if has_head else embedding

    def last_norm(self) -> Norm:
        return self._norm(self._names.last_norm)

    def _norm(self, name: str) -> Norm:
        bias = self.tensor(f"{name}.bias") if f"{name}.bias" in self._shapes else None
        return Norm(self.tensor(f"{name}.weight"), bias, self._config.norm_epsilon)

    def _linear(self, prefix: str, parts: Sequence[str]) -> Affine:
        """Copies of the weight [out, in] and the bias [out] of layers whose outputs are joined."""
        weight = torch.cat([self.tensor(f"{prefix}{name}.weight") for name in parts])
        if self._config.architecture == "gpt2":  # [in, out]
            weight = weight.T.contiguous()
        if f"{prefix}{parts[0]}.bias" not in self._shapes:
            return Affine(weight, None)
        return Affine(weight, torch.cat([self.tensor(f"{prefix}{name}.bias") for name in parts]))
