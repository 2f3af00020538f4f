"""A linear layer of a decode step as one kernel, with the norm before it and what follows it.

The order of summation is fixed, so a row of the result has the same bits whatever the other rows are:

- A block computes 8 · GROUPS columns over the whole depth. Nothing is added up between blocks.
- A product is the sum of SPLITS partial products. Warp s adds up 32 elements of each chunk of the depth, chunk after
  chunk; then the partial products are added in the order of one reduction tree.
- All elements are computed by the same tensor-core instructions (mma.m16n8k16), also of rows that are missing.

Tiles are loaded as those instructions take them: 4 threads of a row have 8 consecutive elements each. So operands need
no shared memory, and all loads of a thread are in flight at once. The order of the depth within 32 elements is that of
the instructions, the same for both operands.

Weights are no kernel's result, so a block loads them while the kernel before it is running, and waits then
(programmatic dependent launch). Knows tensors of one product. Does not know layers.
"""
# mypy: ignore-errors
# ruff: noqa: RUF005
# Triton has no type hints, and reads those of its kernels itself: they must not become strings. Its tuples
# can be added, but not unpacked.

from functools import cache

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from workers.engine.cuda.kernels.compile import Kernel

MAX_PRELOADED = 64  # registers of 4 bytes with weights
MAX_EARLY = 6  # chunks
MAX_HALVES_DEPTH = 4096  # more elements of 16 rows do not fit in registers


@tl.core.extern
def _zero_after_loads(_semantic=None):
    """0, known once all threads of the block have issued their loads: what depends on it cannot be moved between them,
    where ptxas waits for the first load before it issues the next."""
    barrier = "{ .reg .pred p; setp.ne.u32 p, 0, 0; barrier.cta.red.popc.aligned.u32 $0, 0, p; }"
    return tl.core.inline_asm_elementwise(barrier, "=r", [], dtype=tl.int32, is_pure=False, pack=1, _semantic=_semantic)


@triton.jit
def _depth(chunk: tl.constexpr, SPLITS: tl.constexpr):
    """[1, SPLITS, 1, 32], the elements of a chunk."""
    at = tl.arange(0, SPLITS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return (chunk * SPLITS * 32 + at)[None, :, None, :]


@triton.jit
def _load_weights(
    weight,
    first_column,
    group: tl.constexpr,
    chunk: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """[8, SPLITS, 1, 32]: a chunk of the 8 rows of `weight` of a group of columns."""
    column = (first_column + (0 if IS_GATED else 8 * group) + tl.arange(0, 8))[:, None, None, None]
    row = column + (group * WIDTH if IS_GATED else 0)
    at = _depth(chunk, SPLITS)
    return tl.load(weight + row.to(tl.int64) * DEPTH + at, mask=(column < WIDTH) & (at < DEPTH), other=0.0)


@triton.jit
def _load_rows(
    x, first_row, rows, chunk: tl.constexpr, HALVES: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr
):
    """[8, SPLITS, HALVES, 32]: a chunk of 8 · HALVES rows of `x`."""
    row = (first_row + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, HALVES)[None, :])[:, None, :, None]
    at = _depth(chunk, SPLITS)
    return tl.load(x + row.to(tl.int64) * DEPTH + at, mask=(row < rows) & (at < DEPTH), other=0.0)


@triton.jit
def _ordered(tile, HALVES: tl.constexpr, SPLITS: tl.constexpr):
    """[8, SPLITS, HALVES, 32], of whose last dimension a thread has 8 consecutive elements → [SPLITS, 8 · HALVES, 32]
    in the order in which the instructions count a thread's elements: 4 of each 16."""
    parts = tl.reshape(tile, (8, SPLITS, HALVES, 4, 2, 2, 2))
    return tl.reshape(tl.permute(parts, (1, 2, 0, 4, 5, 3, 6)), (SPLITS, 8 * HALVES, 32))


@triton.jit
def _sum_rows(tile):
    """[8, SPLITS, HALVES, 32] → [8, 1, HALVES, 1]."""
    return tl.sum(tl.sum(tile, 3), 1)[:, None, :, None]


@triton.jit
def _load_norm(vector, chunk: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr):
    """[8, SPLITS, 1, 32]: a chunk of a norm's weight or bias, for each row, so that a thread loads what it uses."""
    at = _depth(chunk, SPLITS) + tl.zeros((8,), tl.int32)[:, None, None, None]
    return tl.load(vector + at, mask=at < DEPTH, other=0.0)


@triton.jit
def _norm(
    parts,
    norm_weight,
    norm_bias,
    gains,
    shifts,
    epsilon,
    HALVES: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
    IS_RMS: tl.constexpr,
):
    """The norm of `parts`, the chunks of a tile, rounded to their dtype."""
    mean = 0.0
    if not IS_RMS:
        total = tl.zeros((8, SPLITS, HALVES, 32), tl.float32)
        for chunk in tl.static_range(len(parts)):
            total += parts[chunk].to(tl.float32)
        mean = _sum_rows(total) / DEPTH
    squares = tl.zeros((8, SPLITS, HALVES, 32), tl.float32)
    for chunk in tl.static_range(len(parts)):
        difference = tl.where(_depth(chunk, SPLITS) < DEPTH, parts[chunk].to(tl.float32) - mean, 0.0)
        squares += difference * difference
    scale = tl.rsqrt(_sum_rows(squares) / DEPTH + epsilon)
    out = ()
    for chunk in tl.static_range(len(parts)):
        if chunk < len(gains):
            gain = gains[chunk].to(tl.float32)
            if not IS_RMS:
                shift = shifts[chunk].to(tl.float32)
        else:
            gain = _load_norm(norm_weight, chunk, SPLITS, DEPTH).to(tl.float32)
            if not IS_RMS:
                shift = _load_norm(norm_bias, chunk, SPLITS, DEPTH).to(tl.float32)
        normed = (parts[chunk].to(tl.float32) - mean) * scale * gain
        if not IS_RMS:
            normed += shift
        out = out + (normed.to(parts[chunk].dtype),)
    return out


@triton.jit
def _half(product, HALF: tl.constexpr, SPLITS: tl.constexpr):
    """[SPLITS, 16, 8] → [SPLITS, 8, 8], the rows of one half."""
    lower, upper = tl.split(tl.permute(tl.reshape(product, (SPLITS, 2, 8, 8)), (0, 2, 3, 1)))
    if HALF == 0:
        return lower
    return upper


@triton.jit(do_not_specialize=["rows"])
def _product(
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
    HAS_NORM: tl.constexpr,
    IS_RMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HALVES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_LOOP: tl.constexpr,
    PRELOADED: tl.constexpr,
    EARLY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """out ← activation(norm(x) · weightᵀ + bias) + residual, without the parts that its flags exclude.

    Args:
        x: [rows, DEPTH].
        norm_weight, norm_bias: [DEPTH]; not read without HAS_NORM, and the bias not if IS_RMS.
        weight: [WIDTH, DEPTH], in the dtype of `x`; if IS_GATED [2 · WIDTH, DEPTH], the gate's rows first.
        bias: [WIDTH] or [2 · WIDTH]; not read without HAS_BIAS.
        residual: [rows, WIDTH], may be `out`; not read without HAS_RESIDUAL.
        out: [rows, WIDTH].
        ACTIVATION: "gelu" (its tanh form), "silu", or "" for none.
        IS_GATED: the activation of one half of the columns is multiplied by the other half. GROUPS is 2.
        HALVES: a block computes 8 · HALVES rows at a time.
        IS_LOOP: there are more rows.
        SPLITS: the number of warps; a chunk of the depth is 32 elements for each.
        PRELOADED: chunks of weights that are loaded before what precedes this kernel has ended.
        EARLY: the same of the norm's weights.
        IS_DEPENDENT: compiled for programmatic dependent launch (compute capability 9.0 and newer).
        IS_INTERPRETED: multiplies in float32: Triton's interpreter has no product of bfloat16.
    """
    CHUNK: tl.constexpr = SPLITS * 32
    NUM_CHUNKS: tl.constexpr = (DEPTH + CHUNK - 1) // CHUNK
    COLUMNS: tl.constexpr = 8 if IS_GATED else 8 * GROUPS
    first_column = tl.program_id(0) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    if IS_DEPENDENT:
        # The next kernel may start as soon as all blocks of this one run; it waits for their end, as this one does.
        gdc_launch_dependents()

    # Only what no kernel of this step writes is read before the wait.
    weights = ()
    for chunk in tl.static_range(PRELOADED):
        for group in tl.static_range(GROUPS):
            tile = _load_weights(weight, first_column, group, chunk, SPLITS, DEPTH, WIDTH, IS_GATED)
            weights = weights + (tile,)
    gains = ()
    shifts = ()
    for chunk in tl.static_range(EARLY if HAS_NORM else 0):
        gains = gains + (_load_norm(norm_weight, chunk, SPLITS, DEPTH),)
        if not IS_RMS:
            shifts = shifts + (_load_norm(norm_bias, chunk, SPLITS, DEPTH),)
    biases = ()
    if HAS_BIAS:
        for part in tl.static_range(2 if IS_GATED else 1):
            biases = biases + (tl.load(bias + part * WIDTH + column, mask=is_column, other=0.0),)
    if IS_DEPENDENT:
        gdc_wait()
    # One tile is no loop to the compiler: Triton 3.7 keeps in shared memory what a loop multiplies by.
    for first_row in range(0, rows if IS_LOOP else 8 * HALVES, 8 * HALVES):
        if HAS_RESIDUAL:
            residuals = ()
            for half in tl.static_range(HALVES):
                row = first_row + 8 * half + tl.arange(0, 8)
                at = residual + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
                residuals = residuals + (tl.load(at, mask=(row < rows)[:, None] & is_column[None, :], other=0.0),)
        parts = ()
        for chunk in tl.static_range(NUM_CHUNKS):
            parts = parts + (_load_rows(x, first_row, rows, chunk, HALVES, SPLITS, DEPTH),)
        if HAS_NORM:
            parts = _norm(parts, norm_weight, norm_bias, gains, shifts, epsilon, HALVES, SPLITS, DEPTH, IS_RMS)

        zeros = tl.zeros((SPLITS, 16, 8), tl.float32)
        if not IS_INTERPRETED and not HAS_NORM:
            zeros += _zero_after_loads().to(tl.float32)
        products = (zeros,)
        if GROUPS == 2:
            products = (zeros, zeros)
        for chunk in tl.static_range(NUM_CHUNKS):
            left = _ordered(parts[chunk], HALVES, SPLITS)
            if HALVES == 1:
                # The instructions have 16 rows: the upper 8 are the lower again, and are ignored.
                both = tl.broadcast_to(left[:, None, :, :], (SPLITS, 2, 8, 32))
                left = tl.reshape(both, (SPLITS, 16, 32))
            if IS_INTERPRETED:
                left = left.to(tl.float32)
            sums = ()
            for group in tl.static_range(GROUPS):
                if chunk * GROUPS + group < len(weights):
                    right = weights[chunk * GROUPS + group]
                else:
                    right = _load_weights(weight, first_column, group, chunk, SPLITS, DEPTH, WIDTH, IS_GATED)
                if IS_INTERPRETED:
                    right = right.to(tl.float32)
                right = tl.permute(_ordered(right, 1, SPLITS), (0, 2, 1))
                sums = sums + (tl.dot(left, right, products[group], input_precision="ieee"),)
            products = sums

        for half in tl.static_range(HALVES):
            row = first_row + 8 * half + tl.arange(0, 8)
            y = _half(products[0], half, SPLITS)
            if GROUPS == 2 and not IS_GATED:
                y = tl.permute(tl.join(y, _half(products[1], half, SPLITS)), (0, 1, 3, 2))
            y = tl.sum(tl.reshape(y, (SPLITS, 8, COLUMNS)), 0)
            if HAS_BIAS:
                y += biases[0].to(tl.float32)[None, :]
            if ACTIVATION == "gelu":
                # As `gelu_new`: y · σ(2u), u = √(2/π) · (y + 0.044715 y³).
                y = y / (1 + tl.exp(-2 * 0.7978845608028654 * (y + 0.044715 * y * y * y)))
            elif ACTIVATION == "silu":
                y = y / (1 + tl.exp(-y))
            if IS_GATED:
                up = tl.sum(_half(products[1], half, SPLITS), 0)
                if HAS_BIAS:
                    up += biases[1].to(tl.float32)[None, :]
                y *= up
            if HAS_RESIDUAL:
                # Rounded before it is added, as where a product and the addition are kernels of their own.
                y = y.to(x.dtype.element_ty).to(tl.float32) + residuals[half].to(tl.float32)
            target = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
            tl.store(target, y.to(out.dtype.element_ty), mask=(row < rows)[:, None] & is_column[None, :])


@cache
def product_kernel(num_warps: int) -> Kernel:
    """`_product` for a number of warps."""
    return Kernel(_product, num_warps=num_warps, num_stages=1)


def divide(depth: int, num_rows: int, *, has_norm: bool) -> dict[str, int]:
    """How a product is divided: the constants GROUPS, SPLITS, HALVES, IS_LOOP, PRELOADED and EARLY.

    Measured on an H200 with the products of GPT-2 small and medium. No division changes the bits of a row: SPLITS
    follows from the depth, and the others order no sum.
    """
    num_warps = 4 if depth <= 1024 else 8
    num_chunks = -(-depth // (32 * num_warps))
    groups = 2 if has_norm else 1
    halves = 1 if num_rows <= 8 or depth > MAX_HALVES_DEPTH else 2
    return {
        "GROUPS": groups,
        "SPLITS": num_warps,
        "HALVES": halves,
        "IS_LOOP": num_rows > 8 * halves,
        "PRELOADED": min(num_chunks, MAX_PRELOADED // (4 * groups)),
        # More would not leave enough registers.
        "EARLY": num_chunks if has_norm and num_rows <= 8 and num_chunks <= MAX_EARLY else 0,
    }
