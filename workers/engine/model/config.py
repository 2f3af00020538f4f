"""The hyperparameters of a model, read from a checkpoint's `config.json`: GPT-2, and Llama's family.

Knows names and numbers; knows no tensors and no files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.end_tokens import end_ids

# Names of activations that are built (`cpu.layouts.ACTIVATIONS`, `transformer.ACTIVATIONS`).
ACTIVATION_NAMES = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu", "relu", "silu", "swish", "tanh")
HEAD = "lm_head.weight"
# What wrappers insert into weights' names: torch.compile, data parallelism, FSDP and activation checkpointing.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# What older versions of transformers, wrapped models and peft's merged models write before a weight's own name.
_PREFIX = re.compile(r"^(?:base_model\.)?(?:transformer\.|model\.)*")
ARCHITECTURES = ("gpt2", "llama", "qwen2", "qwen3")


def own_name(name: str) -> str:
    """A weight's name in a checkpoint without what was put around it: as in `ModelConfig.weight_shapes`."""
    return _PREFIX.sub("", _WRAPPERS.sub("", name))


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

    Attributes:
        kind: "default"; "linear", whose positions are divided by `factor`; or "llama3", which divides the low
            frequencies only.
        n_original, low_factor, high_factor: of "llama3": the context that the model was first trained with, and the
            turns within it between which frequencies are interpolated.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    n_original: int = 0
    low_factor: float = 1.0
    high_factor: float = 4.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The hyperparameters of a decoder-only transformer; the defaults are GPT-2 small's.

    Names are those of GPT-2's `config.json`, where it has them.

    Attributes:
        n_kv_head: heads of keys and values, a divisor of `n_head`; None: `n_head`.
        head_dim: width of a head; None: `n_embd / n_head`.
        rotary: None where positions are embedded.
        is_rms_norm: norms are RMSNorm, without a bias.
        is_gated: activation(gate(x)) · up(x) precedes the last product, rather than activation(up(x)).
        has_head_norms: queries and keys are normed, each head by itself.
        has_own_head: the head is not the embedding.
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int = 3072
    activation_function: str = "gelu_new"
    norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    eos_token_ids: tuple[int, ...] = (50256,)
    architecture: str = "gpt2"
    n_kv_head: int | None = None
    head_dim: int | None = None
    rotary: Rotary | None = None
    is_rms_norm: bool = False
    is_gated: bool = False
    has_head_norms: bool = False
    has_qkv_bias: bool = True
    has_out_bias: bool = True
    has_mlp_bias: bool = True
    has_own_head: bool = False

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The configuration in a checkpoint's `config.json`.

        Raises:
            ValueError: if it describes a model that is not served.
        """
        architecture = values.get("model_type", "gpt2" if "n_embd" in values else None)
        if architecture not in ARCHITECTURES:
            raise ValueError(f"the model_type {architecture!r} is not served, only {', '.join(ARCHITECTURES)}")
        try:
            config = _gpt2(values) if architecture == "gpt2" else _llama(architecture, values)
        except KeyError as error:
            raise ValueError(f"it lacks {error.args[0]}") from error
        if config.activation_function not in ACTIVATION_NAMES:
            raise ValueError(f"unknown activation function {config.activation_function!r}")
        if config.head_dim is None and config.n_embd % config.n_head:
            raise ValueError("the width must be a multiple of the number of heads")
        if config.n_head % config.num_kv_heads:
            raise ValueError("the number of heads must be a multiple of the number of key-value heads")
        return config

    @property
    def head_size(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def num_kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def query_width(self) -> int:
        """Numbers in all queries of a token."""
        return self.n_head * self.head_size

    @property
    def kv_width(self) -> int:
        """Numbers in all keys of a token, and in all values."""
        return self.num_kv_heads * self.head_size

    @property
    def qkv_width(self) -> int:
        return self.query_width + 2 * self.kv_width

    @property
    def up_width(self) -> int:
        """Outputs of the product before the activation: with a gate, the gate's and then the others."""
        return self.n_inner * (1 + self.is_gated)

    def weight_shapes(self) -> dict[str, list[int]]:
        """The shape of every weight by its name in a checkpoint, without `transformer.` or `model.`.

        GPT-2's linear layers are [in, out], as transformers' Conv1D stores them; the others are [out, in].
        """
        shapes = _gpt2_shapes(self) if self.architecture == "gpt2" else _llama_shapes(self)
        return shapes | ({HEAD: [self.vocab_size, self.n_embd]} if self.has_own_head else {})

    @property
    def num_weights_read(self) -> int:
        """Weights of all linear layers, which a step reads; embeddings are looked up."""
        layer = self.n_embd * (self.qkv_width + self.query_width + self.up_width + self.n_inner)
        return self.n_layer * layer + self.vocab_size * self.n_embd

    @property
    def embedding_name(self) -> str:
        """Name of the embedding's weight."""
        return "wte.weight" if self.architecture == "gpt2" else "embed_tokens.weight"

    def query_scale(self, layer: int) -> float:
        """The factor of attention scores in `layer`."""
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


SHAPES: dict[str, ModelConfig] = {
    "small": ModelConfig(),
    "medium": ModelConfig(n_embd=1024, n_layer=24, n_head=16, n_inner=4096),
}


def _gpt2(values: Mapping[str, Any]) -> ModelConfig:
    if values.get("add_cross_attention"):
        raise ValueError("GPT-2 with cross-attention is not served")
    names = (
        *("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
        *("activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    )
    known = {name: values[name] for name in names if values.get(name) is not None}
    return ModelConfig(
        **{"n_inner": 4 * values.get("n_embd", 768), **known},
        norm_epsilon=values.get("layer_norm_epsilon", 1e-5),
        eos_token_ids=end_ids({"eos_token_id": 50256, **values}),
        has_own_head=not values.get("tie_word_embeddings", True),
    )


def _llama(architecture: str, values: Mapping[str, Any]) -> ModelConfig:
    """Source of the names and defaults: transformers' LlamaConfig, Qwen2Config and Qwen3Config."""
    if values.get("use_sliding_window") and values.get("sliding_window"):
        raise ValueError("attention within a sliding window is not served")
    if values.get("attention_multiplier") or values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("attention_multiplier and partial_rotary_factor are not served")
    return ModelConfig(
        vocab_size=values["vocab_size"],
        n_positions=values["max_position_embeddings"],
        n_embd=values["hidden_size"],
        n_layer=values["num_hidden_layers"],
        n_head=values["num_attention_heads"],
        n_inner=values["intermediate_size"],
        activation_function=values.get("hidden_act", "silu"),
        norm_epsilon=values.get("rms_norm_eps", 1e-6),
        eos_token_ids=end_ids(values),
        architecture=architecture,
        n_kv_head=values.get("num_key_value_heads"),
        head_dim=values.get("head_dim") or (128 if architecture == "qwen3" else None),
        rotary=_rotary(values),
        is_rms_norm=True,
        is_gated=True,
        has_head_norms=architecture == "qwen3",
        has_qkv_bias=architecture == "qwen2" or bool(values.get("attention_bias")),
        has_out_bias=architecture != "qwen2" and bool(values.get("attention_bias")),
        has_mlp_bias=bool(values.get("mlp_bias")),
        has_own_head=not values.get("tie_word_embeddings", False),
    )


def _rotary(values: Mapping[str, Any]) -> Rotary:
    """transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`."""
    scaling = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or values.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    match kind:
        case "default":
            return Rotary(theta)
        case "linear":
            return Rotary(theta, "linear", float(scaling["factor"]))
        case "llama3":
            low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
            n_original = int(scaling["original_max_position_embeddings"])
            return Rotary(theta, "llama3", float(scaling["factor"]), n_original, low, high)
    raise ValueError(f"rotary positions with the scaling {kind!r} are not served, only default, linear and llama3")


def _gpt2_shapes(config: ModelConfig) -> dict[str, list[int]]:
    width, inner = config.n_embd, config.n_inner
    shapes = {
        "wte.weight": [config.vocab_size, width],
        "wpe.weight": [config.n_positions, width],
        "ln_f.weight": [width],
        "ln_f.bias": [width],
    }
    linear = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    for layer in range(config.n_layer):
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = shapes[f"h.{layer}.{norm}.bias"] = [width]
        for name, (num_in, num_out) in linear.items():
            shapes[f"h.{layer}.{name}.weight"] = [num_in, num_out]
            shapes[f"h.{layer}.{name}.bias"] = [num_out]
    return shapes


def _llama_shapes(config: ModelConfig) -> dict[str, list[int]]:
    width, inner, head = config.n_embd, config.n_inner, [config.head_size]
    shapes = {"embed_tokens.weight": [config.vocab_size, width], "norm.weight": [width]}
    linear = {
        "self_attn.q_proj": (config.query_width, width, config.has_qkv_bias),
        "self_attn.k_proj": (config.kv_width, width, config.has_qkv_bias),
        "self_attn.v_proj": (config.kv_width, width, config.has_qkv_bias),
        "self_attn.o_proj": (width, config.query_width, config.has_out_bias),
        "mlp.gate_proj": (inner, width, config.has_mlp_bias),
        "mlp.up_proj": (inner, width, config.has_mlp_bias),
        "mlp.down_proj": (width, inner, config.has_mlp_bias),
    }
    for layer in range(config.n_layer):
        prefix = f"layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = [width]
        if config.has_head_norms:
            shapes[f"{prefix}self_attn.q_norm.weight"] = shapes[f"{prefix}self_attn.k_norm.weight"] = head
        for name, (num_out, num_in, has_bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = [num_out, num_in]
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = [num_out]
    return shapes
