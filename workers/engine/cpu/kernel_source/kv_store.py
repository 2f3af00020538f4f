"""Stores the keys and values of a step's rows in the KV cache; addresses in the KV cache.

Keys lie in blocks of VECTOR positions, [blocks, head_size, VECTOR], values in [positions, value_width], value_width
being head_size rounded up to VECTOR; for each head of each prefix-cache entry and KV suffix. Both are float32 or
float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types

from workers.engine.cpu.kernel_source.ir import (
    FAST_MATH,
    KERNEL,
    emits,
    floats,
    load_floats,
    prefetch,
    record,
    records,
    store,
    to_half,
)
from workers.engine.cpu.kernel_source.partition import claim
from workers.engine.cpu.layouts import CALL, LAYER, ROW, ROW_GROUP, STEP, VECTOR

_u16 = np.uint16


@njit(inline="always", **FAST_MATH)
def entry_at(entry: int, head: int, step: Any, layer: Any) -> tuple[int, int]:
    """Addresses of a head's keys and values in a prefix-cache entry."""
    keys = layer.entry_keys_at + step.entry_key_bytes * entry + step.entry_key_bytes // step.num_heads * head
    values = layer.entry_values_at + step.entry_value_bytes * entry + step.entry_value_bytes // step.num_heads * head
    return keys, values


@njit(inline="always", **FAST_MATH)
def suffix_at(suffix: int, head: int, step: Any, layer: Any) -> tuple[int, int]:
    """Addresses of a head's keys and values in a KV suffix."""
    keys = layer.suffix_keys_at + step.suffix_key_bytes * suffix + step.suffix_key_bytes // step.num_heads * head
    values = (
        layer.suffix_values_at + step.suffix_value_bytes * suffix + step.suffix_value_bytes // step.num_heads * head
    )
    return keys, values


@njit(inline="always", **FAST_MATH)
def _own_position_at(row: Any, head: int, step: Any, layer: Any) -> tuple[int, int, int]:
    """Of the position that a row computes: address of its block of keys, its lane in there, address of its value."""
    size, item = step.head_size, step.item_bytes
    value_width = (size + VECTOR - 1) // VECTOR * VECTOR
    if row.suffix >= 0:
        position = row.num_in_suffix - 1
        keys, values = suffix_at(row.suffix, head, step, layer)
    else:
        position = row.num_in_entry - 1
        keys, values = entry_at(row.entry, head, step, layer)
    block = keys + item * (position // VECTOR * size * VECTOR)
    return block, position % VECTOR, values + item * position * value_width


@emits(types.none(types.int64, types.float32))
def _store_half(builder: Any, address: Any, number: Any) -> None:
    """Stores a float32 as the nearest float16; beyond its range as the largest."""
    store(builder, to_half(builder, number), address, 2)


@emits(types.none(types.int64, types.int64))
def _convert_to_halves(builder: Any, numbers: Any, to: Any) -> None:
    """As `_store_half`, for VECTOR float32 at address `numbers`; `to` may be the same address."""
    store(builder, to_half(builder, load_floats(builder, numbers)), to, 2)


@njit(**FAST_MATH)
def _store_head(qkv_row: int, row: Any, head: int, step: Any, layer: Any) -> None:
    """Stores a row's key and value of one head; overwrites the key in `qkv_row` [3, heads, head_size]."""
    width, size, item = step.width, step.head_size, step.item_bytes
    keys, lane, values = _own_position_at(row, head, step, layer)
    keys += item * lane
    key, value = qkv_row + 4 * (width + head * size), qkv_row + 4 * (2 * width + head * size)
    key_row, value_row = floats(key, size), floats(value, size)
    if item == 4:
        column, stored = floats(keys, size * VECTOR), floats(values, size)
        for i in range(size):
            column[i * VECTOR] = key_row[i]
            stored[i] = value_row[i]
        return
    whole = size // VECTOR * VECTOR
    for i in range(whole, size):
        _store_half(keys + 2 * i * VECTOR, key_row[i])
        _store_half(values + 2 * i, value_row[i])
    for first in range(0, whole, VECTOR):
        _convert_to_halves(key + 4 * first, key + 2 * first)
        _convert_to_halves(value + 4 * first, values + 2 * first)
    halves, half_column = records(key, size, _u16), records(keys, size * VECTOR, _u16)
    for i in range(whole):
        half_column[i * VECTOR] = halves[i]


@cfunc(KERNEL, **FAST_MATH)
def store_kv(call_at: int, thread: int) -> None:
    """qkv · scale + bias; the queries to `query_at`, keys and values into the KV cache.

    qkv [rows, 3, heads, head_size] float32, whose keys are overwritten; scales [rows], bias [3 · width] float32;
    product and sum are fused. float16 is rounded to nearest, ties to even, and saturates.
    An item is one head of ROW_GROUP rows: neighbours in a prompt share the cache lines of their keys.
    The call has a STEP, a LAYER, and qkv.
    """
    call = record(call_at, CALL)
    step, layer = record(call.step_at, STEP), record(call.layer_at, LAYER)
    num_rows, width, heads, size, qkv = step.num_rows, step.width, step.num_heads, step.head_size, call.product_at
    scales, rows = floats(step.scales_at, num_rows), records(step.rows_at, num_rows, ROW)
    num_groups = (num_rows + ROW_GROUP - 1) // ROW_GROUP
    turn = 0
    while True:
        item, turn = claim(call_at, call, thread, turn, heads * num_groups)
        if item >= heads * num_groups:
            return
        head, first = item // num_groups, item % num_groups * ROW_GROUP
        last = min(first + ROW_GROUP, num_rows)
        # Prefetched all at once: each piece is too short for the CPU's own prefetchers.
        for number in range(first, last):
            for part in range(3):
                prefetch(qkv + 4 * ((3 * number + part) * width + head * size), 4 * size)
            keys, lane, values = _own_position_at(rows[number], head, step, layer)
            if number == first or lane == 0 or rows[number].suffix >= 0:
                prefetch(keys, step.item_bytes * size * VECTOR)
            prefetch(values, step.item_bytes * size)
        for number in range(first, last):
            scale, row_at = scales[number], qkv + 12 * number * width
            for part in range(3):
                offset = 4 * (part * width + head * size)
                numbers, bias = floats(row_at + offset, size), floats(layer.qkv_bias_at + offset, size)
                to = floats(step.query_at + 4 * (number * width + head * size), size) if part == 0 else numbers
                # Ranges from 0: for others numba checks for negative indices, which prevents vectorization.
                for i in range(size):
                    to[i] = numbers[i] * scale + bias[i]
            _store_head(row_at, rows[number], head, step, layer)
