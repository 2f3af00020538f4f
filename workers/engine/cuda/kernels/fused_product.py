"""A linear layer of few rows as one Triton kernel, with the norm before it and what follows it.

Knows tensors of one product. Does not know layers, and which block sizes suit a model: `fused_layer` does.

The order of summation is fixed, so a row of the result has the same bits whatever the number of rows:

- A block computes ROWS rows and COLUMNS columns over the whole depth; more rows are more blocks. No block sees the
  number of blocks, and nothing is added up between blocks.
- A product is the sum of SPLITS partial products. Warp s adds up split s of each chunk, chunk after chunk; then the
  partial products are added in the order of one reduction tree.
- The rows of a tile are the rows of tensor-core instructions (mma.m16n8k16): all elements of the result are made by
  the same instructions in the same order. Rows that are missing are zeros.
- A norm adds up its row in an order that depends on the depth and the block sizes only.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005
# Triton has no type hints, and reads those of its kernels itself: they must not become strings. Its tuples
# can be added, but not unpacked.

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["rows"])
def fused_product(
    x,
    norm_weight,
    norm_bias,
    weight,
    bias,
    residual,
    out,
    rows,
    epsilon,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GELU: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRELOADED: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    IS_WIDENED: tl.constexpr,
):
    """out ← gelu(norm(x) · weightᵀ + bias) + residual, without the parts that its flags exclude.

    Args:
        x: [rows, DEPTH].
        norm_weight, norm_bias: [DEPTH]; not read without HAS_NORM.
        weight: [WIDTH, DEPTH], in the dtype of `x`.
        bias: [WIDTH]; not read without HAS_BIAS.
        residual: [rows, WIDTH], may be `out`; not read without HAS_RESIDUAL.
        out: [rows, WIDTH], rows STRIDE elements apart, rounded once to its dtype.
        SPLITS, SPLIT: a chunk of the depth is SPLITS times SPLIT elements. SPLITS is the number of warps.
        PRELOADED: chunks of weights that are loaded before what precedes this kernel has ended.
        IS_DEPENDENT: compiled for programmatic dependent launch (compute capability 9.0 and newer).
        IS_WIDENED: multiplies in float32: Triton's interpreter has no product of bfloat16.
    """
    CHUNK: tl.constexpr = SPLITS * SPLIT
    NUM_CHUNKS: tl.constexpr = (DEPTH + CHUNK - 1) // CHUNK
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, CHUNK)
    is_row = row < rows
    is_column = column < WIDTH
    x_rows = x + row[:, None] * DEPTH
    weight_rows = weight + column[:, None] * DEPTH

    # Only what no kernel writes is read before the wait.
    weights = ()
    for chunk in tl.static_range(PRELOADED):
        at = chunk * CHUNK + lane
        is_read = is_column[:, None] & (at < DEPTH)[None, :]
        weights = weights + (tl.load(weight_rows + at[None, :], mask=is_read, other=0.0),)
    gains = ()
    shifts = ()
    if HAS_NORM:
        for chunk in tl.static_range(NUM_CHUNKS):
            at = chunk * CHUNK + lane
            gains = gains + (tl.load(norm_weight + at, mask=at < DEPTH, other=0.0),)
            shifts = shifts + (tl.load(norm_bias + at, mask=at < DEPTH, other=0.0),)
    if HAS_BIAS:
        biases = tl.load(bias + column, mask=is_column, other=0.0)
    if IS_DEPENDENT:
        # The next kernel may start as soon as all blocks of this one run; it waits for their end, as this one does.
        gdc_launch_dependents()
        gdc_wait()

    is_written = is_row[:, None] & is_column[None, :]
    if HAS_RESIDUAL:
        residuals = tl.load(residual + row[:, None] * WIDTH + column[None, :], mask=is_written, other=0.0)
    parts = ()
    if HAS_NORM:
        total = tl.zeros((ROWS, CHUNK), tl.float32)
        for chunk in tl.static_range(NUM_CHUNKS):
            at = chunk * CHUNK + lane
            is_read = is_row[:, None] & (at < DEPTH)[None, :]
            parts = parts + (tl.load(x_rows + at[None, :], mask=is_read, other=0.0),)
            total += parts[chunk].to(tl.float32)
        mean = tl.sum(total, 1)[:, None] / DEPTH
        squares = tl.zeros((ROWS, CHUNK), tl.float32)
        for chunk in tl.static_range(NUM_CHUNKS):
            at = chunk * CHUNK + lane
            difference = tl.where((at < DEPTH)[None, :], parts[chunk].to(tl.float32) - mean, 0.0)
            squares += difference * difference
        scale = tl.rsqrt(tl.sum(squares, 1) / DEPTH + epsilon)[:, None]

    products = tl.zeros((SPLITS, ROWS, COLUMNS), tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        at = chunk * CHUNK + lane
        if HAS_NORM:
            normed = (parts[chunk].to(tl.float32) - mean) * scale
            normed = normed * gains[chunk].to(tl.float32)[None, :] + shifts[chunk].to(tl.float32)[None, :]
            left = normed.to(x.dtype.element_ty)
        else:
            left = tl.load(x_rows + at[None, :], mask=is_row[:, None] & (at < DEPTH)[None, :], other=0.0)
        if chunk < PRELOADED:
            right = weights[chunk]
        else:
            is_read = is_column[:, None] & (at < DEPTH)[None, :]
            right = tl.load(weight_rows + at[None, :], mask=is_read, other=0.0)
        if IS_WIDENED:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        left = tl.permute(tl.reshape(left, (ROWS, SPLITS, SPLIT)), (1, 0, 2))
        right = tl.permute(tl.reshape(right, (COLUMNS, SPLITS, SPLIT)), (1, 2, 0))
        products = tl.dot(left, right, products, input_precision="ieee")
    y = tl.sum(products, 0)
    if HAS_BIAS:
        y += biases.to(tl.float32)[None, :]
    if HAS_GELU:
        # As `gelu_new`: y · σ(2u), u = √(2/π) · (y + 0.044715 y³).
        y = y / (1 + tl.exp(-2 * 0.7978845608028654 * (y + 0.044715 * y * y * y)))
    if HAS_RESIDUAL:
        y += residuals.to(tl.float32)
    tl.store(out + row[:, None] * STRIDE + column[None, :], y.to(out.dtype.element_ty), mask=is_written)
