"""A layer of a decode step as five kernels, and the head as one, each row with the same bits whatever the batch.

The kernels of a layer: norm, queries, keys and values; attention; projection and residual addition; norm, up and GELU;
down and residual addition. Attention is passed in; the others are `fused_product`, which says why a row's bits do not
depend on the number of rows. Also has the block sizes, the plain torch twin of a product, and which models and devices
are supported. Does not know sequences and graphs, and not whether it is used: that is to be measured on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.cuda.kernels.compile import Kernel
from workers.engine.cuda.kernels.fused_product import fused_product
from workers.engine.cuda.kernels.launch import Launcher
from workers.engine.model.gpt2 import GPT2, GPT2Config, Layer, Linear, Norm

MIN_CAPABILITY = 80  # before 8.0 Triton has no tensor-core instructions for these products, and spills registers
MIN_DEPENDENT_CAPABILITY = 90  # programmatic dependent launch
# The depth of a norm, which a block holds in registers: more would spill.
MAX_EMBD = {torch.float16: 1600, torch.bfloat16: 1600, torch.float32: 1280}
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")

TILE_ROWS = 16  # of a tensor-core instruction
NUM_WARPS = 8
# Of the depth: a chunk of 512 elements keeps the deepest product of medium at 128 registers, so that a multiprocessor
# has room for a block of the next kernel, too.
CHUNKS = {torch.float16: (512, 256), torch.bfloat16: (512, 256), torch.float32: (256,)}  # the largest first
# Weights that a block loads before it waits for the kernel before it: 64 registers of each thread.
MAX_PRELOADED_BYTES = 64 << 10

_KERNEL = Kernel(fused_product, num_warps=NUM_WARPS, num_stages=1)
_DEPENDENT_KERNEL = Kernel(fused_product, num_warps=NUM_WARPS, num_stages=1, is_dependent=True)


class Attends(Protocol):
    """The part of `StepKernels` that a layer needs."""

    def attend(self, qkv: Tensor, slots: Tensor, integers: Tensor) -> Tensor:
        """As `StepKernels.attend`."""
        ...


@dataclass(frozen=True, slots=True)
class Target:
    """What products are compiled for.

    Attributes:
        is_dependent: programmatic dependent launch: weights are loaded while the kernel before is running.
        is_interpreted: they run in Triton's interpreter.
    """

    is_dependent: bool = False
    is_interpreted: bool = False

    @classmethod
    def of(cls, capability: int | None) -> Target:
        """The best for a compute capability, 90 for 9.0; None for Triton's interpreter."""
        return cls(capability is not None and capability >= MIN_DEPENDENT_CAPABILITY, capability is None)

    @property
    def kernel(self) -> Kernel:
        """`fused_product`."""
        return _DEPENDENT_KERNEL if self.is_dependent else _KERNEL


@dataclass(frozen=True, slots=True)
class Product:
    """A kind of fused product, with what `fused_product` is compiled for.

    Attributes:
        dtype: of x, the weights and, unless `is_float_out`, the result.
        is_float_out: the result is float32, its rows padded to a multiple of 64 elements.
    """

    num_in: int
    num_out: int
    dtype: torch.dtype
    has_norm: bool = False
    has_bias: bool = True
    has_gelu: bool = False
    has_residual: bool = False
    is_float_out: bool = False

    @property
    def stride(self) -> int:
        """Elements from a row of the result to the next."""
        return -(-self.num_out // 64) * 64 if self.is_float_out else self.num_out

    @property
    def columns(self) -> int:
        """Of a block. Few where a row is long, or the columns would not fill the device."""
        return 16 if self.has_norm else 8

    def constants(self, target: Target) -> dict[str, Any]:
        """The kernel's constants."""
        sizes = CHUNKS[self.dtype]
        chunk = next((size for size in sizes if self.num_in % size == 0), sizes[-1])
        num_chunks = -(-self.num_in // chunk)
        max_preloaded = MAX_PRELOADED_BYTES // (self.columns * chunk * self.dtype.itemsize)
        return {
            "DEPTH": self.num_in,
            "WIDTH": self.num_out,
            "STRIDE": self.stride,
            "HAS_NORM": self.has_norm,
            "HAS_BIAS": self.has_bias,
            "HAS_GELU": self.has_gelu,
            "HAS_RESIDUAL": self.has_residual,
            "ROWS": TILE_ROWS,
            "COLUMNS": self.columns,
            "SPLITS": NUM_WARPS,
            "SPLIT": chunk // NUM_WARPS,
            "PRELOADED": min(num_chunks, max_preloaded),
            "IS_DEPENDENT": target.is_dependent,
            "IS_WIDENED": target.is_interpreted and self.dtype == torch.bfloat16,
        }

    def grid(self, num_rows: int) -> tuple[int, int, int]:
        """Blocks: tiles of rows first, so that blocks with the same weights run together."""
        return -(-num_rows // TILE_ROWS), -(-self.num_out // self.columns), 1


def layer_products(config: GPT2Config, dtype: torch.dtype) -> dict[str, Product]:
    """The products of a layer by their names in `Layer`, and `head`."""
    width, inner = config.n_embd, config.n_inner
    return {
        "qkv": Product(width, 3 * width, dtype, has_norm=True),
        "out": Product(width, width, dtype, has_residual=True),
        "up": Product(width, inner, dtype, has_norm=True, has_gelu=True),
        "down": Product(inner, width, dtype, has_residual=True),
        "head": Product(width, config.vocab_size, dtype, has_norm=True, has_bias=False, is_float_out=True),
    }


def supports(capability: int | None, config: GPT2Config, dtype: torch.dtype) -> str | None:
    """Why a device cannot run a model with these kernels; None if it can.

    Args:
        capability: compute capability, 90 for 9.0; None for Triton's interpreter.
    """
    if capability is not None and capability < MIN_CAPABILITY:
        return f"fused layers need compute capability 8.0 or newer, this GPU has {capability // 10}.{capability % 10}"
    if config.activation_function not in TANH_GELUS:
        return f"fused layers have no {config.activation_function}, only {', '.join(TANH_GELUS)}"
    if dtype not in CHUNKS:
        return f"fused layers have no {dtype}, only {', '.join(map(str, CHUNKS))}"
    if config.n_embd > MAX_EMBD[dtype]:
        return f"fused layers in {dtype} need n_embd ≤ {MAX_EMBD[dtype]}, this model has {config.n_embd}"
    return None


class FusedLayers:
    """The layers and the head of a model on its device, or on a CPU in Triton's interpreter.

    Attributes:
        name: which implementation it is, for operators.
    """

    name = "fused"

    def __init__(self, model: GPT2, kernels: Attends, *, is_dependent: bool = True) -> None:
        """
        Args:
            is_dependent: False to measure without programmatic dependent launch where the device has it.

        Raises:
            ValueError: if `supports` gives a reason.
            RuntimeError: as `Launcher`.
        """
        weight = model.token_embedding
        capability = device_capability(weight.device)
        if reason := supports(capability, model.config, weight.dtype):
            raise ValueError(reason)
        best = Target.of(capability)
        self._target = replace(best, is_dependent=best.is_dependent and is_dependent)
        self._kernels = kernels
        self._launcher = Launcher(weight.device)
        self._products = layer_products(model.config, weight.dtype)

    def run(self, layer: Layer, x: Tensor, slots: Tensor, integers: Tensor) -> None:
        """Adds what the layer computes to x [sequences, n_embd] in place.

        Args:
            slots: [slots, 2, heads, head_size], the KV slots of the layer.
            integers: as `StepKernels.begin` returns them.
        """
        qkv = self._multiply("qkv", x, layer.qkv, layer.norm_1)
        mean = self._kernels.attend(qkv, slots, integers)
        self._multiply("out", mean, layer.out, residual=x)
        inner = self._multiply("up", x, layer.up, layer.norm_2)
        self._multiply("down", inner, layer.down, residual=x)

    def logits(self, x: Tensor, norm: Norm, head: Linear) -> Tensor:
        """[rows, n_embd], the residual stream after the last layer → [rows, vocab] float32, whose rows are padded."""
        return self._multiply("head", x, head, norm)

    def _multiply(
        self, name: str, x: Tensor, linear: Linear, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        weights = weights_of(linear, norm)
        return multiply(self._launcher, self._products[name], x, weights, residual, target=self._target)


@dataclass(frozen=True, slots=True)
class Weights:
    """What a product reads but x: `weight` [num_out or more, num_in], `bias` [num_out], and a norm of [num_in]."""

    weight: Tensor
    bias: Tensor | None = None
    norm: Norm | None = None


def weights_of(linear: Linear, norm: Norm | None) -> Weights:
    """
    Args:
        linear: with `weight`, and `bias` if it has one, as the layers of `model.linear`.
    """
    with_weights: Any = linear
    return Weights(with_weights.weight, getattr(linear, "bias", None), norm)


def multiply(
    launcher: Launcher,
    product: Product,
    x: Tensor,
    weights: Weights,
    residual: Tensor | None = None,
    *,
    target: Target,
) -> Tensor:
    """Launches a product.

    Args:
        x: [rows, num_in], contiguous.
        residual: [rows, num_out], contiguous; overwritten with the result.

    Returns:
        [rows, num_out]; `residual` if there is one.
    """
    num_rows, norm = len(x), weights.norm
    if residual is not None:
        out = residual
    else:
        dtype = torch.float32 if product.is_float_out else product.dtype
        out = torch.empty(num_rows, product.stride, dtype=dtype, device=x.device)
    # x also stands for the tensors that this product does not read.
    launcher.launch(
        target.kernel, product.grid(num_rows),
        x, x if norm is None else norm.weight, x if norm is None else norm.bias,
        weights.weight, x if weights.bias is None else weights.bias, x if residual is None else residual, out,
        num_rows, 1.0 if norm is None else norm.epsilon, **product.constants(target),
    )  # fmt: skip
    return out[:, : product.num_out]


def multiply_reference(product: Product, x: Tensor, weights: Weights, residual: Tensor | None = None) -> Tensor:
    """`multiply` in plain torch: float32 throughout, but for the norm's result and the last rounding."""
    y = x.float()
    if (norm := weights.norm) is not None:
        y = F.layer_norm(y, norm.weight.shape, norm.weight.float(), norm.bias.float(), norm.epsilon)
        y = y.to(x.dtype).float()
    y = F.linear(y, weights.weight[: product.num_out].float(), None if weights.bias is None else weights.bias.float())
    if product.has_gelu:
        y = F.gelu(y, approximate="tanh")
    if residual is not None:
        y = y + residual.float()
    return y if product.is_float_out else y.to(product.dtype)


def device_capability(device: torch.device) -> int | None:
    """90 for 9.0; None for a CPU."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
