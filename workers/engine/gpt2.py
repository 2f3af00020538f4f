"""The GPT-2 architecture: weights from a checkpoint, and the way from token ids to logits.

Knows one model's arithmetic. Refuses to know batches, caches and sampling: attention is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.engine.linear import Linear, LinearMaker, device_dtype
from workers.engine.tokens import Tokenizer

MAX_HEAD_ROWS = 64  # more logits than these at once only spoil the caches
ProgressFn = Callable[[float], None]  # 0 to 1
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


BALANCE = 0.7  # of `balanced`; 0.5 and 0.9 were worse for the head of the embedded checkpoint
SMALLEST = 1e-6  # a channel that is never used has no size

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


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What the engine runs: a model, and the bytes of its tokens where stop strings are to work."""

    model: GPT2
    device: str
    dtype: str  # the one in effect
    tokenizer: Tokenizer | None = None

    @property
    def config(self) -> GPT2Config:
        return self.model.config

    @property
    def eos_id(self) -> int | None:
        return self.config.eos_token_id


def load_model(
    directory: Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    progress: ProgressFn = lambda _: None,
    tokenizer: Tokenizer | None = None,
) -> LoadedModel:
    """The checkpoint in `directory`: `config.json`, `*.safetensors`, a tokenizer if there is one.

    Raises:
        FileNotFoundError: if one of the files is missing.
        ValueError: if it is not a GPT-2 language model, or not a whole one.
    """
    config = read_config(directory)
    weights = read_weights(directory, lambda done: progress(0.5 * done))
    if tokenizer is None and _has_tokenizer(directory):
        tokenizer = Tokenizer.from_directory(directory, config.vocab_size)
    dtype = default_dtype(device) if dtype == "auto" else dtype
    model = build(config, weights, dtype, lambda done: progress(0.5 + 0.5 * done), device)
    return LoadedModel(model, device, dtype, tokenizer)


def random_model(
    shape: Literal["small", "medium"] | GPT2Config,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    progress: ProgressFn = lambda _: None,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
) -> LoadedModel:
    """A model of the true shape with random weights, for measuring where no real one can be had."""
    config = SHAPES[shape] if isinstance(shape, str) else shape
    dtype = default_dtype(device) if dtype == "auto" else dtype
    model = build(config, random_weights(config, seed), dtype, progress, device)
    return LoadedModel(model, device, dtype, tokenizer)


def default_dtype(device: str) -> str:
    """int8 on a CPU; on a GPU bf16, or fp16 where it is older than sm80."""
    if not device.startswith("cuda"):
        return "int8"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def random_weights(config: GPT2Config, seed: int = 0) -> dict[str, Tensor]:
    """Weights as GPT-2 is initialised (normal, 0.02), by the names that checkpoints have."""
    generator = torch.Generator().manual_seed(seed)
    width, inner = config.n_embd, config.n_inner

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(0, 0.02, generator=generator)

    weights = {
        "wte.weight": normal(config.vocab_size, width),
        "wpe.weight": normal(config.n_positions, width),
        "ln_f.weight": torch.ones(width),
        "ln_f.bias": torch.zeros(width),
    }
    for layer in range(config.n_layer):
        prefix = f"h.{layer}."
        for norm in ("ln_1", "ln_2"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(width)
            weights[f"{prefix}{norm}.bias"] = torch.zeros(width)
        for name, rows, columns in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, inner),
            ("mlp.c_proj", inner, width),
        ):
            weights[f"{prefix}{name}.weight"] = normal(rows, columns)
            weights[f"{prefix}{name}.bias"] = torch.zeros(columns)
    return weights


def build(
    config: GPT2Config,
    weights: Mapping[str, Tensor],
    dtype: str,
    progress: ProgressFn = lambda _: None,
    device: str = "cpu",
) -> GPT2:
    """A model from its weights, by the names that checkpoints have (without `transformer.`).

    Raises:
        ValueError: if a weight is missing or has the wrong shape.
    """
    width, inner = config.n_embd, config.n_inner
    make_linear = LinearMaker(dtype, device)
    is_balanced = dtype == "int8"
    kept = torch.float32 if device == "cpu" else device_dtype(dtype, device)

    def get(name: str, *shape: int) -> Tensor:
        if name not in weights:
            raise ValueError(f"the checkpoint lacks the weight {name}")
        tensor = weights[name]
        if tensor.shape != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the configuration wants {shape}")
        return tensor.float()

    def norm(name: str) -> Norm:
        epsilon = config.layer_norm_epsilon
        weight, bias = get(f"{name}.weight", width), get(f"{name}.bias", width)
        return Norm(weight.to(device, kept), bias.to(device, kept), epsilon)

    def linear(name: str, num_in: int, num_out: int) -> Linear:
        # Checkpoints keep these as Conv1D: [in, out].
        weight = get(f"{name}.weight", num_in, num_out).T.contiguous()
        return make_linear(weight, get(f"{name}.bias", num_out))

    def normed_linear(norm_name: str, name: str, num_out: int, query_scale: float = 1.0) -> tuple[Norm, Linear]:
        """A norm and what takes its output; the first `width` outputs are scaled."""
        first, weight = norm(norm_name), get(f"{name}.weight", width, num_out).T.contiguous()
        bias = get(f"{name}.bias", num_out).clone()
        weight[:width] *= query_scale
        bias[:width] *= query_scale
        if is_balanced:
            first, weight = balanced(first, weight)
        return first, make_linear(weight, bias)

    layers = []
    for index in range(config.n_layer):
        prefix = f"h.{index}."
        norm_1, qkv = normed_linear(
            prefix + "ln_1", prefix + "attn.c_attn", 3 * width, query_scale=config.query_scale(index)
        )
        norm_2, up = normed_linear(prefix + "ln_2", prefix + "mlp.c_fc", inner)
        layers.append(
            Layer(
                norm_1=norm_1,
                qkv=qkv,
                out=linear(prefix + "attn.c_proj", width, width),
                norm_2=norm_2,
                up=up,
                down=linear(prefix + "mlp.c_proj", inner, width),
            )
        )
        progress((index + 1) / (config.n_layer + 1))
    embedding = get("wte.weight", config.vocab_size, width).to(device, kept)
    has_own_head = "lm_head.weight" in weights
    head = get("lm_head.weight", config.vocab_size, width) if has_own_head else embedding
    last_norm = norm("ln_f")
    if is_balanced:
        last_norm, head = balanced(last_norm, head)
    model = GPT2(
        config=config,
        token_embedding=embedding,
        position_embedding=get("wpe.weight", config.n_positions, width).to(device, kept),
        layers=tuple(layers),
        norm=last_norm,
        head=make_linear(head, None, max_rows=MAX_HEAD_ROWS),
    )
    progress(1.0)
    return model


def balanced(norm: Norm, weight: Tensor) -> tuple[Norm, Tensor]:
    """The same product of a norm's output and a weight `[out, width]`, with channels of the first made alike.

    A row is rounded to 8 bits by one scale: where some channels are far larger than others, the others lose. So each
    channel is divided by s, and the weight's column multiplied with it. s = max|x|^α / max|w|^(1 - α), α = 0.7, is
    SmoothQuant's (Xiao et al. 2023, arXiv:2211.10438, eq. 4), but for x: its maximum would have to be measured on
    text; the norm's gain and bias say nearly as much, since what they are applied to has variance 1.
    """
    size = torch.hypot(norm.weight, norm.bias).clamp_min(SMALLEST)
    column = weight.abs().amax(0).clamp_min(SMALLEST)
    factor = size.pow(BALANCE) / column.pow(1 - BALANCE)
    return Norm(norm.weight / factor, norm.bias / factor, norm.epsilon), weight * factor


def read_config(directory: Path) -> GPT2Config:
    """The `config.json` in `directory`; raises as `load_model`."""
    return GPT2Config.from_json(json.loads((directory / "config.json").read_text("utf-8")))


def read_weights(directory: Path, progress: ProgressFn = lambda _: None) -> dict[str, Tensor]:
    """All weights of the checkpoint in `directory`, without the prefix `transformer.`.

    Raises:
        FileNotFoundError: if there is no safetensors file, or one that the index names is missing.
        ValueError: if a file is damaged.
    """
    paths = _weight_files(directory)
    weights = {}
    for number, path in enumerate(paths):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                for index, name in enumerate(names):
                    weights[name.removeprefix("transformer.")] = file.get_tensor(name)
                    progress((number + (index + 1) / len(names)) / len(paths))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return weights


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError(f"{index} names files outside its directory")
        return [directory / name for name in names]
    whole = directory / "model.safetensors"
    paths = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{directory} has no *.safetensors file")
    return paths


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json"))
