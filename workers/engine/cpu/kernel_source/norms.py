"""Residual additions with layer norms, quantization of rows, and scaling.

A sum over a row's width runs in LANES chains: chain l adds the elements l, l + LANES, l + 2 · LANES and so on; then the
chains are added in ascending order. The order depends on the width alone, so a row has the same bits in every batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit

from workers.engine.cpu.kernel_source.exponential import ROUND
from workers.engine.cpu.kernel_source.ir import FAST, FAST_MATH, KERNEL, floats, matrix, record, records
from workers.engine.cpu.kernel_source.partition import claim
from workers.engine.cpu.layouts import CALL, LANES, NORM, PLAIN, ROW, STEP, UNIT

_f32, _i32, _i64, _u8 = np.float32, np.int32, np.int64, np.uint8
_MIN_SCALE = 1.1754944e-38  # the smallest normal float32: a row of zeros is divided by it


@njit(inline="always", **FAST_MATH)
def _sum(row: Any, chains: Any, is_squared: bool) -> Any:
    """Σ row[i], or Σ row[i]² with fused products; see the module for the order."""
    for lane in range(LANES):
        chains[lane] = _f32(0)
    whole = len(row) // LANES * LANES
    for first in range(0, whole, LANES):
        piece = row[first : first + LANES]
        for lane in range(LANES):
            chains[lane] += piece[lane] * piece[lane] if is_squared else piece[lane]
    for i in range(whole, len(row)):
        chains[i - whole] += row[i] * row[i] if is_squared else row[i]
    total = _f32(0)
    for lane in range(LANES):
        total += chains[lane]
    return total


@njit(**FAST)
def _max_abs(row: Any) -> Any:
    """The largest absolute value; compared as integers, which order positive floats alike and are faster."""
    bits = row.view(np.int32)
    largest = _i32(0)
    for i in range(len(row)):
        magnitude = _i32(bits[i] & _i32(0x7FFFFFFF))
        largest = max(largest, magnitude)
    return _i32(largest).view(np.float32)


@njit(**FAST_MATH)
def prepare(row: Any, number: int, step: Any) -> None:
    """Writes `row` [width] float32 as row `number` of the next product's input, and its scale.

        PLAIN: input = row; scale 1
        UNIT:  input = row / s, s = max |row|; scale s
        UINT8: input = round(row / s · 127 + 128), ties to even, product and sum fused; scale s

    UINT8 is what fbgemm makes of a UNIT row. A scale for each row keeps a row independent of its neighbours.
    """
    mode, width = step.mode, len(row)
    scales = floats(step.scales_at, number + 1)
    if mode == PLAIN:
        plain = floats(step.prepared_at + 4 * number * width, width)
        for i in range(width):
            plain[i] = row[i]
        scales[number] = _f32(1)
        return
    scale = max(_max_abs(row), _f32(_MIN_SCALE))
    scales[number] = scale
    if mode == UNIT:
        unit = floats(step.prepared_at + 4 * number * width, width)
        for i in range(width):
            unit[i] = row[i] / scale
        return
    levels = records(step.prepared_at + number * width, width, np.uint8)
    for i in range(width):
        level = row[i] / scale * _f32(127) + _f32(128)
        levels[i] = _u8(_i32((level + _f32(ROUND)) - _f32(ROUND)))


@cfunc(KERNEL, **FAST_MATH)
def add_and_norm(call_at: int, thread: int) -> None:
    """The residual addition and the norm after it, prepared for the next product; an item is a row.

        x ← x + (product · scale + bias_in)            fused product; without a product: token + position embedding
        μ = Σ x / width;  c = x − μ
        y = c · (1 / √(Σ c² / width + ε)) · weight + bias

    x [rows, width] float32 is the residual stream, updated in place; product [rows, width] float32; y is handed to
    `prepare`. Row i reads x and product at `sources[i]`. Sums are in the module's order.
    The call has a STEP, a NORM, and the product or 0.
    """
    call = record(call_at, CALL)
    step, norm = record(call.step_at, STEP), record(call.layer_at, NORM)
    num_rows, width, epsilon = step.num_rows, step.width, step.epsilon
    has_product, has_sources = call.product_at != 0, step.sources_at != 0
    stream, bias_in = matrix(step.stream_at, num_rows, width), floats(norm.bias_in_at, width)
    norm_weight, norm_bias = floats(norm.weight_at, width), floats(norm.bias_at, width)
    scales, product = floats(step.scales_in_at, num_rows), matrix(call.product_at, num_rows, width)
    sources, rows = records(step.sources_at, num_rows, np.int64), records(step.rows_at, num_rows, ROW)
    scratch = step.scratch_at + 4 * thread * step.scratch_stride
    chains, normed = floats(scratch, LANES), floats(scratch + 4 * LANES, width)
    turn = 0
    while True:
        number, turn = claim(call_at, call, thread, turn, num_rows)
        if number >= num_rows:
            return
        source = sources[number] if has_sources else number
        x = stream[source]
        if has_product:
            scale, added = scales[source], product[source]
            for i in range(width):
                x[i] = x[i] + (added[i] * scale + bias_in[i])
        else:
            row = rows[number]
            token = floats(step.token_embedding_at + 4 * width * row.token_id, width)
            position = floats(step.position_embedding_at + 4 * width * row.position, width)
            for i in range(width):
                x[i] = token[i] + position[i]
        mean = _sum(x, chains, False) / _f32(width)
        for i in range(width):
            normed[i] = x[i] - mean
        inverse = _f32(1) / np.sqrt(_sum(normed, chains, True) / _f32(width) + epsilon)
        for i in range(width):
            normed[i] = normed[i] * inverse * norm_weight[i] + norm_bias[i]
        prepare(normed, number, step)


@cfunc(KERNEL, **FAST_MATH)
def scale(call_at: int, thread: int) -> None:
    """product[row] ← product[row] · scales[row], float32, in place; an item is a row.

    The call has a STEP, the number of columns in `layer_at`, and product [rows, columns].
    """
    call = record(call_at, CALL)
    step = record(call.step_at, STEP)
    num_rows = step.num_rows
    product, scales = matrix(call.product_at, num_rows, call.layer_at), floats(step.scales_at, num_rows)
    turn = 0
    while True:
        number, turn = claim(call_at, call, thread, turn, num_rows)
        if number >= num_rows:
            return
        row, factor = product[number], scales[number]
        for i in range(len(row)):
            row[i] = row[i] * factor
