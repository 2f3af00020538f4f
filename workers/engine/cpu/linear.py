"""Linear layers whose every output row has the same bits whatever rows are computed beside it.

Knows matrix kernels and their habits. Refuses to know what the layers are for.

A kernel may pick its order of summation by the shape it is given, so a row computed among 3 rows
can differ, in its last bits, from the same row among 64. So only row counts from `ROW_COUNTS` are
computed (the rest are padded), and of these only the ones that were seen, on this machine and for
this shape of layer, to agree with each other.
"""

from __future__ import annotations

import mmap
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# BatchRow counts to compute with, at most a quarter apart. A kernel that is compiled for each shape
# (oneDNN's are) is compiled for these, when it is probed, and never while someone waits.
ROW_COUNTS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    *(80, 96, 112, 128, 160, 192, 224, 256),
)
PROBE_ROWS = 16
# Fewer multiplications than these are not worth waking other threads for.
LARGE = 1 << 18
HUGE_PAGE_BYTES = 2 << 20
ARENA_BYTES = 64 << 20  # taken from the system at once; what is not used of them is never touched
CACHE_LINE_BYTES = 64

# How rows are handed to a matrix product: as they are; divided by their largest absolute value; the same in 8 bits,
# 1/127 each and zero at 128.
PLAIN, UNIT, UINT8 = range(3)
TINY = torch.finfo(torch.float32).tiny

Bytes = np.ndarray[tuple[int], np.dtype[np.int8]]
Kernel = Callable[[Tensor], Tensor]  # [rows, in] → [rows, out]


class Product(Protocol):
    """x · Wᵀ of one weight, on a CPU: float32, to be multiplied with the rows' scales where they have some."""

    def mode(self, num_rows: int) -> int:
        """How so many rows are to be handed over."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] in their mode → [rows, out] float32."""


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """y = x · Wᵀ + b, row-exact (see the module), in the parts of which the CPU's kernels make a step."""

    product: Product
    bias: Tensor | None  # [out] float32
    row_counts: tuple[int, ...] | None  # those to compute with, ascending; None is any

    def padded(self, num_rows: int) -> int:
        """The number of rows, at least `num_rows`, to hand over."""
        if self.row_counts is None:
            return num_rows
        largest = self.row_counts[-1]
        if num_rows <= largest:
            return next(count for count in self.row_counts if count >= num_rows)
        whole, rest = divmod(num_rows, largest)
        # The rest is handed over like the others, which a few rows by themselves might not be.
        rest = next(count for count in self.row_counts if count >= max(rest, PROBE_ROWS)) if rest else 0
        return whole * largest + rest

    def multiply(self, x: Tensor) -> Tensor:
        """[padded rows, in] in their mode → [padded rows, out], neither scaled nor with the bias."""
        if self.row_counts is None or len(x) <= self.row_counts[-1]:
            return self.product(x)
        return torch.cat([self.product(piece) for piece in torch.split(x, self.row_counts[-1])])

    def mode(self, num_rows: int) -> int:
        """How `num_rows` rows, padded, are to be handed over."""
        return self.product.mode(num_rows if self.row_counts is None else min(num_rows, self.row_counts[-1]))

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out], float32 both: the whole layer, for whoever has no use for its parts."""
        padded = F.pad(x, (0, 0, 0, self.padded(len(x)) - len(x)))
        ready, scales = prepare(padded, self.mode(len(padded)))
        y = self.multiply(ready)[: len(x)] * scales[: len(x)]
        return y if self.bias is None else y + self.bias


Linear = CpuLinear | Kernel


def prepare(x: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """Rows [rows, in] float32 as `mode` wants them, and their scales [rows, 1].

    A scale of its own for each row: the kernels know only one for the whole tensor, which would make a row depend on
    its neighbours. It also makes the error smaller where one row stands out.
    """
    if mode == PLAIN:
        return x, torch.ones(len(x), 1)
    scales = x.abs().amax(-1, keepdim=True).clamp_min_(TINY)
    unit = x / scales
    if mode == UNIT:
        return unit, scales
    # One rounding for product and sum, as fbgemm has it.
    return torch.add(torch.tensor(128.0), unit, alpha=127).round_().to(torch.uint8), scales


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
        makers: dict[str, Callable[[Tensor], Product]] = {
            "fp32": FloatProduct,
            "bf16": HalfProduct,
            "int8": partial(Int8Product, memory=HugePages()),
        }
        if dtype not in makers:
            raise ValueError(f"dtype {dtype} is not for {device}; there are {', '.join(makers)}")
        self._make_product = makers[dtype]
        self._row_counts: dict[tuple[int, ...], tuple[int, ...] | None] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None, max_rows: int = ROW_COUNTS[-1]) -> Linear:
        """A layer from its float32 weight [out, in] and bias [out].

        Args:
            max_rows: more rows than this are computed in pieces.
        """
        if self._device != "cpu":
            weight = weight.to(self._device, self._dtype)
            bias = None if bias is None else bias.to(self._device, self._dtype)
            return _device_kernel(weight, bias)
        product = self._make_product(weight)
        shape = tuple(weight.shape)
        if shape not in self._row_counts:
            counts = [count for count in ROW_COUNTS if count <= max_rows]
            self._row_counts[shape] = _agreeing_row_counts(product, weight.shape[1], counts)
        return CpuLinear(product, bias, self._row_counts[shape])


def _agreeing_row_counts(product: Product, in_features: int, counts: Sequence[int]) -> tuple[int, ...] | None:
    """Those of `counts`, ascending, that give every row the bits that `PROBE_ROWS` rows give it; None is any number.

    Random rows show the order of summation: were two orders different, all those sums would
    hardly round alike.
    """
    if isinstance(product, Int8Product) and product.has_one:
        return None  # it sums integers, and has one way to turn a sum into a float

    def compute(x: Tensor) -> Tensor:
        return product(prepare(x, product.mode(len(x)))[0])

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(counts[-1], in_features, generator=generator)
    reference = torch.cat([compute(piece) for piece in torch.split(x, PROBE_ROWS)])
    return tuple(count for count in counts if torch.equal(compute(x[:count]), reference[:count]))


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


class FloatProduct:
    """oneDNN's kernels on a packed weight: at few rows faster than MKL's, and less moody."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PROBE_ROWS) if _has_onednn() else weight

    def mode(self, num_rows: int) -> int:
        return PLAIN

    def __call__(self, x: Tensor) -> Tensor:
        if not _has_onednn():
            return F.linear(x, self._weight)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return y


class HalfProduct:
    """bf16 weights. Only they and what meets them are bf16; everything between layers stays float32."""

    def __init__(self, weight: Tensor) -> None:
        weight = weight.bfloat16()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if _has_onednn() else weight

    def mode(self, num_rows: int) -> int:
        return PLAIN

    def __call__(self, x: Tensor) -> Tensor:
        if not _has_onednn():
            return F.linear(x.bfloat16(), self._weight).float()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self._weight, None, "none", [], "")
        return y.float()


class Int8Product:
    """8-bit weights, a scale for each output; 8-bit activations, a scale for each row.

    Our own kernel multiplies them, faster than torch's for few rows and many. Where the CPU has no instructions for it
    fbgemm's does, which quantizes by itself, or oneDNN's. All sum integers, and what they do in floating point is the
    same to the bit.

    `own` is our kernel's copy, or None; `has_one`, whether there is one way for every number of rows.
    """

    def __init__(self, weight: Tensor, memory: HugePages) -> None:
        scales = (weight.abs().amax(1) / 127).clamp_min(TINY)  # each row's largest value is ±127
        weight8 = (weight / scales[:, None]).round().to(torch.int8)
        self.own = PackedInt8Linear.of(weight8, scales, memory)
        self._fbgemm = None
        if self.own is None and "fbgemm" in torch.backends.quantized.supported_engines:
            self._fbgemm = _pack_for_fbgemm(weight8, scales)
        self.has_one = self.own is not None or self._fbgemm is not None
        if not self.has_one:
            self._onednn = torch.ops.onednn.qlinear_prepack(weight8, None)
            self._scales, self._zeros = scales, torch.zeros(len(weight), dtype=torch.long)
        # Without VNNI pairs of products are summed in 16 bits: half the range keeps them from wrapping.
        self._num_levels = 127 if torch.cpu._is_vnni_supported() else 63

    def mode(self, num_rows: int) -> int:
        return UNIT if self._fbgemm is not None else UINT8

    def __call__(self, x: Tensor) -> Tensor:
        if self.own is not None:
            return self.own(x)
        if self._fbgemm is not None:
            y: Tensor = _fbgemm_multiply(x, 1 / self._num_levels, self._num_levels + 1, self._fbgemm)
            return y
        # float32 out, not scaled, no bias, nothing fused to it
        z: Tensor = _onednn_multiply(
            x, 1 / 127, 128, self._onednn, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return z


class HugePages:
    """CachedSuffix in pages of 2 MiB, for what is read from end to end at each step: fewer pages, fewer pauses."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.int8)

    def take(self, num_bytes: int) -> Bytes:
        """So many bytes, zeros; they live as long as the array does."""
        if num_bytes > len(self._left):
            # Private: the pages of shared memory are small as a rule.
            memory = mmap.mmap(-1, max(num_bytes, ARENA_BYTES) + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            whole = np.frombuffer(memory, np.int8)
            self._left = whole[-whole.ctypes.data % HUGE_PAGE_BYTES :]
        taken, self._left = self._left[:num_bytes], self._left[-(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES :]
        return taken


class PackedInt8Linear:
    """Our kernel's copy of an 8-bit weight."""

    def __init__(self, weight8: Tensor, scales: Tensor, memory: HugePages) -> None:
        from workers.engine.cpu import kernels as cpu_kernels  # compiles, where that has not been done

        self._k = k = cpu_kernels
        self._kernels = k.Kernels(torch.get_num_threads())
        self._num_outputs, num_inputs = weight8.shape
        weights = weight8.numpy()
        starts = [min(first, len(weights) - k.BLOCK) for first in range(0, len(weights), k.BLOCK)]
        packed = memory.take(len(starts) * k.BLOCK * num_inputs)
        blocks = packed.reshape(len(starts), num_inputs // 4, k.BLOCK, 4)
        for block, start in zip(blocks, starts, strict=True):
            block[:] = weights[start : start + k.BLOCK].reshape(k.BLOCK, num_inputs // 4, 4).swapaxes(0, 1)
        # x is kept with 128 added to it: 128 times the weights are too much.
        begin = (-128 * weight8.sum(1, dtype=torch.int32)).contiguous()
        factors = scales * torch.tensor(1 / 127)  # both scales in one, as oneDNN and fbgemm multiply them
        self._parameters = np.zeros(k.PRODUCT_FIELDS, np.int64)
        self._parameters[k.INPUTS], self._parameters[k.OUTPUTS] = num_inputs, self._num_outputs
        self._parameters[k.WEIGHTS] = packed.ctypes.data
        self._parameters[k.STARTS], self._parameters[k.FACTORS] = begin.data_ptr(), factors.data_ptr()
        can_use_amx = k.HAS_AMX and num_inputs % k.AMX_BYTES == 0
        self._parameters[k.MOST_DOT_ROWS] = k.DOT_ROWS if can_use_amx else sys.maxsize
        self.address = self._parameters.ctypes.data
        self.is_large = weight8.numel() > LARGE
        self._keep = packed, begin, factors

    @classmethod
    def of(cls, weight8: Tensor, scales: Tensor, memory: HugePages) -> PackedInt8Linear | None:
        """None where this machine has no instructions for it, or the shape is not made for it."""
        from workers.engine.cpu.kernels import BLOCK, HAS_DOT_PRODUCTS

        is_fit = len(weight8) >= BLOCK and weight8.shape[1] % 4 == 0
        return cls(weight8, scales, memory) if HAS_DOT_PRODUCTS and is_fit else None

    def precede(self, other: PackedInt8Linear) -> None:
        """In a step, `other` is multiplied next: its first weights are asked for at the end of this."""
        self._parameters[self._k.NEXT_PRODUCT] = other.address

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.empty(len(x), self._num_outputs)
        self._kernels.run(self._k.multiply, self.address, x.data_ptr(), y.data_ptr(), self.is_large, len(x))
        return y


_fbgemm_multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
_onednn_multiply = torch.ops.onednn.qlinear_pointwise.default


def _pack_for_fbgemm(weight8: Tensor, scales: Tensor) -> torch.ScriptObject:
    zeros = torch.zeros(len(scales), dtype=torch.long)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        # torch 2.13 announces the end of quantized tensors; what it will be replaced with has no
        # kernel as fast as this one.
        warnings.simplefilter("ignore")
        quantized = torch._make_per_channel_quantized_tensor(weight8, scales.double(), zeros, 0)
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    torch.backends.quantized.engine = engine
    return packed


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call, no-any-return]
