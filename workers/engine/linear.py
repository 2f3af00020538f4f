"""Linear layers whose every output row has the same bits whatever rows are computed beside it.

Knows matrix kernels and their habits. Refuses to know what the layers are for.

A matrix kernel picks its order of summation by the shape it is given, so a row computed among 3
rows can differ, in its last bits, from the same row computed among 64. Two rules keep that out:
only row counts from `ROW_COUNTS` are computed (the rest are padded), and of these only the ones
that were seen, on this machine and for this very layer, to agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# Row counts to compute with. Kernels that are compiled for a shape are compiled for these only.
ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

Kernel = Callable[[Tensor], Tensor]  # [rows, in] float32 → [rows, out] float32


class Linear:
    """y = x · Wᵀ + b, float32 in and out; row-exact (see the module)."""

    def __init__(self, kernel: Kernel, in_features: int) -> None:
        self._kernel = kernel
        self.row_counts = _agreeing_row_counts(kernel, in_features)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] → [rows, out]."""
        num_rows = len(x)
        if num_rows in self.row_counts:
            return self._kernel(x)
        largest = self.row_counts[-1]
        if num_rows > largest:
            return torch.cat([self(piece) for piece in torch.split(x, largest)])
        padded = next(count for count in self.row_counts if count > num_rows)
        return self._kernel(F.pad(x, (0, 0, 0, padded - num_rows)))[:num_rows]


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """A layer from its float32 weight [out, in] and bias [out]."""
    return Linear(_fp32_kernel(weight, bias), weight.shape[1])


def _fp32_kernel(weight: Tensor, bias: Tensor | None) -> Kernel:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return lambda x: F.linear(x, weight, bias)
    # oneDNN's kernels on a packed weight: faster than MKL's at few rows, and less moody about them.
    ops = torch.ops.mkldnn
    packed = ops._reorder_linear_weight(weight, 16)

    def kernel(x: Tensor) -> Tensor:
        y: Tensor = ops._linear_pointwise(x, packed, bias, "none", [], "")
        return y

    return kernel


def _agreeing_row_counts(kernel: Kernel, in_features: int) -> tuple[int, ...]:
    """The row counts, ascending, that give every row the bits that 16 rows give it.

    Random rows show the order of summation: were two orders different, the 16 rows × out
    features compared would hardly all round alike.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROW_COUNTS[-1], in_features, generator=generator)
    pieces = [kernel(piece) for piece in torch.split(x, 16)]
    reference = torch.cat(pieces)
    return tuple(count for count in ROW_COUNTS if torch.equal(kernel(x[:count]), reference[:count]))
