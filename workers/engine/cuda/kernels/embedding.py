"""The first kernel of a decode step: the table's integers, and the embedded tokens."""
# mypy: ignore-errors
# Triton has no type hints, and reads those of its kernels itself: they must not become strings.

import triton
import triton.language as tl

from workers.engine.cuda.kernels.compile import Kernel

ROWS = 8  # read together: a power of two of at least TEMPERATURE


@triton.jit(do_not_specialize=["table_stride", "size"])
def _begin(
    table,
    token_embedding,
    position_embedding,
    integers,
    x,
    table_stride,
    size,
    ID: tl.constexpr,
    POSITION: tl.constexpr,
    NUM_INTEGERS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One sequence: its column of the table [rows, size] float64 as integers, and its embedded token."""
    column = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    is_row = rows < NUM_INTEGERS
    numbers = tl.load(table + rows * table_stride + column, mask=is_row, other=0.0).to(tl.int64)
    tl.store(integers + rows * size + column, numbers, mask=is_row)

    token = tl.load(table + ID * table_stride + column).to(tl.int64)
    position = tl.load(table + POSITION * table_stride + column).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    is_dim = dims < WIDTH
    tokens = tl.load(token_embedding + token * WIDTH + dims, mask=is_dim, other=0.0).to(tl.float32)
    positions = tl.load(position_embedding + position * WIDTH + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(x + column.to(tl.int64) * WIDTH + dims, (tokens + positions).to(x.dtype.element_ty), mask=is_dim)


BEGIN = Kernel(_begin)
