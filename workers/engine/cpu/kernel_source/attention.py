"""Attention of a step's rows over the KV cache.

    score[t] = q · k[t];  w[t] = exp(score[t] − max score);  mean = Σₜ w[t] · v[t] / Σₜ w[t]

for each row and head, over the positions t that the row reads: those of its prefix-cache entry, then those of its KV
suffix. Queries arrive scaled. Sums over d run from 0 on and sums over t from the first position on, with one rounding
for product and sum, whether a position lies in the entry or the suffix: a row's bits depend on neither its tile nor
the place of its keys.

The layout of keys and values is `kv_store`'s: a vector instruction computes the scores of VECTOR positions. All sums
are float32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, njit, types

from workers.engine.cpu.kernel_source.exponential import exp_floats
from workers.engine.cpu.kernel_source.ir import (
    F32,
    FAST,
    FAST_MATH,
    I32,
    INTS,
    KERNEL,
    atomic_add,
    const,
    const_floats,
    dispatch,
    emits,
    floats,
    fma,
    lanes_before,
    larger,
    load,
    load_floats,
    loop,
    matrix,
    plus,
    prefetch_lines,
    record,
    records,
    splat,
    store_vector,
    times,
)
from workers.engine.cpu.kernel_source.kv_store import entry_at, suffix_at
from workers.engine.cpu.kernel_source.norms import prepare
from workers.engine.cpu.kernel_source.partition import claim
from workers.engine.cpu.layouts import CALL, LAYER, ROW, ROW_TILE, STEP, TILE, TOTALS, VECTOR

_f32 = np.float32
LOWEST = -3e38  # less than any score and any logit
ROW_COUNTS, ITEM_BYTES = range(1, TILE + 1), (4, 2)


@emits(types.none(*[types.int64] * 9))
def _block_scores(
    builder: Any,
    rows: Any,
    blocks: Any,
    item_bytes: Any,
    query: Any,
    keys: Any,
    out: Any,
    out_stride: Any,
    size: Any,
    ahead: Any,
) -> None:
    """out[row, t] = Σ over d of query[row, d] · keys[d, t], d ascending, fused.

    Args:
        rows, blocks: of queries, 1 to TILE; of keys, 1 or 2.
        item_bytes: bytes of a key, 4 or 2.
        query, keys, out: addresses; query [rows, size] and out [rows, out_stride] float32, keys [blocks, size, VECTOR].
        ahead: address; as many bytes as are read of the keys are prefetched from there.
    """

    def emit(num_rows: int, num_blocks: int, item: int) -> None:
        starts = [plus(builder, keys, times(builder, size, item * VECTOR * block)) for block in range(num_blocks)]
        queries = [plus(builder, query, times(builder, size, 4 * row)) for row in range(num_rows)]

        def body(d: Any, sums: list[Any]) -> list[Any]:
            offset = times(builder, d, item * VECTOR)
            prefetch_lines(
                builder, plus(builder, ahead, times(builder, offset, num_blocks)), item * VECTOR * num_blocks
            )
            lanes = [load_floats(builder, plus(builder, start, offset), item) for start in starts]
            results: list[Any] = []
            for row in range(num_rows):
                number = splat(builder, load(builder, F32, plus(builder, queries[row], times(builder, d, 4)), 4))
                own = sums[row * num_blocks : (row + 1) * num_blocks]
                results += [fma(builder, number, *pair) for pair in zip(lanes, own, strict=True)]
            return results

        sums = loop(builder, size, [const_floats(0.0)] * (num_rows * num_blocks), body)
        for row in range(num_rows):
            row_at = plus(builder, out, times(builder, out_stride, 4 * row))
            for block in range(num_blocks):
                store_vector(builder, sums[row * num_blocks + block], plus(builder, row_at, 4 * VECTOR * block))

    def by_blocks(item: int, num_blocks: int) -> None:
        dispatch(builder, rows, ROW_COUNTS, lambda num_rows: emit(num_rows, num_blocks, item))

    def by_items(item: int) -> None:
        dispatch(builder, blocks, (2, 1), lambda num_blocks: by_blocks(item, num_blocks))

    dispatch(builder, item_bytes, ITEM_BYTES, by_items)


@njit(**FAST)
def _scores(
    rows: int, blocks: int, query: int, keys: int, out: int, stride: int, size: int, item: int, ahead: int
) -> None:
    """Scores of `blocks` blocks of keys, two at a time, which fills the CPU's two multiply-add units."""
    block_bytes = VECTOR * size * item
    for block in range(0, blocks, 2):
        offset, number = block * block_bytes, min(2, blocks - block)
        _block_scores(rows, number, item, query, keys + offset, out + 4 * VECTOR * block, stride, size, ahead + offset)


@emits(types.none(*[types.int64] * 11))
def _add_values(
    builder: Any,
    rows: Any,
    vectors: Any,
    item_bytes: Any,
    weights: Any,
    stride: Any,
    values: Any,
    width: Any,
    number: Any,
    sums: Any,
    totals: Any,
    ahead: Any,
) -> None:
    """sums[row, column] += Σ over t of weights[row, t] · values[t, column], t ascending, fused.

    `totals` grow by Σ weights[row, t] in each of VECTOR lanes, in the same order.

    Args:
        rows, vectors: of weights, 1 to TILE; of columns, 1 or 4, VECTOR each.
        item_bytes: bytes of a value, 4 or 2.
        weights, values, sums, totals: addresses, of the first row and column; weights [rows, stride] float32, values
            [number, width], sums and totals in [rows, width + TOTALS] float32.
        number: number of positions, at least one.
        ahead: address of what is prefetched as the values are read, with their strides.
    """

    def emit(num_rows: int, num_vectors: int, item: int) -> None:
        value_bytes = times(builder, width, item)
        sums_bytes = times(builder, plus(builder, width, TOTALS), 4)
        starts = [plus(builder, weights, times(builder, stride, 4 * row)) for row in range(num_rows)]
        places = []
        for row in range(num_rows):
            offset = times(builder, sums_bytes, row)
            places += [plus(builder, sums, offset, 4 * VECTOR * v) for v in range(num_vectors)]
            places.append(plus(builder, totals, offset))

        def body(position: Any, before: list[Any]) -> list[Any]:
            offset = builder.mul(position, value_bytes)
            prefetch_lines(builder, plus(builder, ahead, offset), item * VECTOR * num_vectors)
            start = plus(builder, values, offset)
            columns = [load_floats(builder, plus(builder, start, item * VECTOR * v), item) for v in range(num_vectors)]
            results: list[Any] = []
            for row in range(num_rows):
                weight_at = plus(builder, starts[row], times(builder, position, 4))
                weight = splat(builder, load(builder, F32, weight_at, 4))
                *own, total = before[row * (num_vectors + 1) : (row + 1) * (num_vectors + 1)]
                results += [fma(builder, weight, *pair) for pair in zip(columns, own, strict=True)]
                results.append(builder.fadd(total, weight))
            return results

        after = loop(builder, number, [load_floats(builder, place) for place in places], body)
        for place, value in zip(places, after, strict=True):
            store_vector(builder, value, place)

    def by_vectors(item: int, num_vectors: int) -> None:
        dispatch(builder, rows, ROW_COUNTS, lambda num_rows: emit(num_rows, num_vectors, item))

    def by_items(item: int) -> None:
        dispatch(builder, vectors, (4, 1), lambda num_vectors: by_vectors(item, num_vectors))

    dispatch(builder, item_bytes, ITEM_BYTES, by_items)


@njit(**FAST)
def _weighted_values(
    rows: int, weights: int, stride: int, values: int, width: int, number: int, sums: int, item: int, ahead: int
) -> None:
    """sums [rows, width + TOTALS] grow by the weighted values [number, width], and after them by the weights.

    Four vectors of columns at a time, as many as heads of 64 have.
    """
    if number == 0:
        return
    first = 0
    while first < width:
        # The weights are summed with the first columns; with others, into the unused vector.
        totals = sums + 4 * (width if first == 0 else width + VECTOR)
        vectors = 4 if width - first >= 4 * VECTOR else 1
        offset = item * first
        _add_values(
            rows,
            vectors,
            item,
            weights,
            stride,
            values + offset,
            width,
            number,
            sums + 4 * first,
            totals,
            ahead + offset,
        )
        first += vectors * VECTOR


@emits(types.float32(types.int64, types.int64))
def largest(builder: Any, row: Any, number: Any) -> Any:
    """The largest of `number` float32 at address `row`, at least one; reads whole vectors."""

    def body(vector: Any, found: list[Any]) -> list[Any]:
        first = times(builder, vector, VECTOR)
        numbers = load_floats(builder, plus(builder, row, times(builder, first, 4)))
        numbers = builder.select(lanes_before(builder, first, number), numbers, const_floats(LOWEST))
        return [larger(builder, numbers, found[0])]

    num_vectors = builder.sdiv(plus(builder, number, VECTOR - 1), const(VECTOR))
    (most,) = loop(builder, num_vectors, [const_floats(LOWEST)], body)
    distance = VECTOR // 2
    while distance > 0:
        mask = ir.Constant(INTS, [lane ^ distance for lane in range(VECTOR)])
        most = larger(builder, most, builder.shuffle_vector(most, most, mask))
        distance //= 2
    return builder.extract_element(most, ir.Constant(I32, 0))


@emits(types.none(types.int64, types.int64, types.int64, types.float32))
def _scores_to_weights(builder: Any, scores: Any, number: Any, vectors: Any, most: Any) -> None:
    """scores[t] ← exp(scores[t] − most) for t < `number`, 0 for the rest of `vectors` vectors (at least one)."""
    most = splat(builder, most)

    def body(vector: Any, _: list[Any]) -> list[Any]:
        first = times(builder, vector, VECTOR)
        place = plus(builder, scores, times(builder, first, 4))
        weight = exp_floats(builder, builder.fsub(load_floats(builder, place), most))
        is_read = lanes_before(builder, first, number)
        store_vector(builder, builder.select(is_read, weight, const_floats(0.0)), place)
        return []

    loop(builder, vectors, [], body)


@emits(types.none(types.int64, types.int64))
def _clear(builder: Any, address: Any, vectors: Any) -> None:
    """Writes `vectors` · VECTOR float32 zeros, at least one vector; in the units in which they are read next."""

    def body(number: Any, _: list[Any]) -> list[Any]:
        store_vector(builder, const_floats(0.0), plus(builder, address, times(builder, number, 4 * VECTOR)))
        return []

    loop(builder, vectors, [], body)


@njit(**FAST_MATH)
def _attend_tile(step: Any, layer: Any, tile: Any, rows: Any, head: int, scratch: int, following: int) -> None:
    """The module's formula for one head of a tile's rows, into `mean_at`.

    While keys are read, the values are prefetched; while those are read, what lies at `following`.
    """
    size, width, num_rows = step.head_size, step.width, tile.num_rows
    stride, item = step.score_stride, step.item_bytes
    value_width = (size + VECTOR - 1) // VECTOR * VECTOR
    sums_width = value_width + TOTALS
    query = scratch
    sums = query + 4 * TILE * size
    scores = sums + 4 * TILE * sums_width
    num_in_entry = 0
    for i in range(num_rows):
        number = tile.rows[i]
        num_in_entry = max(num_in_entry, rows[number].num_in_entry)
        source = floats(step.query_at + 4 * (number * width + head * size), size)
        copy = floats(query + 4 * i * size, size)
        for d in range(size):
            copy[d] = source[d]
    keys, values = entry_at(rows[tile.rows[0]].entry, head, step, layer)
    blocks = (num_in_entry + VECTOR - 1) // VECTOR
    _scores(num_rows, blocks, query, keys, scores, stride, size, item, values)
    for i in range(num_rows):
        row = rows[tile.rows[i]]
        in_entry, in_suffix = row.num_in_entry, row.num_in_suffix
        entry_scores, suffix_scores = scores + 4 * i * stride, scores + 4 * (i * stride + blocks * VECTOR)
        most = _f32(LOWEST)
        if in_entry > 0:
            most = largest(entry_scores, in_entry)
        if in_suffix > 0:
            suffix_blocks = (in_suffix + VECTOR - 1) // VECTOR
            suffix_keys, _ = suffix_at(row.suffix, head, step, layer)
            # A suffix is short: there is nothing to prefetch but itself.
            _scores(1, suffix_blocks, query + 4 * i * size, suffix_keys, suffix_scores, stride, size, item, suffix_keys)
            most = max(most, largest(suffix_scores, in_suffix))
            _scores_to_weights(suffix_scores, in_suffix, suffix_blocks, most)
        if blocks > 0:
            _scores_to_weights(entry_scores, in_entry, blocks, most)
        _clear(sums + 4 * i * sums_width, sums_width // VECTOR)
    _weighted_values(num_rows, scores, stride, values, value_width, num_in_entry, sums, item, following)
    for i in range(num_rows):
        number = tile.rows[i]
        row = rows[number]
        in_suffix = row.num_in_suffix
        if in_suffix > 0:
            _, suffix_values = suffix_at(row.suffix, head, step, layer)
            weights, own_sums = scores + 4 * (i * stride + blocks * VECTOR), sums + 4 * i * sums_width
            _weighted_values(1, weights, stride, suffix_values, value_width, in_suffix, own_sums, item, suffix_values)
        total = floats(sums + 4 * i * sums_width, sums_width)
        mean = floats(step.mean_at + 4 * (number * width + head * size), size)
        inverse = _f32(1) / total[value_width]
        for d in range(size):
            mean[d] = total[d] * inverse


@cfunc(KERNEL, **FAST_MATH)
def attend(call_at: int, thread: int) -> None:
    """mean [rows, width] float32 by the module's formula, prepared for the next product.

    The thread that finishes a tile's last head prepares its rows. An item is one head of one tile, in ascending order
    of heads, as `store_kv` has it. The call has a STEP and a LAYER.
    """
    call = record(call_at, CALL)
    step, layer = record(call.step_at, STEP), record(call.layer_at, LAYER)
    num_rows, num_tiles, heads, width = step.num_rows, step.num_tiles, step.num_heads, step.width
    rows, tiles = records(step.rows_at, num_rows, ROW), records(step.tiles_at, num_tiles, ROW_TILE)
    means = matrix(step.mean_at, num_rows, width)
    scratch = step.scratch_at + 4 * thread * step.scratch_stride
    turn = 0
    while True:
        item, turn = claim(call_at, call, thread, turn, heads * num_tiles)
        if item >= heads * num_tiles:
            return
        tile = tiles[item % num_tiles]
        # The next item is the next tile of this head or the first tile of the next head, unless another thread has it.
        after = min(item + 1, heads * num_tiles - 1)
        following, _ = entry_at(rows[tiles[after % num_tiles].rows[0]].entry, after // num_tiles, step, layer)
        _attend_tile(step, layer, tile, rows, item // num_tiles, scratch, following)
        done = atomic_add(step.heads_done_at + 8 * (item % num_tiles), 1)
        if done % heads == heads - 1:
            for i in range(tile.num_rows):
                number = tile.rows[i]
                prepare(means[number], number, step)
