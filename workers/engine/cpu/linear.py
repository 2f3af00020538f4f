"""Linear layers on a CPU whose every output row has the same bits whatever rows are computed with it.

Knows matrix kernels and their orders of summation; knows no model.

torch's kernels may choose their order of summation by the shape of their input, so a row among 3 rows can differ in its
last bits from the same row among 64. So only row counts from `ROW_COUNTS` are computed, by padding, and of these only
the ones that a probe found, on this machine and for this shape of layer, to agree with each other. The packed 8-bit
kernel sums integers, so any number of rows is exact.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared import cpu_features
from workers.engine.cpu.layouts import AMX_BYTES, DOT_ROWS, INT8, PLAIN, PRODUCT
from workers.engine.cpu.team import KernelCall, ThreadTeam
from workers.engine.cpu_kernels import Kernels, load_kernels
from workers.engine.devices import has_onednn
from workers.engine.model.linear import MAX_HEAD_ROWS

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
    """x · Wᵀ of one weight, float32; where rows have scales, the result is to be multiplied with them.

    Attributes:
        mode: how rows are to be handed over, PLAIN or INT8 (`cpu.layouts`).
    """

    @property
    def mode(self) -> int: ...

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] in their mode → [rows, out] float32."""

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [rows, in] float32 in the product's mode, and their scales [rows, 1]; `norms.c` does the same."""


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
        rest = next(count for count in self.row_counts if count >= max(rest, PROBE_ROWS)) if rest else 0
        return whole * largest + rest

    def multiply(self, x: Tensor) -> Tensor:
        """[padded rows, in] in their mode → [padded rows, out], neither scaled nor with the bias."""
        if self.row_counts is None or len(x) <= self.row_counts[-1]:
            return self.product(x)
        return torch.cat([self.product(piece) for piece in torch.split(x, self.row_counts[-1])])

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out], float32 both: the whole layer."""
        padded = F.pad(x, (0, 0, 0, self.padded(len(x)) - len(x)))
        ready, scales = self.product.prepare(padded)
        y = self.multiply(ready)[: len(x)] * scales[: len(x)]
        return y if self.bias is None else y + self.bias


class LinearMaker:
    """Makes the linear layers of one model; probes each shape once."""

    def __init__(self, dtype: str, kernels: Kernels | None = None) -> None:
        """
        Args:
            dtype: data type of the weights: fp32, bf16 or int8.
            kernels: that multiply int8; by default this CPU's best.

        Raises:
            ValueError: if `dtype` is another.
        """
        makers: dict[str, Callable[[Tensor], Product]] = {
            "fp32": FloatProduct,
            "bf16": partial(FloatProduct, dtype=torch.bfloat16),
            "int8": partial(PackedInt8Linear.quantize, memory=HugePages(), kernels=kernels),
        }
        if dtype not in makers:
            raise ValueError(f"cpu does not support dtype {dtype}; choose {', '.join(makers)}")
        self._make_product = makers[dtype]
        self._row_counts: dict[tuple[int, ...], tuple[int, ...] | None] = {}

    def __call__(self, weight: Tensor, bias: Tensor | None, is_head: bool = False, /) -> CpuLinear:
        """A layer from its float32 weight [out, in] and bias [out]. Of the head, more than MAX_HEAD_ROWS rows are
        computed in pieces."""
        max_rows = MAX_HEAD_ROWS if is_head else ROW_COUNTS[-1]
        product = self._make_product(weight)
        if is_head and bias is not None and isinstance(product, PackedInt8Linear):
            product.mask(bias)  # a program adds no bias to the logits
            bias = None
        shape = tuple(weight.shape)
        if shape not in self._row_counts:
            counts = [count for count in ROW_COUNTS if count <= max_rows]
            self._row_counts[shape] = _agreeing_row_counts(product, weight.shape[1], counts)
        return CpuLinear(product, bias, self._row_counts[shape])


def _agreeing_row_counts(product: Product, in_features: int, counts: Sequence[int]) -> tuple[int, ...] | None:
    """Those of `counts`, ascending, that give every row the bits that `PROBE_ROWS` rows give it; None: any number does.

    Random rows reveal the order of summation: with a different order, some of the many sums would round differently.
    """
    if product.mode == INT8:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(counts[-1], in_features, generator=generator)
    reference = torch.cat([product(piece) for piece in torch.split(x, PROBE_ROWS)])
    return tuple(count for count in counts if torch.equal(product(x[:count]), reference[:count]))


class FloatProduct:
    """float32 or bf16 weights, packed for oneDNN: for few rows faster than MKL, and its times vary less.

    For bf16, activations are rounded for the product and stay float32 elsewhere.
    """

    mode = PLAIN

    def __init__(self, weight: Tensor, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        weight = weight.to(dtype)
        num_rows = PROBE_ROWS if dtype == torch.float32 else 1
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows) if has_onednn() else weight

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.ones(len(x), 1)

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        if not has_onednn():
            return F.linear(x, self._weight).float()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
        return y.float()


class HugePages:
    """Allocates memory in pages of 2 MiB, for weights that are read from end to end at each step: fewer TLB misses."""

    def __init__(self) -> None:
        self._left = np.empty(0, np.int8)

    def take(self, num_bytes: int) -> Bytes:
        """`num_bytes` zero bytes, aligned to a cache line; they live as long as the array."""
        if num_bytes > len(self._left):
            # Private: shared memory rarely gets huge pages.
            memory = mmap.mmap(-1, max(num_bytes, ARENA_BYTES) + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # only Linux has it
                with suppress(OSError):  # a kernel without huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
            whole = np.frombuffer(memory, np.int8)
            self._left = whole[-whole.ctypes.data % HUGE_PAGE_BYTES :]
        taken, self._left = self._left[:num_bytes], self._left[-(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES :]
        return taken


class PackedInt8Linear:
    """An 8-bit weight in the layout of `kernel_source/int8.c`, without bias; 8-bit activations with a scale per row.

    Attributes:
        packed, starts, factors: as PRODUCT has them.
        address: address of its PRODUCT record.
        is_large: whether it pays to wake other threads for it.
    """

    mode = INT8

    def __init__(
        self,
        packed: Bytes,
        starts: Tensor,
        factors: Tensor,
        num_outputs: int,
        kernels: Kernels | None = None,
        *,
        can_use_amx: bool = True,
    ) -> None:
        """
        Args:
            packed: [blocks · inputs · BLOCK], see PRODUCT in `cpu.layouts`.
            starts: [blocks · BLOCK] int32.
            factors: [blocks · BLOCK] float32.
            kernels: those that it is packed for.
            can_use_amx: whether to use AMX where the CPU has it and the shape allows it.
        """
        self._kernels = kernels = kernels or load_kernels()
        self._team = ThreadTeam(kernels, torch.get_num_threads())
        self.packed, self.starts, self.factors, self.num_outputs = packed, starts, factors, num_outputs
        self._num_inputs = num_inputs = len(packed) // len(factors)
        self._parameters = parameters = np.zeros(1, PRODUCT)
        parameters["num_inputs"], parameters["num_outputs"] = num_inputs, num_outputs
        parameters["weights_at"] = packed.ctypes.data
        parameters["starts_at"], parameters["factors_at"] = starts.data_ptr(), factors.data_ptr()
        uses_amx = can_use_amx and kernels.has_amx and num_inputs % AMX_BYTES == 0
        parameters["max_dot_rows"] = DOT_ROWS if uses_amx else sys.maxsize
        parameters["prefetches_all"] = not cpu_features.read().prefetches_well
        self.address = parameters.ctypes.data
        self.is_large = num_inputs * num_outputs > MIN_SHARED_PRODUCTS

    @classmethod
    def quantize(cls, weight: Tensor, memory: HugePages, kernels: Kernels | None = None) -> PackedInt8Linear:
        """From a float32 weight [out, in]: a scale for each output, so that its largest weight is ±127."""
        scales = (weight.abs().amax(1) / 127).clamp_min(TINY)
        return cls.pack((weight / scales[:, None]).round().to(torch.int8), scales, memory, kernels)

    @classmethod
    def pack(
        cls,
        weight8: Tensor,
        scales: Tensor,
        memory: HugePages,
        kernels: Kernels | None = None,
        *,
        can_use_amx: bool = True,
    ) -> PackedInt8Linear:
        """
        Args:
            weight8: [out, in] int8, none −128.
            scales: [out] float32.
        """
        kernels = kernels or load_kernels()
        num_outputs, num_inputs = weight8.shape
        num_blocks, num_fours = -(-num_outputs // kernels.block), -(-num_inputs // 4)
        missing = num_blocks * kernels.block - num_outputs
        padded = F.pad(weight8, (0, 4 * num_fours - num_inputs, 0, missing))
        packed = memory.take(padded.numel())
        by_block = padded.numpy().reshape(num_blocks, kernels.block, num_fours, 4)
        packed.reshape(num_blocks, num_fours, kernels.block, 4)[:] = by_block.swapaxes(1, 2)
        # What each sum contains too much or too little (`int8.c`).
        weights = padded.clamp(max=0) if kernels.inverts else kernels.zero_point * padded.int()
        starts = (-weights.sum(1, dtype=torch.int32)).contiguous()
        factors = F.pad(scales * torch.tensor(1 / 127), (0, missing))  # both scales in one
        return cls(packed, starts, factors, num_outputs, kernels, can_use_amx=can_use_amx)

    def mask(self, bias: Tensor) -> None:
        """Make the outputs whose `bias` [out] is NEVER that, times a row's scale, whatever the input is."""
        masked, block = bias.nonzero()[:, 0].numpy(), self._kernels.block
        self.packed.reshape(len(self.starts) // block, -1, block, 4)[masked // block, :, masked % block] = 0
        self.starts[masked], self.factors[masked] = 1, bias[masked]

    def precede(self, other: PackedInt8Linear) -> None:
        """Prefetch the first weights of `other`, which a step multiplies next, at the end of this product."""
        self._parameters["next_at"] = other.address

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales = x.abs().amax(-1, keepdim=True).clamp_min_(TINY)
        # One rounding for product and sum.
        levels = torch.add(torch.tensor(128.0), x / scales, alpha=127).round_().int() - 128 + self._kernels.zero_point
        return F.pad(levels, (0, self._num_inputs - x.shape[-1])).to(torch.uint8), scales

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs, padded to a multiple of 4] uint8 → [rows, out] float32."""
        y = torch.empty(len(x), self.num_outputs)
        self._team.run(
            KernelCall(self._kernels.multiply, self.address, x.data_ptr(), y.data_ptr()), self.is_large, len(x)
        )
        return y
