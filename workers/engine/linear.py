"""Linear layers whose every output row has the same bits whatever rows are computed beside it.

Knows matrix kernels and their habits. Refuses to know what the layers are for.

A kernel may pick its order of summation by the shape it is given, so a row computed among 3 rows
can differ, in its last bits, from the same row among 64. So only row counts from `ROW_COUNTS` are
computed (the rest are padded), and of these only the ones that were seen, on this machine and for
this shape of layer, to agree with each other. fbgemm's int8 kernel is free of this: it sums
integers, and has one way to turn a sum into a float.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Row counts to compute with, at most a quarter apart. A kernel that is compiled for each shape
# (oneDNN's are) is compiled for these, when it is probed, and never while someone waits.
ROW_COUNTS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    *(80, 96, 112, 128, 160, 192, 224, 256),
)
PROBE_ROWS = 16

Kernel = Callable[[Tensor], Tensor]  # [rows, in] float32 → [rows, out] float32


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x · Wᵀ + b, float32 in and out; row-exact (see the module)."""

    kernel: Kernel
    row_counts: tuple[int, ...] | None  # those to compute with, ascending; None is any

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out]."""
        if self.row_counts is None or len(x) in self.row_counts:
            return self.kernel(x)
        largest = self.row_counts[-1]
        if len(x) > largest:
            return torch.cat([self(piece) for piece in torch.split(x, largest)])
        padded = next(count for count in self.row_counts if count > len(x))
        return self.kernel(F.pad(x, (0, 0, 0, padded - len(x))))[: len(x)]


class LinearMaker:
    """Makes the layers of one model; what it finds out about a shape it finds out once."""

    def __init__(self, dtype: str, device: str = "cpu") -> None:
        """
        Args:
            dtype: fp32, bf16 or int8; what the weights are kept in.

        Raises:
            ValueError: if the device cannot compute with `dtype`.
        """
        self._device = device
        if device != "cpu":
            self._dtype = device_dtype(dtype, device)
            return
        makers = {"fp32": _fp32_kernel, "bf16": _bf16_kernel, "int8": _int8_kernel()}
        if dtype not in makers:
            raise ValueError(f"dtype {dtype} is not for {device}; there are {', '.join(makers)}")
        self._make_kernel = makers[dtype]
        self._row_counts: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None, max_rows: int = ROW_COUNTS[-1]) -> Linear:
        """A layer from its float32 weight [out, in] and bias [out].

        Args:
            max_rows: more rows than this are computed in pieces.
        """
        if self._device != "cpu":
            weight = weight.to(self._device, self._dtype)
            bias = None if bias is None else bias.to(self._device, self._dtype)
            return Linear(_device_kernel(weight, bias), None)
        kernel = self._make_kernel(weight, bias)
        if self._make_kernel is _fbgemm_int8_kernel:
            return Linear(kernel, None)
        shape = tuple(weight.shape)
        if shape not in self._row_counts:
            counts = [count for count in ROW_COUNTS if count <= max_rows]
            self._row_counts[shape] = _agreeing_row_counts(kernel, weight.shape[1], counts)
        return Linear(kernel, self._row_counts[shape])


def _agreeing_row_counts(kernel: Kernel, in_features: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Those of `counts`, ascending, that give every row the bits that `PROBE_ROWS` rows give it.

    Random rows show the order of summation: were two orders different, all those sums would
    hardly round alike.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(counts[-1], in_features, generator=generator)
    reference = torch.cat([kernel(piece) for piece in torch.split(x, PROBE_ROWS)])
    return tuple(count for count in counts if torch.equal(kernel(x[:count]), reference[:count]))


def device_dtype(dtype: str, device: str) -> torch.dtype:
    """What a device other than the CPU keeps weights and activations in.

    Raises:
        ValueError: if it cannot compute with `dtype`.
    """
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in dtypes:
        raise ValueError(f"dtype {dtype} is not for {device}; there are {', '.join(dtypes)}")
    return dtypes[dtype]


def _device_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    """Plain, in the weight's dtype; without a bias it is the head, whose sums stay float32."""
    if bias is not None:
        return lambda x: F.linear(x, weight, bias)
    if weight.is_cuda and weight.dtype != torch.float32:
        # Logits near -100 would be rounded to halves in bf16.
        return lambda x: torch.mm(x, weight.T, out_dtype=torch.float32)
    return lambda x: F.linear(x.float(), weight.float())


def _fp32_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    if not _has_onednn():
        return lambda x: F.linear(x, weight, bias)
    # oneDNN's kernels on a packed weight: at few rows faster than MKL's, and less moody.
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, PROBE_ROWS)

    def kernel(x: Tensor) -> Tensor:
        y: Tensor = ops._linear_pointwise(x, packed, bias, "none", [], "")
        return y

    return kernel


def _bf16_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    """Only the weights and what meets them are bf16; everything between layers stays float32."""
    weight = weight.bfloat16()
    bias = None if bias is None else bias.bfloat16()
    if not _has_onednn():
        return lambda x: F.linear(x.bfloat16(), weight, bias).float()
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, 1)

    def kernel(x: Tensor) -> Tensor:
        y: Tensor = ops._linear_pointwise(x.bfloat16(), packed, bias, "none", [], "")
        return y.float()

    return kernel


def _int8_kernel() -> Callable[[Tensor, Tensor | None], Kernel]:
    """The faster of two int8 kernels on this CPU: fbgemm's, or oneDNN's where there is AMX."""
    has_fbgemm = "fbgemm" in torch.backends.quantized.supported_engines
    return _onednn_int8_kernel if _has_amx() or not has_fbgemm else _fbgemm_int8_kernel


def _quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weight [out, in] and its float32 scales [out]: each row's largest value is ±127."""
    scales = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round().to(torch.int8), scales


def _row_scales(x: Tensor) -> Tensor:
    """[rows, in] → [rows, 1]: each row's largest absolute value.

    A scale of its own for each row: the kernels know only one for the whole tensor, which would
    make a row depend on its neighbours. It also makes the error smaller where one row stands out.
    """
    return x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(torch.float32).tiny)


def _fbgemm_int8_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    weight8, scales = _quantize_weight(weight)
    zeros = torch.zeros(len(scales), dtype=torch.long)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        # torch 2.13 announces the end of quantized tensors; what it will be replaced with has no
        # kernel as fast as this one.
        warnings.simplefilter("ignore")
        quantized = torch._make_per_channel_quantized_tensor(weight8, scales.double(), zeros, 0)
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    torch.backends.quantized.engine = engine
    multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
    # Without VNNI pairs of products are summed in 16 bits: half the range keeps them from wrapping.
    num_levels = 127 if torch.cpu._is_vnni_supported() else 63
    level, zero = 1 / num_levels, num_levels + 1

    def kernel(x: Tensor) -> Tensor:
        row_scales = _row_scales(x)
        y: Tensor = multiply(x / row_scales, level, zero, packed)
        return y.mul_(row_scales) if bias is None else torch.addcmul(bias, y, row_scales)

    return kernel


def _onednn_int8_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    weight8, scales = _quantize_weight(weight)
    zeros = torch.zeros(len(scales), dtype=torch.long)
    packed = torch.ops.onednn.qlinear_prepack(weight8, None)
    multiply = torch.ops.onednn.qlinear_pointwise.default

    def kernel(x: Tensor) -> Tensor:
        row_scales = _row_scales(x)
        x8 = (x * (127 / row_scales)).round_().to(torch.int8)
        # float32 out, not scaled, no bias, nothing fused to it
        y: Tensor = multiply(x8, 1 / 127, 0, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")
        return y.mul_(row_scales) if bias is None else torch.addcmul(bias, y, row_scales)

    return kernel


def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call, no-any-return]
