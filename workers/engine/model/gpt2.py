"""The GPT-2 architecture: configuration, weights on a device, and the operations from token ids to logits.

Knows no batches, KV caches and sampling, and no file formats: `loader` makes the weights.

`Layer.operations` is the only description of a layer's sequence. `cuda.forward` and `cpu.forward` turn it into kernels
and products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.text.token_healing import TokenHealing
from workers.text.tokenizer import Tokenizer

MAX_HEAD_ROWS = 64  # rows of logits at once; more of them would only evict other data from the caches
Linear = Callable[[Tensor], Tensor]  # [rows, in] → [rows, out]: x · Wᵀ + b


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The hyperparameters of a GPT-2 model, named as in `config.json`."""

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
            raise ValueError(f"unknown activation_function {config.activation_function!r}")
        if config.n_embd % config.n_head:
            raise ValueError("n_embd must be a multiple of n_head")
        return config

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    def query_scale(self, layer: int) -> float:
        """The factor of attention scores in `layer`."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


SHAPES: dict[str, GPT2Config] = {
    "small": GPT2Config(),
    "medium": GPT2Config(n_embd=1024, n_layer=24, n_head=16, n_inner=4096),
}


def gelu_new(x: Tensor) -> Tensor:
    """x · σ(2u), u = √(2/π) · (x + 0.044715 x³): the tanh form of GELU, ½x(1 + tanh u).

    In place on a CPU. Written with exp, which is three times as fast as tanh on a CPU and gives an element the same
    bits wherever it stands in the tensor, which `F.gelu` does not.
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
    """y = (x − mean) / √(variance + epsilon) · weight + bias over the last dimension."""

    weight: Tensor  # [n_embd]
    bias: Tensor  # [n_embd]
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class AddAndNorm:
    """x ← x + y, the residual addition (none before the first layer's first norm); y ← norm(x)."""

    norm: Norm


@dataclass(frozen=True, slots=True)
class Multiply:
    """y ← linear(y)."""

    linear: Linear


@dataclass(frozen=True, slots=True)
class Attend:
    """Stores y's keys and values in the KV cache; y ← attention of y's queries."""


@dataclass(frozen=True, slots=True)
class Activate:
    """y ← activation(y), element by element."""


Operation = AddAndNorm | Multiply | Attend | Activate


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block. `qkv` gives queries that are scaled already."""

    norm_1: Norm
    qkv: Linear
    out: Linear
    norm_2: Norm
    up: Linear
    down: Linear

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What the layer computes, in order, on the residual stream x and a running value y.

        The y of the last operation is added to x by the norm that follows: the next layer's, or the model's.
        """
        return (
            AddAndNorm(self.norm_1),
            Multiply(self.qkv),
            Attend(),
            Multiply(self.out),
            AddAndNorm(self.norm_2),
            Multiply(self.up),
            Activate(),
            Multiply(self.down),
        )


@dataclass(frozen=True, slots=True)
class GPT2:
    """A model's weights on their device, ready to compute."""

    config: GPT2Config
    token_embedding: Tensor  # [vocab, n_embd]
    position_embedding: Tensor  # [n_positions, n_embd]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """The function of `Activate`."""
        return _ACTIVATIONS[self.config.activation_function]

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, n_embd] → [rows, vocab], float32."""
        return self.head(self.norm(hidden))


@dataclass(frozen=True)  # without slots: `healing` is kept in the instance's dictionary
class LoadedModel:
    """What the engine runs: a model, and the tokenizer that stop strings and typed prefixes need."""

    model: GPT2
    device: str
    dtype: str  # of the weights: fp32, bf16, fp16 or int8
    tokenizer: Tokenizer | None = None

    @cached_property
    def healing(self) -> TokenHealing | None:
        """Token healing for the model's vocabulary; None without a tokenizer."""
        return None if self.tokenizer is None else TokenHealing(self.tokenizer)

    @property
    def config(self) -> GPT2Config:
        return self.model.config

    @property
    def eos_id(self) -> int | None:
        return self.config.eos_token_id
