"""The product of 8-bit activations and packed 8-bit weights, with AVX-512 VNNI and AMX.

Formula, for x [rows, inputs] uint8 and W [outputs, inputs] int8:

    out[row, o] = float32(starts[o] + Σᵢ x[row, i] · W[o, i]) · factors[o]

Sums are int32 and exact, whatever their order; each output is rounded twice, to float32 and by the factor. `starts`
removes the zero point of x: −128 · Σᵢ W[o, i].

VNNI serves few rows: `vpdpbusd` adds four products to each of 16 sums, and a block's weights are read once for up to
DOT_ROWS rows. AMX serves more.

Weights are prefetched into L2. An Intel CPU prefetches by itself, but not across a page, and too late where a row's
products leave it little to do. While a block is multiplied with a few rows, the next block is prefetched in
PREFETCH_STREAMS places at once (a power of two), which keeps more memory banks busy than one stream. AMD's prefetchers
do better alone: on Zen 5 a step of three rows of GPT-2 small's shape takes 3.0 ms; with prefetching 3.2 ms in one
stream, 3.6 ms in eight. Where more than DOT_ROWS rows meet a block group after group, nothing of the next block would
be read meanwhile: each group prefetches a part of it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from workers.engine.cpu.kernel_image import request_amx
from workers.engine.cpu.kernel_source.ir import (
    FAST,
    I8,
    I16,
    I32,
    I64,
    INTS,
    KERNEL,
    call_llvm,
    const,
    dispatch,
    emits,
    load,
    load_floats,
    load_ints,
    loop,
    plus,
    prefetch_line,
    record,
    splat,
    store,
    store_vector,
    times,
)
from workers.engine.cpu.kernel_source.partition import claim
from workers.engine.cpu.layouts import AMX_BYTES, AMX_ROWS, BLOCK, CALL, DOT_ROWS, PRODUCT, VECTOR

_FEATURES = binding.get_host_cpu_features()
HAS_DOT_PRODUCTS = bool(_FEATURES.get("avx512vnni"))
HAS_AMX = bool(HAS_DOT_PRODUCTS and _FEATURES.get("amx-int8") and request_amx())

NUM_VECTORS = BLOCK // VECTOR  # of outputs in a block
# Cache lines to prefetch for each four inputs: while a few last rows are multiplied, and while DOT_ROWS of more are.
LINES_FOR_FEW, LINES_FOR_MANY = (0, 1) if binding.get_host_cpu_name().startswith("znver") else (NUM_VECTORS,) * 2
PREFETCH_STREAMS = 8
AMX_PREFETCH_BYTES = 8192  # distance


def _store_product(builder: Any, sums: Any, factors: Any, out: Any) -> None:
    """VECTOR int32 sums, times their factors, in float32."""
    factor = load_floats(builder, factors)
    store_vector(builder, builder.fmul(builder.sitofp(sums, factor.type), factor), out)


@intrinsic(prefer_literal=True)
def _dot_products(
    _context: Any,
    rows: Any,
    lines: Any,
    weights: Any,
    starts: Any,
    factors: Any,
    x: Any,
    inputs: Any,
    out: Any,
    outputs: Any,
    ahead: Any,
) -> Any:
    """The module's formula for 1 to DOT_ROWS rows and one block of outputs.

    Args:
        rows: how many.
        lines: literal; cache lines to prefetch for each four inputs: 0, 1, or NUM_VECTORS.
        weights, starts, factors, x, out: addresses; of the block's first output, of the first row.
        inputs, outputs: of the whole product, the strides of x and out.
        ahead: address to prefetch from.
    """
    num_lines = lines.literal_value
    num_streams = PREFETCH_STREAMS if num_lines == NUM_VECTORS else 1
    cases = (rows.literal_value,) if isinstance(rows, types.IntegerLiteral) else range(1, DOT_ROWS + 1)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, _, weights, starts, factors, x, inputs, out, outputs, ahead = args
        # For each four inputs, one line of some of the streams; the others follow in turn.
        num_turns = max(1, num_streams // NUM_VECTORS)
        stream_bytes = builder.sdiv(times(builder, inputs, BLOCK), const(num_streams))

        def emit(num_rows: int) -> None:
            def body(four: Any, sums: list[Any]) -> list[Any]:
                base = plus(builder, weights, times(builder, four, 4 * BLOCK))
                stream = times(builder, builder.srem(four, const(num_turns)), NUM_VECTORS)
                turn = builder.sdiv(four, const(num_turns))
                line = plus(builder, ahead, times(builder, turn, 4 * VECTOR))
                for v in range(num_lines):
                    prefetch_line(builder, plus(builder, line, times(builder, plus(builder, stream, v), stream_bytes)))
                columns = [load_ints(builder, plus(builder, base, 4 * VECTOR * v)) for v in range(NUM_VECTORS)]
                results: list[Any] = []
                for row in range(num_rows):
                    four_inputs = plus(builder, x, times(builder, inputs, row), times(builder, four, 4))
                    spread = splat(builder, load(builder, I32, four_inputs, 4))
                    own = sums[row * NUM_VECTORS : (row + 1) * NUM_VECTORS]
                    for total, column in zip(own, columns, strict=True):
                        args = [total, spread, column]
                        results.append(call_llvm(builder, "llvm.x86.avx512.vpdpbusd.512", [INTS] * 3, args, INTS))
                return results

            begin = [load_ints(builder, plus(builder, starts, 4 * VECTOR * v)) for v in range(NUM_VECTORS)]
            sums = loop(builder, builder.sdiv(inputs, const(4)), begin * num_rows, body)
            for row in range(num_rows):
                row_at = plus(builder, out, times(builder, outputs, 4 * row))
                for v in range(NUM_VECTORS):
                    offset, total = 4 * VECTOR * v, sums[row * NUM_VECTORS + v]
                    _store_product(builder, total, plus(builder, factors, offset), plus(builder, row_at, offset))

        dispatch(builder, rows, cases, emit)
        return context.get_dummy_value()

    return types.none(rows, lines, *[types.int64] * 8), codegen


@emits(types.none(*[types.int64] * 9))
def _amx_products(
    builder: Any,
    rows: Any,
    weights: Any,
    starts: Any,
    factors: Any,
    x: Any,
    inputs: Any,
    out: Any,
    outputs: Any,
    ahead: Any,
) -> None:
    """As `_dot_products`, bit for bit, for 1 to 2 · AMX_ROWS rows; `inputs` is a multiple of AMX_BYTES.

    A tile register holds 16 rows of 64 bytes: of x, 64 inputs of 16 rows; of the weights, 64 inputs of 16 outputs, four
    inputs in a row, as they lie in memory; of the sums, 16 rows of 16 outputs. There are eight registers: one group of
    16 rows meets all outputs of a block at once, two groups meet half of them.

    Args:
        ahead: bytes, the distance of prefetching; 0 where the weights are in a cache already.
    """

    def emit(num_groups: int) -> None:
        num_columns = NUM_VECTORS // num_groups  # tiles of outputs at once
        sums = [[group * num_columns + column for column in range(num_columns)] for group in range(num_groups)]
        lefts = [num_groups * num_columns + group for group in range(num_groups)]
        rights = range(lefts[-1] + 1, 8)
        pointer = ir.PointerType(I8)

        def call(name: str, kinds: list[Any], *values: Any) -> None:
            args = [
                builder.inttoptr(value, pointer) if kind is pointer else ir.Constant(I8, value) if kind is I8 else value
                for kind, value in zip(kinds, values, strict=True)
            ]
            call_llvm(builder, f"llvm.x86.{name}", kinds, args)

        # Intel's manual, volume 1, 18.2: palette, 15 bytes, 16 × bytes in a row, 16 × number of rows.
        config = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(I8, 64)), I64)
        for word in range(8):
            store(builder, ir.Constant(I64, 1 if word == 0 else 0), plus(builder, config, 8 * word), 1)
        group_rows = [const(AMX_ROWS)] * (num_groups - 1) + [plus(builder, rows, -AMX_ROWS * (num_groups - 1))]
        tile_rows = {tile: of for group, of in enumerate(group_rows) for tile in (*sums[group], lefts[group])}
        for tile, of in {**tile_rows, **dict.fromkeys(rights, const(AMX_ROWS))}.items():
            store(builder, ir.Constant(I16, AMX_BYTES), plus(builder, config, 16 + 2 * tile), 1)
            store(builder, builder.trunc(of, I8), plus(builder, config, 48 + tile), 1)
        call("ldtilecfg", [pointer], config)

        tile_bytes = AMX_ROWS * AMX_BYTES
        scratch = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(I8, 4 * tile_bytes)), I64)
        tiles = [tile for group in sums for tile in group]
        for first in range(0, NUM_VECTORS, num_columns):

            def body(k: Any, _: list[Any], first: int = first) -> list[Any]:
                base = plus(builder, weights, times(builder, k, AMX_BYTES * BLOCK), first * AMX_BYTES)
                for group, left in enumerate(lefts):
                    row_at = plus(builder, x, times(builder, k, AMX_BYTES), times(builder, inputs, AMX_ROWS * group))
                    call("tileloadd64", [I8, pointer, I64], left, row_at, inputs)
                for column in range(num_columns):
                    weights_at, right = plus(builder, base, AMX_BYTES * column), rights[column % len(rights)]
                    for row in range(AMX_ROWS):
                        prefetch_line(builder, plus(builder, weights_at, 4 * BLOCK * row, ahead))
                    call("tileloadd64", [I8, pointer, I64], right, weights_at, const(4 * BLOCK))
                    for group, left in enumerate(lefts):
                        call("tdpbusd", [I8, I8, I8], sums[group][column], left, right)
                return []

            for tile in tiles:
                call("tilezero", [I8], tile)
            loop(builder, builder.sdiv(inputs, const(AMX_BYTES)), [], body)
            for tile in tiles:
                tile_at = plus(builder, scratch, tile_bytes * tile)
                call("tilestored64", [I8, pointer, I64], tile, tile_at, const(AMX_BYTES))
            for group, of in enumerate(group_rows):

                def finish(row: Any, _: list[Any], group: int = group, first: int = first) -> list[Any]:
                    row_at = plus(
                        builder, out, builder.mul(outputs, times(builder, plus(builder, row, AMX_ROWS * group), 4))
                    )
                    for column, tile in enumerate(sums[group]):
                        offset = AMX_BYTES * (first + column)
                        sums_at = plus(builder, scratch, tile_bytes * tile, times(builder, row, AMX_BYTES))
                        begin = load_ints(builder, plus(builder, starts, offset))
                        total = builder.add(load_ints(builder, sums_at), begin)
                        _store_product(builder, total, plus(builder, factors, offset), plus(builder, row_at, offset))
                    return []

                loop(builder, of, [], finish)

    is_more = builder.icmp_signed(">", rows, const(AMX_ROWS))
    dispatch(builder, builder.select(is_more, const(2), const(1)), (1, 2), emit)


@emits(types.none())
def _release_amx(builder: Any) -> None:
    """Clears the tile registers, so that the kernel need not save them at a context switch."""
    call_llvm(builder, "llvm.x86.tilerelease", [], [])


if HAS_DOT_PRODUCTS:  # LLVM aborts on instructions that the CPU lacks

    @njit(inline="always", **FAST)
    def _multiply_block(call: Any, product: Any, block: int, following: int) -> None:
        """One block of outputs of all rows. The last block may overlap the one before it: both write the same numbers.

        Args:
            following: address of the weights that are read after this block's.
        """
        inputs, outputs, max_dot_rows = product.num_inputs, product.num_outputs, product.max_dot_rows
        first = 4 * min(block * BLOCK, outputs - BLOCK)
        weights = product.weights_at + block * BLOCK * inputs
        starts, factors = product.starts_at + first, product.factors_at + first
        x, out, left = call.layer_at, call.product_at + first, call.num_rows
        if HAS_AMX and left > max_dot_rows:
            ahead = AMX_PREFETCH_BYTES
            while left > 0:
                rows = min(left, 2 * AMX_ROWS)
                _amx_products(rows, weights, starts, factors, x, inputs, out, outputs, ahead)
                x, out, left, ahead = x + rows * inputs, out + 4 * rows * outputs, left - rows, 0
            return
        end = following + BLOCK * inputs
        while left > DOT_ROWS:
            if following < end:
                _dot_products(DOT_ROWS, LINES_FOR_MANY, weights, starts, factors, x, inputs, out, outputs, following)
            else:
                _dot_products(DOT_ROWS, 0, weights, starts, factors, x, inputs, out, outputs, following)
            x, out, left = x + DOT_ROWS * inputs, out + 4 * DOT_ROWS * outputs, left - DOT_ROWS
            following += LINES_FOR_MANY * 64 * inputs // 4  # as far as `_dot_products` has prefetched
        if left > 0:
            _dot_products(left, LINES_FOR_FEW, weights, starts, factors, x, inputs, out, outputs, following)

    @cfunc(KERNEL, **FAST)
    def multiply(call_at: int, thread: int) -> None:
        """out [rows, outputs] float32 by the module's formula; an item is a block of outputs.

        The call has a PRODUCT in `step_at`, x [rows, inputs] uint8 in `layer_at`, out in `product_at`.
        """
        call = record(call_at, CALL)
        product = record(call.step_at, PRODUCT)
        num_blocks, block_bytes = (product.num_outputs + BLOCK - 1) // BLOCK, BLOCK * product.num_inputs
        share = thread % call.num_shares
        last = num_blocks * (share + 1) // call.num_shares - 1
        weights = product.weights_at
        after_last = weights + (last + 1) * block_bytes
        if product.next_at != 0:
            following = record(product.next_at, PRODUCT)
            first = (following.num_outputs + BLOCK - 1) // BLOCK * share // call.num_shares
            after_last = following.weights_at + first * BLOCK * following.num_inputs
        turn = 0
        while True:
            block, turn = claim(call_at, call, thread, turn, num_blocks)
            if block >= num_blocks:
                break
            after = after_last if block == last else weights + (block + 1) * block_bytes
            _multiply_block(call, product, block, after)
        if HAS_AMX and call.num_rows > product.max_dot_rows:
            _release_amx()

else:
    multiply = None
