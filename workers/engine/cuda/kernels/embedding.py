"""The first kernel of a decode step: the embedded tokens."""
# mypy: ignore-errors
# Triton has no type hints, and reads those of its kernels itself: they must not become strings.

import triton
import triton.language as tl

from workers.engine.cuda import step_kernels
from workers.engine.cuda.kernels.compile import Kernel

# Rows of the table.
ID, POSITION = tl.constexpr(step_kernels.ID), tl.constexpr(step_kernels.POSITION)


@triton.jit(do_not_specialize=["table_stride"])
def _begin(
    table,
    token_embedding,
    position_embedding,
    x,
    table_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    """One sequence's embedded token, with its position if HAS_POSITIONS.

    It starts after all kernels before it, and those of its step after it. So they may read the table and the keys and
    values of earlier tokens before they wait for the kernel before them.
    """
    column = tl.program_id(0)
    token = tl.load(table + ID * table_stride + column).to(tl.int64)
    if HAS_POSITIONS:
        position = tl.load(table + POSITION * table_stride + column).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < WIDTH
    embedded = tl.load(token_embedding + token * WIDTH + dims, mask=is_dim, other=0.0).to(tl.float32)
    if HAS_POSITIONS:
        embedded += tl.load(position_embedding + position * WIDTH + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(x + column.to(tl.int64) * WIDTH + dims, embedded.to(x.dtype.element_ty), mask=is_dim)


BEGIN = Kernel(_begin)
