"""Linear layers on a CPU whose every output row has the same bits whatever rows are computed with it.

Knows matrix kernels and their orders of summation; knows no model.

A kernel may choose its order of summation by the shape of its input, so a row among 3 rows can differ in its last bits
from the same row among 64. So only row counts from `ROW_COUNTS` are computed, by padding, and of these only the ones
that a probe found, on this machine and for this shape of layer, to agree with each other.
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

from shared import cpu_features
from workers.engine.cpu.layouts import AMX_BYTES, BLOCK, DOT_ROWS, PLAIN, PRODUCT, UINT8, UNIT
from workers.engine.cpu_check import has_onednn

# Row counts to compute with, at most a quarter apart. Kernels that are compiled for each shape (oneDNN's) are compiled
# for these by the probe, never during a request.
ROW_COUNTS = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64),
    *(80, 96, 112, 128, 160, 192, 224, 256),
)
PROBE_ROWS = 16
MIN_SHARED_PRODUCTS = 1 << 18  # multiplications in a product from which on it pays to wake other threads
HUGE_PAGE_BYTES = 2 << 20
ARENA_BYTES = 64 << 20  # reserved from the system at once; unused pages are never touched, so they take no memory
CACHE_LINE_BYTES = 64
TINY = torch.finfo(torch.float32).tiny

Bytes = np.ndarray[tuple[int], np.dtype[np.int8]]


class Product(Protocol):
    """x · Wᵀ of one weight, float32; where rows have scales, the result is to be multiplied with them."""

    def mode(self, num_rows: int) -> int:
        """How `num_rows` rows are to be handed over: PLAIN, UNIT or UINT8 (`cpu.layouts`)."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] in their mode → [rows, out] float32."""


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """y = x · Wᵀ + b, row-exact (see the module), in the parts that a forward pass combines with its kernels."""

    product: Product
    bias: Tensor | None  # [out] float32
    row_counts: tuple[int, ...] | None  # to compute with, ascending; None: any

    def padded(self, num_rows: int) -> int:
        """The number of rows, at least `num_rows`, to hand over."""
        if self.row_counts is None:
            return num_rows
        largest = self.row_counts[-1]
        if num_rows <= largest:
            return next(count for count in self.row_counts if count >= num_rows)
        whole, rest = divmod(num_rows, largest)
        # The rest has to use the mode of the other pieces, which few rows might not.
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
        """[rows, in] → [rows, out], float32 both: the whole layer."""
        padded = F.pad(x, (0, 0, 0, self.padded(len(x)) - len(x)))
        ready, scales = prepare(padded, self.mode(len(padded)))
        y = self.multiply(ready)[: len(x)] * scales[: len(x)]
        return y if self.bias is None else y + self.bias


def prepare(x: Tensor, mode: int) -> tuple[Tensor, Tensor]:
    """Rows [rows, in] float32 in `mode`, and their scales [rows, 1]; `kernels.norms.prepare` does the same.

    torch's quantized products know one scale for the whole tensor, which would make a row depend on its neighbours. A
    scale for each row also makes the error smaller where a row has an outlier.
    """
    if mode == PLAIN:
        return x, torch.ones(len(x), 1)
    scales = x.abs().amax(-1, keepdim=True).clamp_min_(TINY)
    unit = x / scales
    if mode == UNIT:
        return unit, scales
    # One rounding for product and sum, as in fbgemm.
    return torch.add(torch.tensor(128.0), unit, alpha=127).round_().to(torch.uint8), scales


class LinearMaker:
    """Makes the linear layers of one model; probes each shape once."""

    def __init__(self, dtype: str) -> None:
        """
        Args:
            dtype: data type of the weights: fp32, bf16 or int8.

        Raises:
            ValueError: if `dtype` is another.
        """
        makers: dict[str, Callable[[Tensor], Product]] = {
            "fp32": FloatProduct,
            "bf16": partial(FloatProduct, dtype=torch.bfloat16),
            "int8": partial(int8_product, memory=HugePages()),
        }
        if dtype not in makers:
            raise ValueError(f"cpu does not support dtype {dtype}; choose {', '.join(makers)}")
        self._make_product = makers[dtype]
        self._row_counts: dict[tuple[int, ...], tuple[int, ...] | None] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None, max_rows: int = ROW_COUNTS[-1]) -> CpuLinear:
        """A layer from its float32 weight [out, in] and bias [out].

        Args:
            max_rows: more rows than this are computed in pieces.
        """
        product = self._make_product(weight)
        shape = tuple(weight.shape)
        if shape not in self._row_counts:
            counts = [count for count in ROW_COUNTS if count <= max_rows]
            self._row_counts[shape] = _agreeing_row_counts(product, weight.shape[1], counts)
        return CpuLinear(product, bias, self._row_counts[shape])


def _agreeing_row_counts(product: Product, in_features: int, counts: Sequence[int]) -> tuple[int, ...] | None:
    """Those of `counts`, ascending, that give every row the bits that `PROBE_ROWS` rows give it; None: any number does.

    Random rows reveal the order of summation: with a different order, some of the many sums would round differently.
    """
    if isinstance(product, PackedInt8Linear) or (isinstance(product, Int8Product) and product.is_row_exact):
        return None

    def compute(x: Tensor) -> Tensor:
        return product(prepare(x, product.mode(len(x)))[0])

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(counts[-1], in_features, generator=generator)
    reference = torch.cat([compute(piece) for piece in torch.split(x, PROBE_ROWS)])
    return tuple(count for count in counts if torch.equal(compute(x[:count]), reference[:count]))


class FloatProduct:
    """float32 or bf16 weights, packed for oneDNN: for few rows faster than MKL, and its times vary less.

    For bf16, activations are rounded for the product and stay float32 elsewhere.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        weight = weight.to(dtype)
        num_rows = PROBE_ROWS if dtype == torch.float32 else 1
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) if has_onednn() else weight

    def mode(self, num_rows: int) -> int:
        return PLAIN

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        if not has_onednn():
            return F.linear(x, self._weight).float()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return y.float()


def int8_product(weight: Tensor, memory: HugePages) -> PackedInt8Linear | Int8Product:
    """8-bit weights with a scale for each output, 8-bit activations with a scale for each row.

    The compiled kernel multiplies them where the CPU has its instructions; it is faster than torch's for few rows and
    for many. Elsewhere fbgemm does, which quantizes by itself, or oneDNN. All sum integers and do the same in floating
    point, so their results are equal to the bit.
    """
    from workers.engine.cpu import kernels  # compiles on the first import

    scales = (weight.abs().amax(1) / 127).clamp_min(TINY)  # each row's largest value is ±127
    weight8 = (weight / scales[:, None]).round().to(torch.int8)
    fits = len(weight8) >= BLOCK and weight8.shape[1] % 4 == 0
    if kernels.HAS_DOT_PRODUCTS and fits:
        return PackedInt8Linear.pack(weight8, scales, memory)
    return Int8Product(weight8, scales)


class Int8Product:
    """An 8-bit weight that torch's fbgemm or oneDNN multiplies.

    Attributes:
        is_row_exact: a row's bits do not depend on the number of rows, so no probe is needed.
    """

    def __init__(self, weight8: Tensor, scales: Tensor) -> None:
        """
        Args:
            weight8: [out, in] int8.
            scales: [out] float32.
        """
        self.is_row_exact = _has_fbgemm()
        self._fbgemm = _pack_for_fbgemm(weight8, scales) if self.is_row_exact else None
        if not self.is_row_exact:
            self._onednn = torch.ops.onednn.qlinear_prepack(weight8, None)
            self._scales, self._zeros = scales, torch.zeros(len(weight8), dtype=torch.long)
        self._num_levels = _num_levels()

    def mode(self, num_rows: int) -> int:
        return UNIT if self._fbgemm is not None else UINT8

    def __call__(self, x: Tensor) -> Tensor:
        if self._fbgemm is not None:
            y: Tensor = _fbgemm_multiply(x, 1 / self._num_levels, self._num_levels + 1, self._fbgemm)
            return y
        # float32 output, not scaled, no bias, nothing fused
        z: Tensor = _onednn_multiply(
            x, 1 / 127, 128, self._onednn, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return z


class HugePages:
    """Allocates memory in pages of 2 MiB, for weights that are read from end to end at each step: fewer TLB misses."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.int8)

    def take(self, num_bytes: int) -> Bytes:
        """`num_bytes` zero bytes, aligned to a cache line; they live as long as the array."""
        if num_bytes > len(self._left):
            # Private: shared memory rarely gets huge pages.
            memory = mmap.mmap(-1, max(num_bytes, ARENA_BYTES) + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            whole = np.frombuffer(memory, np.int8)
            self._left = whole[-whole.ctypes.data % HUGE_PAGE_BYTES :]
        taken, self._left = self._left[:num_bytes], self._left[-(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES :]
        return taken


class PackedInt8Linear:
    """An 8-bit weight in the layout of `kernel_source.int8.multiply`, without bias.

    Attributes:
        packed, starts, factors: as PRODUCT has them.
        address: address of its PRODUCT record.
        is_large: whether it pays to wake other threads for it.
    """

    def __init__(self, packed: Bytes, starts: Tensor, factors: Tensor, *, can_use_amx: bool = True) -> None:
        """
        Args:
            packed: [blocks · inputs · BLOCK], see PRODUCT in `cpu.layouts`.
            starts: [out] int32.
            factors: [out] float32.
            can_use_amx: whether to use AMX where the CPU has it and the shape allows it.
        """
        from workers.engine.cpu import kernels  # compiles on the first import

        self._kernels = kernels
        self._team = kernels.ThreadTeam(torch.get_num_threads())
        self.packed, self.starts, self.factors = packed, starts, factors
        self._num_outputs = len(factors)
        num_inputs = len(packed) // (-(-self._num_outputs // BLOCK) * BLOCK)
        self._parameters = parameters = np.zeros(1, PRODUCT)
        parameters["num_inputs"], parameters["num_outputs"] = num_inputs, self._num_outputs
        parameters["weights_at"] = packed.ctypes.data
        parameters["starts_at"], parameters["factors_at"] = starts.data_ptr(), factors.data_ptr()
        uses_amx = can_use_amx and kernels.HAS_AMX and num_inputs % AMX_BYTES == 0
        parameters["max_dot_rows"] = DOT_ROWS if uses_amx else sys.maxsize
        self.address = parameters.ctypes.data
        self.is_large = num_inputs * self._num_outputs > MIN_SHARED_PRODUCTS

    @classmethod
    def pack(cls, weight8: Tensor, scales: Tensor, memory: HugePages, *, can_use_amx: bool = True) -> PackedInt8Linear:
        """
        Args:
            weight8: [out, in] int8; at least BLOCK outputs, and a multiple of 4 inputs.
            scales: [out] float32.
        """
        num_outputs, num_inputs = weight8.shape
        weights = weight8.numpy()
        firsts = [min(first, num_outputs - BLOCK) for first in range(0, num_outputs, BLOCK)]
        packed = memory.take(len(firsts) * BLOCK * num_inputs)
        blocks = packed.reshape(len(firsts), num_inputs // 4, BLOCK, 4)
        for block, first in zip(blocks, firsts, strict=True):
            block[:] = weights[first : first + BLOCK].reshape(BLOCK, num_inputs // 4, 4).swapaxes(0, 1)
        # The zero point of x is 128: each sum contains 128 · Σ weights too much.
        starts = (-128 * weight8.sum(1, dtype=torch.int32)).contiguous()
        factors = scales * torch.tensor(1 / 127)  # both scales in one, multiplied in oneDNN's and fbgemm's order
        return cls(packed, starts, factors, can_use_amx=can_use_amx)

    def mode(self, num_rows: int) -> int:
        return UINT8

    def precede(self, other: PackedInt8Linear) -> None:
        """Prefetch the first weights of `other`, which a step multiplies next, at the end of this product."""
        self._parameters["next_at"] = other.address

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] uint8 → [rows, out] float32."""
        y = torch.empty(len(x), self._num_outputs)
        assert self._kernels.multiply is not None
        call = self._kernels.KernelCall(self._kernels.multiply, self.address, x.data_ptr(), y.data_ptr())
        self._team.run(call, self.is_large, len(x))
        return y


def int8_kernels() -> str:
    """The name of the kernels that `int8_product` chooses on this CPU: other kernels round a model differently."""
    from workers.engine.cpu import kernels

    if kernels.HAS_DOT_PRODUCTS:
        return "packed"
    return f"fbgemm-{_num_levels()}" if _has_fbgemm() else "onednn"


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def _num_levels() -> int:
    """The largest activation that is given to fbgemm.

    Without VNNI, pairs of products are summed in 16 bits: half the range keeps them from overflowing.
    """
    return 127 if cpu_features.read().has_avx512_vnni else 63


_fbgemm_multiply = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
_onednn_multiply = torch.ops.onednn.qlinear_pointwise.default


def _pack_for_fbgemm(weight8: Tensor, scales: Tensor) -> torch.ScriptObject:
    zeros = torch.zeros(len(scales), dtype=torch.long)
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    with warnings.catch_warnings():
        # torch 2.13 deprecates quantized tensors; their announced replacement has no kernel as fast as this one.
        warnings.simplefilter("ignore")
        quantized = torch._make_per_channel_quantized_tensor(weight8, scales.double(), zeros, 0)
        packed: torch.ScriptObject = torch.ops.quantized.linear_prepack(quantized, None)
    torch.backends.quantized.engine = engine
    return packed
