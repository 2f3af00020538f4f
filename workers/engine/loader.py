"""Loads a model from the files of a checkpoint, or makes it with random weights.

Knows the names of weights, and which backend makes the linear layers of a device; not how they compute.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.end_tokens import read_end_ids
from shared.plain_files import read_plain
from shared.weights import weight_files
from workers.engine.devices import check_cpu, check_gpu
from workers.engine.failures import LoadFailure
from workers.engine.model.config import SHAPES, ModelConfig, own_name
from workers.engine.model.hadamard import rotate, rotate_input, rotate_layer
from workers.engine.model.linear import NEVER, DeviceHead, DeviceLinear, device_dtype
from workers.engine.model.transformer import Layer, Linear, LoadedModel, Norm, Transformer, rotations
from workers.engine.model.weights import Affine, WeightReader
from workers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workers.engine.cpu_kernels import Kernels

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
    kernels: Kernels | None = None,
) -> LoadedModel:
    """The checkpoint in `directory`: `config.json`, `*.safetensors`, a tokenizer if there is one.

    Args:
        kernels: of the CPU backend; by default those for this CPU's best instruction set.

    Raises:
        LoadFailure: if it is a model that is not served, incomplete or damaged, or holds values that are not numbers,
            or if the device does not compute in `dtype`.
        OSError: if a file cannot be read.
        ValueError: if the device does not support `dtype`.
    """
    dtype = _checked_dtype(dtype, device)
    config = read_config(directory)
    weights = read_weights(directory, lambda done: progress(0.5 * done))
    if tokenizer is None and any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        tokenizer = Tokenizer.from_directory(directory, config.vocab_size)
    if tokenizer is not None and tokenizer.eos_id is not None:
        # First: of a chat model, `config.json` names the end of a message only.
        config = replace(config, eos_token_ids=tuple(dict.fromkeys((tokenizer.eos_id, *config.eos_token_ids))))
    unused = () if tokenizer is None else tokenizer.unused_ids
    model = build(config, weights, dtype, lambda done: progress(0.5 + 0.5 * done), device, kernels, unused)
    return LoadedModel(model, device, dtype, tokenizer, kernels)


def random_model(
    shape: Literal["small", "medium"] | ModelConfig,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    progress: ProgressFn = lambda _: None,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    kernels: Kernels | None = None,
) -> LoadedModel:
    """A model of a real shape with random weights, for benchmarks that have no checkpoint."""
    config = SHAPES[shape] if isinstance(shape, str) else shape
    dtype = _checked_dtype(dtype, device)
    weights = random_weights(config, seed, device if device.startswith("cuda") else "cpu")
    model = build(config, weights, dtype, progress, device, kernels)
    return LoadedModel(model, device, dtype, tokenizer, kernels)


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


def random_weights(config: ModelConfig, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Weights as GPT-2 is initialized (normal, standard deviation 0.02), by their names in checkpoints.

    Args:
        device: where they are made; a GPU takes milliseconds for what a CPU takes seconds for.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def initial(name: str, shape: list[int]) -> Tensor:
        if len(shape) > 1:
            return torch.empty(shape, device=device).normal_(0, 0.02, generator=generator)
        return torch.full(shape, float(not name.endswith(".bias")), device=device)

    return {name: initial(name, shape) for name, shape in config.weight_shapes().items()}


def build(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    dtype: str,
    progress: ProgressFn = lambda _: None,
    device: str = "cpu",
    kernels: Kernels | None = None,
    unused_ids: Sequence[int] = (),
) -> Transformer:
    """A model from its weights, by their names in checkpoints (without `transformer.` or `model.`).

    Args:
        unused_ids: ids without a token, which are never generated.

    Raises:
        LoadFailure: if a weight is missing, has the wrong shape, or holds values that are not finite numbers.
        ValueError: if the device does not support `dtype`.
    """
    make_linear = _linear_maker(dtype, device, kernels)
    float_dtype = torch.float32 if device == "cpu" else device_dtype(dtype, device)
    read = WeightReader(config, weights)
    is_rotated = dtype == "int8" and config.is_rms_norm
    is_smoothed = dtype == "int8" and not is_rotated

    def ready(norm: Norm) -> Norm:
        bias = None if norm.bias is None else norm.bias.to(device, float_dtype)
        return Norm(norm.weight.to(device, float_dtype), bias, norm.epsilon)

    def normed(norm: Norm, linear: Affine, *, is_head: bool = False) -> tuple[Norm, Linear]:
        """A norm and the linear layer after it."""
        weight = linear.weight
        if is_smoothed:
            norm, weight = smooth_quant(norm, weight)
        return ready(norm), make_linear(weight, linear.bias, is_head)

    layers = []
    for index in range(config.n_layer):
        layer = read.layer(index)
        if is_rotated:
            layer = rotate_layer(layer, config)
        norm_1, qkv = normed(layer.norm_1, layer.qkv)
        norm_2, up = normed(layer.norm_2, layer.up)
        out, down = make_linear(*layer.out), make_linear(*layer.down)
        head_norms = [norm and ready(norm) for norm in (layer.query_norm, layer.key_norm)]
        layers.append(Layer(norm_1, qkv, out, norm_2, up, down, *head_norms))
        progress((index + 1) / (config.n_layer + 1))
    embedding, head_weight = read.embedding_and_head()
    has_own_head, last_norm = head_weight is not embedding, read.last_norm()
    if is_rotated:
        embedding = rotate(embedding)
        last_norm, head_weight = rotate_input(last_norm, head_weight)
    mask = None
    if unused_ids:
        mask = torch.zeros(len(head_weight))
        mask[list(unused_ids)] = NEVER
    last_norm, head = normed(last_norm, Affine(head_weight, mask), is_head=True)
    if isinstance(head, DeviceHead) and not has_own_head:
        embedding = head.weight[: config.vocab_size]  # the same numbers are kept once
    turns = rotations(config)
    model = Transformer(
        config=config,
        token_embedding=embedding.to(device, float_dtype),
        position_embedding=None if config.rotary else read.tensor("wpe.weight").to(device, float_dtype),
        rotations=None if turns is None else turns.to(device),
        layers=tuple(layers),
        norm=last_norm,
        head=head,
    )
    progress(1.0)
    return model


class LinearMaker(Protocol):
    """Makes linear layers in one dtype on one device."""

    def __call__(self, weight: Tensor, bias: Tensor | None, is_head: bool = ..., /) -> Linear:
        """A layer from its float32 weight [out, in] and bias [out]. The head gives float32 logits; its bias is 0, or
        NEVER for an id that is not generated."""


def _linear_maker(dtype: str, device: str, kernels: Kernels | None) -> LinearMaker:
    if device == "cpu":
        # Imported only here: a worker on a GPU does not load the CPU backend.
        from workers.engine.cpu.linear import LinearMaker as CpuLinearMaker

        return CpuLinearMaker(dtype, kernels)
    kept = device_dtype(dtype, device)

    def make(weight: Tensor, bias: Tensor | None, is_head: bool = False, /) -> Linear:
        if is_head:
            return DeviceHead.pad(weight.to(device, kept), None if bias is None else bias.to(device))
        return DeviceLinear(weight.to(device, kept), None if bias is None else bias.to(device, kept))

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
    magnitude = norm.weight.abs() if norm.bias is None else torch.hypot(norm.weight, norm.bias)
    magnitude = magnitude.clamp_min(MIN_MAGNITUDE)
    column_max = weight.abs().amax(0).clamp_min(MIN_MAGNITUDE)
    scale = magnitude.pow(SMOOTH_QUANT_ALPHA) / column_max.pow(1 - SMOOTH_QUANT_ALPHA)
    bias = None if norm.bias is None else norm.bias / scale
    return Norm(norm.weight / scale, bias, norm.epsilon), weight * scale


def read_config(directory: Path) -> ModelConfig:
    """The `config.json` in `directory`, and the ends of texts that `generation_config.json` adds.

    Raises:
        LoadFailure, OSError: as `load_model`.
    """
    path = directory / "config.json"
    try:
        config = ModelConfig.from_json(json.loads(read_plain(path)))
    except ValueError as error:
        raise LoadFailure(f"{path} cannot be served: {error}.") from error
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *read_end_ids(directory)))))


def read_weights(directory: Path, progress: ProgressFn = lambda _: None) -> dict[str, Tensor]:
    """All weights of the checkpoint in `directory`, without the prefixes of their names.

    Raises:
        LoadFailure: if there is no safetensors file, or a file is damaged.
        OSError: if a file cannot be read.
    """
    try:
        paths = weight_files(directory)
    except ValueError as error:
        raise LoadFailure(f"In {directory}, {error}: save the checkpoint again.") from error
    if not paths:
        raise LoadFailure(f"{directory} has no *.safetensors file, and Tercet reads no other format.")
    weights = {}
    for number, path in enumerate(paths):
        try:
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                for index, name in enumerate(names):
                    weights[own_name(name)] = file.get_tensor(name)
                    progress((number + (index + 1) / len(names)) / len(paths))
        except SafetensorError as error:
            raise LoadFailure(f"{path} is damaged: copy or download it again.") from error
    return weights
