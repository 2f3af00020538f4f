"""A decoder-only transformer: its weights on a device, and the operations from token ids to logits.

Knows no batches, KV caches and sampling, and no file formats: `loader` makes the weights.

`Layer.operations` is the only description of a layer's sequence. `cuda.forward` and `cpu.forward` turn it into kernels
and products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.model.config import ModelConfig
from workers.text.token_healing import TokenHealing
from workers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workers.engine.cpu_kernels import Kernels

Linear = Callable[[Tensor], Tensor]  # [rows, in] → [rows, out]: x · Wᵀ + b


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


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
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
    """Over the last dimension: y = (x − mean) / √(variance + epsilon) · weight + bias; without a bias it is RMSNorm,
    y = x / √(mean of x² + epsilon) · weight (Zhang and Sennrich 2019, arXiv:1910.07467)."""

    weight: Tensor  # [width]
    bias: Tensor | None  # [width]
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


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
    """Norms and rotates y's queries and keys, where the model does; stores y's keys and values in the KV cache; y ←
    attention of y's queries."""

    query_norm: Norm | None
    key_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Activate:
    """y ← activation(y), element by element; with a gate, activation(first half of y) · second half."""


Operation = AddAndNorm | Multiply | Attend | Activate


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block. `qkv` gives queries that are scaled already; with `query_norm`, that scales them."""

    norm_1: Norm
    qkv: Linear
    out: Linear
    norm_2: Norm
    up: Linear
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What the layer computes, in order, on the residual stream x and a running value y.

        The y of the last operation is added to x by the norm that follows: the next layer's, or the model's.
        """
        return (
            AddAndNorm(self.norm_1),
            Multiply(self.qkv),
            Attend(self.query_norm, self.key_norm),
            Multiply(self.out),
            AddAndNorm(self.norm_2),
            Multiply(self.up),
            Activate(),
            Multiply(self.down),
        )


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model's weights on their device, ready to compute."""

    config: ModelConfig
    token_embedding: Tensor  # [vocab, n_embd]
    position_embedding: Tensor | None  # [n_positions, n_embd]
    rotations: Tensor | None  # [n_positions, 2, head_size / 2] float32, cosines and sines of rotary positions
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear

    def activate(self, y: Tensor) -> Tensor:
        """`Activate` in plain torch."""
        return activate(self.config, y)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, n_embd] → [rows, vocab], float32."""
        return self.head(self.norm(hidden))


@dataclass(frozen=True)  # without slots: properties are kept in the instance's dictionary
class LoadedModel:
    """What the engine runs: a model, and the tokenizer that stop strings and typed prefixes need."""

    model: Transformer
    device: str
    dtype: str  # of the weights: fp32, bf16, fp16 or int8
    tokenizer: Tokenizer | None = None
    kernels: Kernels | None = None  # of the CPU backend; None: this CPU's best

    @cached_property
    def healing(self) -> TokenHealing | None:
        """Token healing for the model's vocabulary; None without a tokenizer."""
        return None if self.tokenizer is None else TokenHealing(self.tokenizer)

    @cached_property
    def config(self) -> ModelConfig:
        return self.model.config

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        return self.config.eos_token_ids

    @cached_property
    def start_id(self) -> int:
        """The token that stands for an empty prompt."""
        if self.tokenizer is not None and self.tokenizer.start_id is not None:
            return self.tokenizer.start_id
        return next((id_ for id_ in self.eos_ids if id_ < self.config.vocab_size), 0)


def activate(config: ModelConfig, y: Tensor) -> Tensor:
    """`Activate` in plain torch: [rows, up_width] → [rows, n_inner]."""
    activation = ACTIVATIONS[config.activation_function]
    if not config.is_gated:
        return activation(y)
    gate, up = y.chunk(2, -1)
    return activation(gate) * up


def rotations(config: ModelConfig) -> Tensor | None:
    """Cosines and sines of rotary positions, [n_positions, 2, head_size / 2] float32; None if there are none.

    Frequencies and angles are rounded to float32 as transformers' LlamaRotaryEmbedding rounds them; "llama3" is
    transformers' `_compute_llama3_parameters`. Computed in float64: the same bits on every CPU.
    """
    rotary = config.rotary
    if rotary is None:
        return None
    frequencies = rotary.theta ** (-np.arange(0, config.head_size, 2) / config.head_size)
    if rotary.kind == "linear":
        frequencies = frequencies / rotary.factor
    elif rotary.kind == "llama3":
        turns = rotary.n_original * frequencies / (2 * np.pi)
        kept = np.clip((turns - rotary.low_factor) / (rotary.high_factor - rotary.low_factor), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / rotary.factor)
    angles = np.arange(config.n_positions, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
    exact = angles.astype(np.float64)
    return torch.from_numpy(np.stack((np.cos(exact), np.sin(exact)), 1).astype(np.float32))
