"""Loads a model from the files of a checkpoint, or makes it with random weights.

Knows the names and shapes of weights, and which backend makes the linear layers of a device; not how they compute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.weights import Shape, weight_shapes
from workers.engine.cpu_check import check_cpu
from workers.engine.failures import LoadFailure
from workers.engine.gpu_check import check_gpu
from workers.engine.model.gpt2 import GPT2, MAX_HEAD_ROWS, SHAPES, GPT2Config, Layer, Linear, LoadedModel, Norm
from workers.engine.model.linear import DeviceHead, device_dtype, device_linear
from workers.text.tokenizer import Tokenizer

__all__ = [
    "LoadedModel",
    "ProgressFn",
    "build",
    "load_model",
    "random_model",
    "random_weights",
    "read_config",
    "smooth_quant",
]

ProgressFn = Callable[[float], None]  # 0 to 1
SMOOTH_QUANT_ALPHA = 0.7  # migration strength; 0.5 and 0.9 were worse for the head of the embedded checkpoint
MIN_MAGNITUDE = 1e-6  # of a channel; avoids a division by zero where a channel is unused


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
        LoadFailure: if it is not a GPT-2 language model, incomplete or damaged, or holds values that are not numbers,
            or if the device does not compute in `dtype`.
        OSError: if a file cannot be read.
        ValueError: if the device does not support `dtype`.
    """
    dtype = _checked_dtype(dtype, device)
    config = read_config(directory)
    weights = read_weights(directory, lambda done: progress(0.5 * done))
    if tokenizer is None and _has_tokenizer(directory):
        tokenizer = Tokenizer.from_directory(directory, config.vocab_size)
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
    """A model of a real shape with random weights, for benchmarks that have no checkpoint."""
    config = SHAPES[shape] if isinstance(shape, str) else shape
    dtype = _checked_dtype(dtype, device)
    model = build(config, random_weights(config, seed), dtype, progress, device)
    return LoadedModel(model, device, dtype, tokenizer)


def default_dtype(device: str) -> str:
    """int8 on a CPU; on a GPU bf16, or fp16 where it is older than sm80."""
    if not device.startswith("cuda"):
        return "int8"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


def _checked_dtype(dtype: str, device: str) -> str:
    """The dtype of the model; raises as `check_gpu` and `check_cpu`."""
    if device.startswith("cuda"):
        check_gpu(device, dtype)
    else:
        check_cpu(dtype)
    return default_dtype(device) if dtype == "auto" else dtype


def random_weights(config: GPT2Config, seed: int = 0) -> dict[str, Tensor]:
    """Weights as GPT-2 is initialized (normal, standard deviation 0.02), by their names in checkpoints."""
    generator = torch.Generator().manual_seed(seed)

    def initial(name: str, shape: Shape) -> Tensor:
        if len(shape) > 1:
            return torch.empty(shape).normal_(0, 0.02, generator=generator)
        return torch.zeros(shape) if name.endswith(".bias") else torch.ones(shape)

    return {name: initial(name, shape) for name, shape in weight_shapes(asdict(config)).items()}


def build(
    config: GPT2Config,
    weights: Mapping[str, Tensor],
    dtype: str,
    progress: ProgressFn = lambda _: None,
    device: str = "cpu",
) -> GPT2:
    """A model from its weights, by their names in checkpoints (without `transformer.`).

    Raises:
        LoadFailure: if a weight is missing, has the wrong shape, or holds values that are not finite numbers.
        ValueError: if the device does not support `dtype`.
    """
    width, inner = config.n_embd, config.n_inner
    make_linear = _linear_maker(dtype, device)
    is_quantized = dtype == "int8"
    float_dtype = torch.float32 if device == "cpu" else device_dtype(dtype, device)

    def get(name: str, *shape: int) -> Tensor:
        if name not in weights:
            raise LoadFailure(f"The checkpoint lacks the weight {name}: save the model again.")
        tensor = weights[name]
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

    def norm(name: str) -> Norm:
        epsilon = config.layer_norm_epsilon
        weight, bias = get(f"{name}.weight", width), get(f"{name}.bias", width)
        return Norm(weight.to(device, float_dtype), bias.to(device, float_dtype), epsilon)

    def linear(name: str, num_in: int, num_out: int) -> Linear:
        # Checkpoints store these as Conv1D, [in, out].
        weight = get(f"{name}.weight", num_in, num_out).T.contiguous()
        return make_linear(weight, get(f"{name}.bias", num_out))

    def normed_linear(norm_name: str, name: str, num_out: int, query_scale: float = 1.0) -> tuple[Norm, Linear]:
        """A norm and the linear layer after it, whose first `width` outputs are multiplied with `query_scale`."""
        layer_norm, weight = norm(norm_name), get(f"{name}.weight", width, num_out).T.contiguous()
        bias = get(f"{name}.bias", num_out).clone()
        weight[:width] *= query_scale
        bias[:width] *= query_scale
        if is_quantized:
            layer_norm, weight = smooth_quant(layer_norm, weight)
        return layer_norm, make_linear(weight, bias)

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
    embedding = get("wte.weight", config.vocab_size, width).to(device, float_dtype)
    has_own_head = "lm_head.weight" in weights
    head = get("lm_head.weight", config.vocab_size, width) if has_own_head else embedding
    last_norm = norm("ln_f")
    if is_quantized:
        last_norm, head = smooth_quant(last_norm, head)
    head_linear = make_linear(head, None, MAX_HEAD_ROWS)
    if isinstance(head_linear, DeviceHead) and not has_own_head:
        embedding = head_linear.weight[: config.vocab_size]  # the same numbers are kept once
    model = GPT2(
        config=config,
        token_embedding=embedding,
        position_embedding=get("wpe.weight", config.n_positions, width).to(device, float_dtype),
        layers=tuple(layers),
        norm=last_norm,
        head=head_linear,
    )
    progress(1.0)
    return model


class LinearMaker(Protocol):
    """Makes linear layers in one dtype on one device."""

    def __call__(self, weight: Tensor, bias: Tensor | None, max_rows: int = ..., /) -> Linear:
        """A layer from its float32 weight [out, in] and bias [out]; `max_rows` as in `cpu.linear.LinearMaker`."""


def _linear_maker(dtype: str, device: str) -> LinearMaker:
    if device == "cpu":
        # Imported only here: a worker on a GPU does not load the CPU backend.
        from workers.engine.cpu.linear import LinearMaker as CpuLinearMaker

        return CpuLinearMaker(dtype)
    kept = device_dtype(dtype, device)

    def make(weight: Tensor, bias: Tensor | None, _max_rows: int = 0, /) -> Linear:
        return device_linear(weight.to(device, kept), None if bias is None else bias.to(device, kept))

    return make


def smooth_quant(norm: Norm, weight: Tensor) -> tuple[Norm, Tensor]:
    """SmoothQuant: the same product of a norm's output x [rows, width] and `weight` [out, width], easier to quantize.

    A row of x is rounded to 8 bits with one scale, so channels with small values lose precision to a channel with
    large ones. Channel j of x is divided by s[j], by way of the norm's weight and bias, and column j of the weight is
    multiplied by it:

        s[j] = max |x[:, j]|^α / max |weight[:, j]|^(1 − α),  α = SMOOTH_QUANT_ALPHA

    Source: Xiao et al. 2023, arXiv:2211.10438, equation 4. Instead of max |x[:, j]| over a calibration text it uses
    √(norm.weight[j]² + norm.bias[j]²): the root mean square of channel j if its normalized input has variance 1.
    """
    magnitude = torch.hypot(norm.weight, norm.bias).clamp_min(MIN_MAGNITUDE)
    column_max = weight.abs().amax(0).clamp_min(MIN_MAGNITUDE)
    scale = magnitude.pow(SMOOTH_QUANT_ALPHA) / column_max.pow(1 - SMOOTH_QUANT_ALPHA)
    return Norm(norm.weight / scale, norm.bias / scale, norm.epsilon), weight * scale


def read_config(directory: Path) -> GPT2Config:
    """The `config.json` in `directory`; raises as `load_model`."""
    path = directory / "config.json"
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise LoadFailure(f"{path} is damaged, it is not JSON: copy or download it again.") from error
    try:
        return GPT2Config.from_json(values)
    except ValueError as error:  # its texts are ours
        raise LoadFailure(f"{path} cannot be served: {error}.") from error


def read_weights(directory: Path, progress: ProgressFn = lambda _: None) -> dict[str, Tensor]:
    """All weights of the checkpoint in `directory`, without the prefix `transformer.`.

    Raises:
        LoadFailure: if there is no safetensors file, or a file is damaged.
        OSError: if a file cannot be read.
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
            raise LoadFailure(f"{path} is damaged: copy or download it again.") from error
    return weights


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise LoadFailure(f"{index} names files outside its directory: save the checkpoint again.")
        return [directory / name for name in names]
    whole = directory / "model.safetensors"
    paths = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise LoadFailure(f"{directory} has no *.safetensors file, and Tercet reads no other format.")
    return paths


def _has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json"))
