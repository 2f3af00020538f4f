"""The GPT-2 architecture: weights from a checkpoint, and the way from token ids to logits.

Knows one model's arithmetic. Refuses to know batches, caches and sampling: attention is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.cpu.linear import Linear

MAX_HEAD_ROWS = 64  # more logits than these at once only spoil the caches
# layer, [rows, 3 · n_embd] queries (scaled), keys and values → [rows, n_embd]
AttendFn = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The numbers of a GPT-2 model, named as `config.json` names them."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int = 3072
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    eos_token_id: int | None = 50256

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> GPT2Config:
        """The configuration in a checkpoint's `config.json`.

        Raises:
            ValueError: if it describes something other than a GPT-2 language model.
        """
        architecture = values.get("model_type")
        if architecture != "gpt2":
            raise ValueError(f"only GPT-2 is served; this model_type is {architecture!r}")
        if values.get("add_cross_attention"):
            raise ValueError("GPT-2 with cross-attention is not served")
        known = {name: values[name] for name in cls.__slots__ if values.get(name) is not None}
        config = cls(**{"n_inner": 4 * values.get("n_embd", 768), **known})
        if config.activation_function not in _ACTIVATIONS:
            raise ValueError(f"the activation {config.activation_function!r} is not known")
        if config.n_embd % config.n_head:
            raise ValueError("n_embd must be a multiple of n_head")
        return config

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    def query_scale(self, layer: int) -> float:
        """What scores of `layer` are multiplied with."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


SHAPES: dict[str, GPT2Config] = {
    "small": GPT2Config(),
    "medium": GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_inner=4096),
}


def gelu_new(x: Tensor) -> Tensor:
    """x · σ(2u), u = √(2/π) · (x + 0.044715 x³): the tanh form of GELU, ½x(1 + tanh u).

    In place. Written with exp, which is three times as fast as tanh here and gives an element the
    same bits wherever it stands in the tensor; `F.gelu` does not.
    """
    if x.is_cuda:
        return F.gelu(x, approximate="tanh")  # one kernel
    t = x * x
    t.mul_(-2 * 0.7978845608028654 * 0.044715).sub_(2 * 0.7978845608028654).mul_(x)
    return x.div_(t.exp_().add_(1))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": gelu_new,
    "gelu_fast": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. `qkv` gives queries that are scaled already."""

    norm_1: Norm
    qkv: Linear
    out: Linear
    norm_2: Norm
    up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class GPT2:
    """A model's weights on their device, ready to compute."""

    config: GPT2Config
    token_embedding: Tensor  # [vocab, n_embd]
    position_embedding: Tensor  # [n_positions, n_embd]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: AttendFn) -> Tensor:
        """[rows] ids and positions → [rows, n_embd]."""
        activation = _ACTIVATIONS[self.config.activation_function]
        x = F.embedding(token_ids, self.token_embedding)
        x = x + F.embedding(positions, self.position_embedding)
        for index, layer in enumerate(self.layers):
            x = x + layer.out(attend(index, layer.qkv(layer.norm_1(x))))
            x = x + layer.down(activation(layer.up(layer.norm_2(x))))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, n_embd] → [rows, vocab], float32."""
        return self.head(self.norm(hidden))
