"""What a step computes between its matrix products, on a CPU: norms, attention, activations, draws.

Knows rows of numbers and where they lie in memory. Refuses to know sequences, plans and weights' formats.

The promise "same seed, same text, whatever else happens" needs a row to have the same bits whatever is computed beside
it, and wherever the keys and values that it sees are kept. So every number here comes from operations in an order that
the row alone decides: a sum over positions runs from the first position to the last, be they in a prefix-cache entry or
in a KV suffix; a sum over a row's width runs in `LANES` chains that are added up in their order. Rows are spread over
threads, a row is not.

numba compiles these functions with the compiler that it brings along, at their first use on a machine, and keeps the
result. The inner products of attention and of 8-bit weights, and the powers of e, are written as vector instructions,
for no compiler finds them by itself.

A kernel is called with the address of a call, and the number of the thread that calls. A call is: [address of the
step's parameters, address of the layer's parameters, address of a matrix product, rows, shares, next item of each
share]. Each thread has a share of the items, the same part of them in each kernel, so that it finds what it left in
its own caches, and memory in one piece; when it has done them, it helps the next. One compiled function serves one
thread and many, and gives both the same bits.

Each call from Python lets go of the interpreter and has to win it back from the threads that talk to clients, so what
can be a `Program`, all layers of a step, is one call.
"""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from workers.engine.cpu.kv_cache import VECTOR
from workers.engine.cpu.linear import PLAIN, UINT8, UNIT
from workers.engine.interrupt import Interrupt

__all__ = ["PLAIN", "UINT8", "UNIT"]

LANES = 32  # chains of a sum over a row's width
TILE = 4  # rows that read a prompt's keys and values together
STORE_ROWS = 8  # rows whose keys a thread stores together
NUM_CANDIDATES = 64  # likeliest tokens that a draw may need
LEAST = -3e38  # no logit and no score is less
# exp(r) = 1 + r + r² (… + ½) for |r| ≤ ½ log 2: Cephes' polynomial (Moshier, expf).
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
TOTALS = 2 * VECTOR  # floats behind a row's weighted values: sums of its weights, and a place for those not wanted
GROUPS = 1024  # of the vocabulary, to find the likeliest in

# Activations, as `gpt2` names them.
ACTIVATIONS = {
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), 0),
    "gelu": 1,
    "relu": 2,
    **dict.fromkeys(("silu", "swish"), 3),
    "tanh": 4,
}

# A step's parameters, int64: numbers, and addresses of arrays.
(
    NUM_ROWS,
    NUM_TILES,
    MODE,
    WIDTH,
    INNER,
    HEADS,
    HEAD_SIZE,
    ACTIVATION,
    EPSILON,
    TOKEN_EMBEDDING,
    POSITION_EMBEDDING,
    X,  # [rows, width] float32, the residual stream
    PREPARED,  # [rows, width or inner], what the next product takes: float32 or uint8
    SCALES,  # [rows] float32, what its result is to be multiplied with
    SCALES_IN,  # the same of the product that the stream grows by: SCALES, or another step's
    SOURCES,  # [rows] int64, which rows of the stream and of that product these are; 0: they are the same
    QUERY,  # [rows, width] float32
    MEAN,  # [rows, width] float32, what attention gives
    ROWS,  # [rows, ROW_FIELDS] int64
    TILES,  # [tiles, 1 + TILE] int64: number of rows, then their numbers
    HEADS_DONE,  # [tiles] int64
    SCRATCH,  # [threads, SCRATCH_STRIDE] float32
    SCRATCH_STRIDE,
    SCORE_STRIDE,  # floats of a row's scores
    ENTRY_KEYS,  # bytes from one entry, or suffix, to the next
    ENTRY_VALUES,
    SUFFIX_KEYS,
    SUFFIX_VALUES,
    ITEM_BYTES,  # of a cached number: 4, or 2 where it is float16
    END_ID,  # the token that ends a text; -1: there is none
    STEP_FIELDS,
) = range(31)

# Of each row, what it is: its token, its position, and what it sees of its entry and of its suffix, itself included.
ROW_ID, ROW_POSITION, ROW_ENTRY, ROW_SEEN, ROW_SUFFIX, ROW_SUFFIX_SEEN, ROW_FIELDS = range(7)

# A layer's parameters: addresses. `NORM_BIAS_IN` is the bias of the product that the stream grows by before the norm.
QKV_BIAS, UP_BIAS, KEYS, VALUES, SUFFIXES_KEYS, SUFFIXES_VALUES, LAYER_FIELDS = range(7)
NORM_BIAS_IN, NORM_WEIGHT, NORM_BIAS, NORM_FIELDS = range(4)

# A draw's parameters, float64 [rows, DRAW_FIELDS]; a temperature of 0 is greedy, a token of -1 is to be drawn. Where
# not every token can be drawn: where the int32 ids of those that can are, how many, and how many follow them that can
# if none is likelier. A double holds an address exactly.
(
    DRAW_ROW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    RANK,
    TOKEN,
    LOGPROB,
    CHOICES,
    NUM_ALLOWED,
    NUM_IF_LIKELIEST,
    DRAW_FIELDS,
) = range(12)
SAMPLE_ROWS, SAMPLE_VOCAB, SAMPLE_TABLE, SAMPLE_SCRATCH, SAMPLE_SCRATCH_STRIDE, SAMPLE_FIELDS = range(6)
SAMPLE_SCRATCH_FLOATS = GROUPS + LANES + NUM_CANDIDATES

# A matrix product's parameters: numbers, and addresses. Its call has the rows, uint8, for a layer.
(
    INPUTS,
    OUTPUTS,
    WEIGHTS,  # int8 [blocks, inputs / 4, BLOCK, 4], the blocks one after another but the last, which ends with the last
    STARTS,  # [outputs] int32, what each sum begins with
    FACTORS,  # [outputs] float32, what it is multiplied with
    MOST_DOT_ROWS,  # more rows are multiplied by AMX
    NEXT_PRODUCT,  # of a step: where its parameters are; 0: there is none
    PRODUCT_FIELDS,
) = range(8)
BLOCK = 4 * VECTOR
DOT_ROWS = 6  # that meet a block's weights together: so many sums of each output are held in registers
AMX_ROWS, AMX_BYTES = 16, 64  # of a tile register
# Weights are asked for before they are needed, into the second cache: an Intel CPU looks ahead by itself too, but not
# past a page, and too late where a row's products leave it little to do. While a block is multiplied with a few rows,
# the one after it is asked for, at so many places at once (a power of two): that keeps more of the memory's banks busy
# than from its beginning on. AMD's look ahead better alone: on Zen 5 a step of three rows of GPT-2 small's shape takes
# 3.0 ms, with weights asked for 3.2 at one place and 3.6 at eight. But while more rows meet a block one after another,
# nothing of the next is read: each time a part of it is asked for. Before AMX, so many bytes ahead.
LINES_FOR_FEW, LINES_FOR_MANY = (0, 1) if binding.get_host_cpu_name().startswith("znver") else (4, 4)
FETCH_STREAMS = 8
FETCH_AHEAD_BYTES = 8192

# What the kernel of 8-bit products is made of: VNNI on 64 bytes, and AMX where there are more than a few rows.
_FEATURES = binding.get_host_cpu_features()
HAS_DOT_PRODUCTS = bool(_FEATURES.get("avx512vnni"))
# A process has to ask Linux for AMX, which torch does.
HAS_AMX = bool(HAS_DOT_PRODUCTS and _FEATURES.get("amx-int8") and torch.cpu._init_amx())

_STEP, _LAYER, _PRODUCT, _ROWS, _SHARES, _CALL_FIELDS = range(6)

# A program: a head, then entries; each entry's call follows its fields.
(
    _LENGTH,
    _STRIDE,
    _NUM_TIMES,  # that are wanted; when it is interrupted, that have been
    _NUM_BEGUN,
    _NUM_PASSED,
    _NUM_ASLEEP,
    _TEAM_SIZE,
    _SYSCALL,
    _INTERRUPT,  # the address of an int64: whoever makes it other than 0 interrupts
    _HEAD_FIELDS,
) = range(10)
_FUNCTION, _IS_LARGE, _NUM_ARRIVED, _ENTRY_FIELDS = range(4)

# A thread that waits for the others looks so many times, some 50 ns each, before it sleeps.
NUM_SPINS = 4000
# Linux's: the number of the system call (98 where a machine came after there was one table for all), and its
# FUTEX_WAIT and FUTEX_WAKE within a process.
IS_X86 = platform.machine() == "x86_64"
FUTEX, FUTEX_WAIT, FUTEX_WAKE, FUTEX_ALL = 202 if IS_X86 else 98, 128, 129, 1 << 30

_f32, _i32, _i64, _u8, _u16 = np.float32, np.int32, np.int64, np.uint8, np.uint16
_FAST: dict[str, Any] = {"nogil": True, "cache": True, "error_model": "numpy"}
# Without NaN and infinity, and with products and sums fused: none of these lets a sum change its order.
_VECTOR: dict[str, Any] = {**_FAST, "fastmath": {"nnan", "ninf", "nsz", "contract"}}


# CachedSuffix.


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.PointerType(ir.IntType(8)))

    return types.voidptr(types.int64), codegen


@intrinsic
def _add(_context: Any, address: Any, number: Any) -> Any:
    """Adds to the int64 at `address`, and returns what it was; atomic."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.PointerType(ir.IntType(64)))
        return builder.atomic_rmw("add", place, args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@njit(inline="always", **_FAST)
def _take(address: int) -> Any:
    """The number at `address`; who comes next gets the next."""
    return _add(address, 1)


@intrinsic
def _look(_context: Any, address: Any) -> Any:
    """The int64 at `address` that others change; atomic."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.PointerType(ir.IntType(64)))
        return builder.load_atomic(place, "seq_cst", 8, typ=ir.IntType(64))

    return types.int64(types.int64), codegen


@njit(inline="always", **_FAST)
def _floats(address: int, number: int) -> Any:
    return carray(_pointer(address), (number,), _f32)


@njit(inline="always", **_FAST)
def _matrix(address: int, rows: int, columns: int) -> Any:
    return carray(_pointer(address), (rows, columns), _f32)


@njit(inline="always", **_FAST)
def _wholes(address: int, rows: int, columns: int) -> Any:
    return carray(_pointer(address), (rows, columns), _i64)


# The inner products.


def _vector_at(builder: Any, address: Any, is_half: bool = False) -> Any:
    """VECTOR float32; they may be kept as float16."""
    vector = ir.VectorType(ir.FloatType(), VECTOR)
    kept = ir.VectorType(ir.HalfType(), VECTOR) if is_half else vector
    load = builder.load(builder.inttoptr(address, ir.PointerType(kept)), typ=kept)
    load.align = 2 if is_half else 4
    return builder.fpext(load, vector) if is_half else load


def _float_at(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, ir.PointerType(ir.FloatType())), typ=ir.FloatType())


def _broadcast(builder: Any, number: Any) -> Any:
    vector = ir.VectorType(number.type, VECTOR)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), [0] * VECTOR)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _vector_of(number: float) -> Any:
    # As a float32 has it: LLVM wants constants exact.
    return ir.Constant(ir.VectorType(ir.FloatType(), VECTOR), [float(_f32(number))] * VECTOR)


def _fused(builder: Any, vector: Any) -> Any:
    """a · b + c with one rounding."""
    kind = ir.FunctionType(vector, [vector] * 3)
    return cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{VECTOR}f32")


def _loop(builder: Any, number: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`body(i, values)` for i from 0 to `number` - 1, each time with what it returned; at least once."""
    i64 = ir.IntType(64)
    before = builder.block
    loop = builder.append_basic_block("loop")
    after = builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(i64)
    index.add_incoming(ir.Constant(i64, 0), before)
    values = [builder.phi(start.type) for start in starts]
    for value, start in zip(values, starts, strict=True):
        value.add_incoming(start, before)
    news = body(index, values)
    following = builder.add(index, ir.Constant(i64, 1))
    index.add_incoming(following, loop)
    for value, new in zip(values, news, strict=True):
        value.add_incoming(new, loop)
    builder.cbranch(builder.icmp_signed("<", following, number), loop, after)
    builder.position_at_end(after)
    return news


def _store_vector(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type))).align = 4


def _in_half(builder: Any, numbers: Any) -> Any:
    """A float or a vector of them, each the nearest that float16 has room for."""
    for limit, is_beyond in ((-65504.0, "<"), (65504.0, ">")):
        bound = ir.Constant(numbers.type, [limit] * VECTOR if isinstance(numbers.type, ir.VectorType) else limit)
        numbers = builder.select(builder.fcmp_ordered(is_beyond, numbers, bound), bound, numbers)
    return numbers


def _wholes_at(builder: Any, address: Any) -> Any:
    """VECTOR int32."""
    vector = ir.VectorType(ir.IntType(32), VECTOR)
    load = builder.load(builder.inttoptr(address, ir.PointerType(vector)), typ=vector)
    load.align = 4
    return load


def _store_product(builder: Any, total: Any, factors: Any, out: Any) -> None:
    """VECTOR sums of integers, times their factors, in float32."""
    factor = _vector_at(builder, factors)
    _store_vector(builder, builder.fmul(builder.sitofp(total, factor.type), factor), out)


def _fetch(builder: Any, address: Any) -> None:
    """Asks for 64 bytes to be brought into the second cache; an address that is nobody's does no harm."""
    pointer, whole = ir.PointerType(ir.IntType(8)), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, whole, whole, whole])
    is_read, second_cache, is_data = ir.Constant(whole, 0), ir.Constant(whole, 2), ir.Constant(whole, 1)
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(fetch, [builder.inttoptr(address, pointer), is_read, second_cache, is_data])


def _fetch_all(builder: Any, address: Any, num_bytes: int) -> None:
    for first in range(0, num_bytes, 64):
        _fetch(builder, builder.add(address, _whole(first)))


@intrinsic(prefer_literal=True)
def _scores(
    _context: Any, rows: Any, blocks: Any, half: Any,
    query: Any, keys: Any, out: Any, out_stride: Any, size: Any, ahead: Any,
) -> Any:  # fmt: skip
    """out[row, position] = Σ over d of query[row, d] · keys[d, position], d ascending, fused.

    Of `rows` rows of queries and one or two `blocks` of keys. As many bytes from `ahead` on are asked for as keys are
    read. All else are addresses and numbers of floats.
    """
    num_rows, num_blocks, is_half = rows.literal_value, blocks.literal_value, half.literal_value
    item = 2 if is_half else 4

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        *_, query, keys, out, out_stride, size, ahead = args
        vector = ir.VectorType(ir.FloatType(), VECTOR)
        fma = _fused(builder, vector)
        starts = [builder.add(keys, builder.mul(size, _whole(item * VECTOR * block))) for block in range(num_blocks)]
        queries = [builder.add(query, builder.mul(size, _whole(4 * row))) for row in range(num_rows)]

        def body(d: Any, sums: list[Any]) -> list[Any]:
            offset = builder.mul(d, _whole(item * VECTOR))
            _fetch_all(builder, builder.add(ahead, builder.mul(offset, _whole(num_blocks))), item * VECTOR * num_blocks)
            lanes = [_vector_at(builder, builder.add(start, offset), is_half) for start in starts]
            news: list[Any] = []
            for row in range(num_rows):
                one = _broadcast(builder, _float_at(builder, builder.add(queries[row], builder.mul(d, _whole(4)))))
                own = sums[row * num_blocks : (row + 1) * num_blocks]
                news += [builder.call(fma, [one, *pair]) for pair in zip(lanes, own, strict=True)]
            return news

        zero = ir.Constant(vector, [0.0] * VECTOR)
        sums = _loop(builder, size, [zero] * (num_rows * num_blocks), body)
        for row in range(num_rows):
            place = builder.add(out, builder.mul(out_stride, _whole(4 * row)))
            for block in range(num_blocks):
                value = sums[row * num_blocks + block]
                _store_vector(builder, value, builder.add(place, _whole(4 * VECTOR * block)))
        return context.get_dummy_value()

    return types.none(rows, blocks, half, *[types.int64] * 6), codegen


@intrinsic(prefer_literal=True)
def _values(
    _context: Any, rows: Any, vectors: Any, half: Any,
    weights: Any, stride: Any, values: Any, width: Any, number: Any, sums: Any, totals: Any, ahead: Any,
) -> Any:  # fmt: skip
    """sums[row, column] += weights[row, position] · values[position, column], positions ascending, fused.

    Of `rows` rows and `vectors` vectors of columns; `number` positions, at least one. `totals` grow by the weights
    alone, in each of VECTOR columns. What lies at `ahead`, laid out as the values, is asked for as they are read.
    """
    num_rows, num_vectors, is_half = rows.literal_value, vectors.literal_value, half.literal_value
    item = 2 if is_half else 4

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        *_, weights, stride, values, width, number, sums, totals, ahead = args
        vector = ir.VectorType(ir.FloatType(), VECTOR)
        fma = _fused(builder, vector)
        row_bytes = builder.mul(width, _whole(item))
        starts = [builder.add(weights, builder.mul(stride, _whole(4 * row))) for row in range(num_rows)]

        sums_bytes = builder.mul(builder.add(width, _whole(TOTALS)), _whole(4))  # of a row

        def places(row: int) -> list[Any]:
            offset = builder.mul(sums_bytes, _whole(row))
            start = builder.add(sums, offset)
            own = [builder.add(start, _whole(4 * VECTOR * v)) for v in range(num_vectors)]
            return [*own, builder.add(totals, offset)]

        def body(position: Any, sofar: list[Any]) -> list[Any]:
            offset = builder.mul(position, row_bytes)
            _fetch_all(builder, builder.add(ahead, offset), item * VECTOR * num_vectors)
            start = builder.add(values, offset)
            columns = [
                _vector_at(builder, builder.add(start, _whole(item * VECTOR * v)), is_half) for v in range(num_vectors)
            ]
            news: list[Any] = []
            for row in range(num_rows):
                address = builder.add(starts[row], builder.mul(position, _whole(4)))
                one = _broadcast(builder, _float_at(builder, address))
                *own, total = sofar[row * (num_vectors + 1) : (row + 1) * (num_vectors + 1)]
                news += [builder.call(fma, [one, *pair]) for pair in zip(columns, own, strict=True)]
                news.append(builder.fadd(total, one))
            return news

        everywhere = [place for row in range(num_rows) for place in places(row)]
        after = _loop(builder, number, [_vector_at(builder, place) for place in everywhere], body)
        for place, value in zip(everywhere, after, strict=True):
            _store_vector(builder, value, place)
        return context.get_dummy_value()

    return types.none(rows, vectors, half, *[types.int64] * 8), codegen


@intrinsic
def _put_half(_context: Any, address: Any, number: Any) -> Any:
    """Stores a float32 as the nearest float16 that there is."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        half = builder.fptrunc(_in_half(builder, args[1]), ir.HalfType())
        builder.store(half, builder.inttoptr(args[0], ir.PointerType(ir.HalfType()))).align = 2
        return context.get_dummy_value()

    return types.none(types.int64, types.float32), codegen


@intrinsic
def _put_halves(_context: Any, numbers: Any, to: Any) -> Any:
    """The same of VECTOR of them, which may be where they are stored."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        numbers = _in_half(builder, _vector_at(builder, args[0]))
        halves = builder.fptrunc(numbers, ir.VectorType(ir.HalfType(), VECTOR))
        builder.store(halves, builder.inttoptr(args[1], ir.PointerType(halves.type))).align = 2
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


@intrinsic
def _ask_for(_context: Any, address: Any, num_bytes: Any) -> Any:
    """Asks for some bytes, more than none, to be brought into the second cache."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, num_bytes = args

        def body(line: Any, _: list[Any]) -> list[Any]:
            _fetch(builder, builder.add(address, builder.mul(line, _whole(64))))
            return []

        _loop(builder, builder.sdiv(builder.add(num_bytes, _whole(63)), _whole(64)), [], body)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


def _whole(number: int) -> Any:
    return ir.Constant(ir.IntType(64), number)


@intrinsic(prefer_literal=True)
def _dots(
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
    """out[row, o] = (starts[o] + Σ over i of x[row, i] · weights[o, i]) · factors[o], for a block of outputs.

    `rows` rows of x in uint8, weights in int8, sums in int32, and one rounding of each to float32. Four products are
    one instruction (`vpdpbusd`); a block's weights are read once for all rows. For each four inputs, so many cache
    `lines` from `ahead` on are asked for: 0, 1, or as many as are read. All else are addresses and numbers.
    """
    num_rows, num_vectors, num_lines = rows.literal_value, BLOCK // VECTOR, lines.literal_value
    num_streams = FETCH_STREAMS if num_lines == num_vectors else 1

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        *_, weights, starts, factors, x, inputs, out, outputs, ahead = args
        whole = ir.IntType(32)
        vector = ir.VectorType(whole, VECTOR)
        kind = ir.FunctionType(vector, [vector] * 3)
        # Each time, a cache line of each of the next streams.
        num_turns = max(1, num_streams // num_vectors)
        stream_bytes = builder.sdiv(builder.mul(inputs, _whole(BLOCK)), _whole(num_streams))
        dot = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpdpbusd.512")

        def body(four: Any, sums: list[Any]) -> list[Any]:
            base = builder.add(weights, builder.mul(four, _whole(4 * BLOCK)))
            places = [builder.add(base, _whole(4 * VECTOR * v)) for v in range(num_vectors)]
            stream = builder.mul(builder.srem(four, _whole(num_turns)), _whole(num_vectors))
            line = builder.add(ahead, builder.mul(builder.sdiv(four, _whole(num_turns)), _whole(4 * VECTOR)))
            for v in range(num_lines):
                _fetch(builder, builder.add(line, builder.mul(builder.add(stream, _whole(v)), stream_bytes)))
            columns = [_wholes_at(builder, place) for place in places]
            news: list[Any] = []
            for row in range(num_rows):
                place = builder.add(x, builder.add(builder.mul(inputs, _whole(row)), builder.mul(four, _whole(4))))
                four_bytes = builder.load(builder.inttoptr(place, ir.PointerType(whole)), typ=whole)
                four_bytes.align = 4
                all_alike = _broadcast(builder, four_bytes)
                own = sums[row * num_vectors : (row + 1) * num_vectors]
                news += [builder.call(dot, [sofar, all_alike, c]) for sofar, c in zip(own, columns, strict=True)]
            return news

        begin = [_wholes_at(builder, builder.add(starts, _whole(4 * VECTOR * v))) for v in range(num_vectors)]
        sums = _loop(builder, builder.sdiv(inputs, _whole(4)), begin * num_rows, body)
        for row in range(num_rows):
            place = builder.add(out, builder.mul(outputs, _whole(4 * row)))
            for v in range(num_vectors):
                at = _whole(4 * VECTOR * v)
                _store_product(builder, sums[row * num_vectors + v], builder.add(factors, at), builder.add(place, at))
        return context.get_dummy_value()

    return types.none(rows, lines, *[types.int64] * 8), codegen


@intrinsic(prefer_literal=True)
def _amx_dots(
    _context: Any,
    groups: Any,
    rows: Any,
    weights: Any,
    starts: Any,
    factors: Any,
    x: Any,
    inputs: Any,
    out: Any,
    outputs: Any,
    ahead: Any,
) -> Any:
    """What `_dots` computes, bit for bit, by AMX: for `rows` rows in `groups` groups of at most 16, for 64 · n inputs.

    A tile register holds 16 rows of 64 bytes: of x, 64 inputs of 16 rows; of the weights, 64 inputs of 16 outputs, four
    of each in a row, as they lie in memory; of the sums, 16 rows of 16 outputs. There are eight: one group meets all
    of a block's outputs at once, two meet half of them.

    Args:
        ahead: bytes, how far ahead weights are asked for; 0 where they are in a cache already.
    """
    num_groups = groups.literal_value
    num_columns = BLOCK // VECTOR // num_groups  # of tiles, at once
    sums = [[group * num_columns + column for column in range(num_columns)] for group in range(num_groups)]
    lefts = [num_groups * num_columns + group for group in range(num_groups)]
    rights = range(lefts[-1] + 1, 8)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _, rows, weights, starts, factors, x, inputs, out, outputs, ahead = args
        i8, i16, i64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
        pointer = ir.PointerType(i8)

        def call(name: str, kinds: list[Any], *values: Any) -> None:
            kind = ir.FunctionType(ir.VoidType(), kinds)
            given = [
                builder.inttoptr(value, pointer) if of is pointer else ir.Constant(i8, value) if of is i8 else value
                for of, value in zip(kinds, values, strict=True)
            ]
            builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), given)

        def put(value: Any, address: Any) -> None:
            builder.store(value, builder.inttoptr(address, ir.PointerType(value.type))).align = 1

        def plus(address: Any, *terms: Any) -> Any:
            for term in terms:
                address = builder.add(address, _whole(term) if isinstance(term, int) else term)
            return address

        def times(value: Any, number: int) -> Any:
            return builder.mul(value, _whole(number))

        # Intel's manual, volume 1, 18.2: palette, 15 bytes, 16 numbers of bytes in a row, 16 numbers of rows.
        config = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(i8, 64)), i64)
        for word in range(8):
            put(ir.Constant(i64, 1 if word == 0 else 0), plus(config, 8 * word))
        last_rows = plus(rows, -AMX_ROWS * (num_groups - 1))
        group_rows = [*[_whole(AMX_ROWS)] * (num_groups - 1), last_rows]
        sizes = {tile: of for group, of in enumerate(group_rows) for tile in (*sums[group], lefts[group])}
        for tile, of in {**sizes, **dict.fromkeys(rights, _whole(AMX_ROWS))}.items():
            put(ir.Constant(i16, AMX_BYTES), plus(config, 16 + 2 * tile))
            put(builder.trunc(of, i8), plus(config, 48 + tile))
        call("ldtilecfg", [pointer], config)

        tile_bytes = AMX_ROWS * AMX_BYTES
        scratch = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(i8, 4 * tile_bytes)), i64)
        for first in range(0, BLOCK // VECTOR, num_columns):

            def body(k: Any, _: list[Any], first: int = first) -> list[Any]:
                base = plus(weights, times(k, AMX_BYTES * BLOCK), first * AMX_BYTES)
                for group, left in enumerate(lefts):
                    row = plus(x, times(k, AMX_BYTES), times(inputs, AMX_ROWS * group))
                    call("tileloadd64", [i8, pointer, i64], left, row, inputs)
                for column in range(num_columns):
                    place, right = plus(base, AMX_BYTES * column), rights[column % len(rights)]
                    for row_number in range(AMX_ROWS):
                        _fetch(builder, plus(place, 4 * BLOCK * row_number, ahead))
                    call("tileloadd64", [i8, pointer, i64], right, place, _whole(4 * BLOCK))
                    for group, left in enumerate(lefts):
                        call("tdpbusd", [i8, i8, i8], sums[group][column], left, right)
                return []

            tiles = [tile for group in sums for tile in group]
            for tile in tiles:
                call("tilezero", [i8], tile)
            _loop(builder, builder.sdiv(inputs, _whole(AMX_BYTES)), [], body)
            for tile in tiles:
                call("tilestored64", [i8, pointer, i64], tile, plus(scratch, tile_bytes * tile), _whole(AMX_BYTES))
            for group, of in enumerate(group_rows):

                def finish(row: Any, _: list[Any], group: int = group, first: int = first) -> list[Any]:
                    place = plus(out, builder.mul(outputs, times(plus(row, AMX_ROWS * group), 4)))
                    for column, tile in enumerate(sums[group]):
                        at = _whole(AMX_BYTES * (first + column))
                        sofar = _wholes_at(builder, plus(scratch, tile_bytes * tile, times(row, AMX_BYTES)))
                        total = builder.add(sofar, _wholes_at(builder, plus(starts, at)))
                        _store_product(builder, total, plus(factors, at), plus(place, at))
                    return []

                _loop(builder, of, [], finish)
        return context.get_dummy_value()

    return types.none(groups, *[types.int64] * 9), codegen


@intrinsic
def _release_amx(_context: Any) -> Any:
    """Clears the tile registers: none has to be kept while others run."""

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.tilerelease"), [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def _clear(_context: Any, address: Any, vectors: Any) -> Any:
    """Writes `vectors` · VECTOR float32 zeros, at least one vector; by the vectors that will read them."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        address, vectors = args

        def body(number: Any, _: list[Any]) -> list[Any]:
            _store_vector(builder, _vector_of(0.0), builder.add(address, builder.mul(number, _whole(4 * VECTOR))))
            return []

        _loop(builder, vectors, [], body)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), codegen


def _is_before(builder: Any, first: Any, number: Any) -> Any:
    """Of the VECTOR places from `first` on, which are before the place `number`."""
    lefts = _broadcast(builder, builder.trunc(builder.sub(number, first), ir.IntType(32)))
    return builder.icmp_signed("<", ir.Constant(lefts.type, list(range(VECTOR))), lefts)


def _larger(builder: Any, one: Any, other: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


@intrinsic
def _most(_context: Any, row: Any, number: Any) -> Any:
    """The largest of `number` float32, at least one; the rest of a vector may be anything."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        row, number = args

        def body(vector: Any, sofar: list[Any]) -> list[Any]:
            first = builder.mul(vector, _whole(VECTOR))
            numbers = _vector_at(builder, builder.add(row, builder.mul(first, _whole(4))))
            numbers = builder.select(_is_before(builder, first, number), numbers, _vector_of(LEAST))
            return [_larger(builder, numbers, sofar[0])]

        num_vectors = builder.sdiv(builder.add(number, _whole(VECTOR - 1)), _whole(VECTOR))
        (most,) = _loop(builder, num_vectors, [_vector_of(LEAST)], body)
        apart = VECTOR // 2
        while apart > 0:
            swapped = [ir.Constant(ir.IntType(32), lane ^ apart) for lane in range(VECTOR)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), VECTOR), swapped)
            most = _larger(builder, most, builder.shuffle_vector(most, most, mask))
            apart //= 2
        return builder.extract_element(most, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.int64, types.int64), codegen


def _exp_below(builder: Any, x: Any) -> Any:
    """exp of a vector of numbers that are at most 0, as `_exp` has it."""
    fma, shift = _fused(builder, x.type), _vector_of(12582912.0)
    x = _larger(builder, x, _vector_of(-87.0))
    n = builder.fsub(builder.call(fma, [x, _vector_of(1.44269504), shift]), shift)
    r = builder.call(fma, [n, _vector_of(-0.693359375), x])
    r = builder.call(fma, [n, _vector_of(2.12194440e-4), r])
    p = _vector_of(EXP[0])
    for factor in EXP[1:]:
        p = builder.call(fma, [p, r, _vector_of(factor)])
    p = builder.fadd(builder.call(fma, [p, builder.fmul(r, r), r]), _vector_of(1.0))
    wholes = ir.VectorType(ir.IntType(32), VECTOR)
    exponent = builder.add(builder.fptosi(n, wholes), ir.Constant(wholes, [127] * VECTOR))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(wholes, [23] * VECTOR)), x.type)
    return builder.fmul(p, power)


@intrinsic
def _sum_exp(_context: Any, numbers: Any, pieces: Any, most: Any, sums: Any) -> Any:
    """sums[lane] = Σ over pieces of exp(numbers[piece, lane] - most); LANES float32 in a piece, at least one piece."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        numbers, pieces, most, sums = args
        most = _broadcast(builder, most)
        offsets = [_whole(4 * first) for first in range(0, LANES, VECTOR)]

        def body(piece: Any, sofar: list[Any]) -> list[Any]:
            place = builder.add(numbers, builder.mul(piece, _whole(4 * LANES)))
            vectors = [_vector_at(builder, builder.add(place, offset)) for offset in offsets]
            powers = [_exp_below(builder, builder.fsub(vector, most)) for vector in vectors]
            return [builder.fadd(*pair) for pair in zip(sofar, powers, strict=True)]

        totals = _loop(builder, pieces, [_vector_of(0.0) for _ in offsets], body)
        for total, offset in zip(totals, offsets, strict=True):
            _store_vector(builder, total, builder.add(sums, offset))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.float32, types.int64), codegen


@intrinsic
def _weigh(_context: Any, scores: Any, number: Any, vectors: Any, most: Any) -> Any:
    """In place, of `number` scores in float32, none above `most`: exp(score - most), as `_exp` has it.

    What follows them in `vectors` vectors, at least one, becomes 0.
    """

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        scores, number, vectors, most = args
        most = _broadcast(builder, most)

        def body(vector: Any, _: list[Any]) -> list[Any]:
            first = builder.mul(vector, _whole(VECTOR))
            place = builder.add(scores, builder.mul(first, _whole(4)))
            weight = _exp_below(builder, builder.fsub(_vector_at(builder, place), most))
            is_seen = _is_before(builder, first, number)
            _store_vector(builder, builder.select(is_seen, weight, _vector_of(0.0)), place)
            return []

        _loop(builder, vectors, [], body)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.float32), codegen


# An intrinsic has its number of rows and vectors from constants, so each combination is called by itself.


@njit(**_FAST)
def _score(
    rows: int, blocks: int, query: int, keys: int, out: int, stride: int, size: int, is_half: bool, ahead: int
) -> None:
    """Scores of `blocks` blocks of keys, two at a time: that fills the processor's pipes."""
    block_bytes = VECTOR * size * (2 if is_half else 4)
    for block in range(0, blocks - 1, 2):
        at, to, then = keys + block * block_bytes, out + 4 * VECTOR * block, ahead + block * block_bytes
        if is_half:
            if rows == 1:
                _scores(1, 2, True, query, at, to, stride, size, then)
            elif rows == 2:
                _scores(2, 2, True, query, at, to, stride, size, then)
            elif rows == 3:
                _scores(3, 2, True, query, at, to, stride, size, then)
            else:
                _scores(4, 2, True, query, at, to, stride, size, then)
        elif rows == 1:
            _scores(1, 2, False, query, at, to, stride, size, then)
        elif rows == 2:
            _scores(2, 2, False, query, at, to, stride, size, then)
        elif rows == 3:
            _scores(3, 2, False, query, at, to, stride, size, then)
        else:
            _scores(4, 2, False, query, at, to, stride, size, then)
    if blocks % 2 == 0:
        return
    last = blocks - 1
    at, to, then = keys + last * block_bytes, out + 4 * VECTOR * last, ahead + last * block_bytes
    if is_half:
        if rows == 1:
            _scores(1, 1, True, query, at, to, stride, size, then)
        elif rows == 2:
            _scores(2, 1, True, query, at, to, stride, size, then)
        elif rows == 3:
            _scores(3, 1, True, query, at, to, stride, size, then)
        else:
            _scores(4, 1, True, query, at, to, stride, size, then)
    elif rows == 1:
        _scores(1, 1, False, query, at, to, stride, size, then)
    elif rows == 2:
        _scores(2, 1, False, query, at, to, stride, size, then)
    elif rows == 3:
        _scores(3, 1, False, query, at, to, stride, size, then)
    else:
        _scores(4, 1, False, query, at, to, stride, size, then)


@njit(**_FAST)
def _sum_four(
    rows: int, weights: int, stride: int, values: int, width: int, number: int, sums: int, totals: int, ahead: int
) -> None:
    if rows == 1:
        _values(1, 4, False, weights, stride, values, width, number, sums, totals, ahead)
    elif rows == 2:
        _values(2, 4, False, weights, stride, values, width, number, sums, totals, ahead)
    elif rows == 3:
        _values(3, 4, False, weights, stride, values, width, number, sums, totals, ahead)
    else:
        _values(4, 4, False, weights, stride, values, width, number, sums, totals, ahead)


@njit(**_FAST)
def _sum_one(
    rows: int, weights: int, stride: int, values: int, width: int, number: int, sums: int, totals: int, ahead: int
) -> None:
    if rows == 1:
        _values(1, 1, False, weights, stride, values, width, number, sums, totals, ahead)
    elif rows == 2:
        _values(2, 1, False, weights, stride, values, width, number, sums, totals, ahead)
    elif rows == 3:
        _values(3, 1, False, weights, stride, values, width, number, sums, totals, ahead)
    else:
        _values(4, 1, False, weights, stride, values, width, number, sums, totals, ahead)


@njit(**_FAST)
def _sum_four_halves(
    rows: int, weights: int, stride: int, values: int, width: int, number: int, sums: int, totals: int, ahead: int
) -> None:
    if rows == 1:
        _values(1, 4, True, weights, stride, values, width, number, sums, totals, ahead)
    elif rows == 2:
        _values(2, 4, True, weights, stride, values, width, number, sums, totals, ahead)
    elif rows == 3:
        _values(3, 4, True, weights, stride, values, width, number, sums, totals, ahead)
    else:
        _values(4, 4, True, weights, stride, values, width, number, sums, totals, ahead)


@njit(**_FAST)
def _sum_one_half(
    rows: int, weights: int, stride: int, values: int, width: int, number: int, sums: int, totals: int, ahead: int
) -> None:
    if rows == 1:
        _values(1, 1, True, weights, stride, values, width, number, sums, totals, ahead)
    elif rows == 2:
        _values(2, 1, True, weights, stride, values, width, number, sums, totals, ahead)
    elif rows == 3:
        _values(3, 1, True, weights, stride, values, width, number, sums, totals, ahead)
    else:
        _values(4, 1, True, weights, stride, values, width, number, sums, totals, ahead)


@njit(**_FAST)
def _sum_values(
    rows: int, weights: int, stride: int, values: int, width: int, number: int, sums: int, is_half: bool, ahead: int
) -> None:
    """`sums` [rows, width + TOTALS] grows by the weighted values, and behind them by the weights.

    Four vectors at a time, as many as heads of 64 have.
    """
    if number == 0:
        return
    item = 2 if is_half else 4
    first = 0
    while first < width:
        at, to, then = values + item * first, sums + 4 * first, ahead + item * first
        totals = sums + 4 * (width if first == 0 else width + VECTOR)  # once is enough
        if width - first >= 4 * VECTOR:
            if is_half:
                _sum_four_halves(rows, weights, stride, at, width, number, to, totals, then)
            else:
                _sum_four(rows, weights, stride, at, width, number, to, totals, then)
            first += 4 * VECTOR
        else:
            if is_half:
                _sum_one_half(rows, weights, stride, at, width, number, to, totals, then)
            else:
                _sum_one(rows, weights, stride, at, width, number, to, totals, then)
            first += VECTOR


# Functions of numbers.


@njit(inline="always", **_VECTOR)
def _exp(x: Any) -> Any:
    """exp, float32, within 2 units in the last place."""
    x = max(_f32(-87.0), x)
    x = min(_f32(88.0), x)
    # Adding 1.5 · 2²³ rounds to a whole number.
    n = (x * _f32(1.44269504) + _f32(12582912.0)) - _f32(12582912.0)
    r = x - n * _f32(0.693359375)
    r = r - n * _f32(-2.12194440e-4)
    p = _f32(EXP[0])
    p = p * r + _f32(EXP[1])
    p = p * r + _f32(EXP[2])
    p = p * r + _f32(EXP[3])
    p = p * r + _f32(EXP[4])
    p = p * r + _f32(EXP[5])
    p = p * r * r + r + _f32(1.0)
    return p * _i32((_i32(n) + 127) << 23).view(np.float32)


@njit(**_VECTOR)
def _activate(row: Any, kind: int) -> None:
    """In place."""
    if kind == 0:
        # ½x(1 + tanh u), u = √(2/π)(x + 0.044715x³), which is x / (1 + exp(-2u)).
        for i in range(len(row)):
            x = row[i]
            t = x * (_f32(-2 * 0.7978845608028654) + _f32(-2 * 0.7978845608028654 * 0.044715) * (x * x))
            row[i] = x / (_f32(1) + _exp(t))
    elif kind == 1:
        for i in range(len(row)):
            x = row[i]
            row[i] = _f32(0.5) * x * (_f32(1) + _f32(math.erf(x * _f32(0.7071067811865476))))
    elif kind == 2:
        for i in range(len(row)):
            x = row[i]
            row[i] = max(_f32(0), x)
    elif kind == 3:
        for i in range(len(row)):
            x = row[i]
            row[i] = x / (_f32(1) + _exp(-x))
    else:
        for i in range(len(row)):
            row[i] = _f32(math.tanh(row[i]))


@njit(**_VECTOR)
def _sum(row: Any, lanes: Any) -> Any:
    """In LANES chains, which are then added in their order."""
    for lane in range(LANES):
        lanes[lane] = _f32(0)
    whole = len(row) // LANES * LANES
    for first in range(0, whole, LANES):
        piece = row[first : first + LANES]
        for lane in range(LANES):
            lanes[lane] += piece[lane]
    for i in range(whole, len(row)):
        lanes[i - whole] += row[i]
    total = _f32(0)
    for lane in range(LANES):
        total += lanes[lane]
    return total


@njit(**_VECTOR)
def _sum_of_squares(row: Any, lanes: Any) -> Any:
    for lane in range(LANES):
        lanes[lane] = _f32(0)
    whole = len(row) // LANES * LANES
    for first in range(0, whole, LANES):
        piece = row[first : first + LANES]
        for lane in range(LANES):
            lanes[lane] += piece[lane] * piece[lane]
    for i in range(whole, len(row)):
        lanes[i - whole] += row[i] * row[i]
    total = _f32(0)
    for lane in range(LANES):
        total += lanes[lane]
    return total


@njit(**_FAST)
def _largest(row: Any) -> Any:
    """The largest absolute value. Bits of positive floats are ordered as they are, and whole numbers compare faster."""
    bits = row.view(np.int32)
    most = _i32(0)
    for i in range(len(row)):
        one = _i32(bits[i] & _i32(0x7FFFFFFF))
        most = max(most, one)
    return _i32(most).view(np.float32)


@njit(**_VECTOR)
def _prepare(row: Any, number: int, step: Any) -> None:
    """BatchRow `number` of what the next product takes."""
    mode, width = step[MODE], len(row)
    scales = _floats(step[SCALES], number + 1)
    if mode == PLAIN:
        ready = _floats(step[PREPARED] + 4 * number * width, width)
        for i in range(width):
            ready[i] = row[i]
        scales[number] = _f32(1)
        return
    scale = max(_largest(row), _f32(1.1754944e-38))
    scales[number] = scale
    if mode == UNIT:
        ready = _floats(step[PREPARED] + 4 * number * width, width)
        for i in range(width):
            ready[i] = row[i] / scale
        return
    small = carray(_pointer(step[PREPARED] + number * width), (width,), _u8)
    for i in range(width):
        # Rounded to the nearest, ties to even, by adding 1.5 · 2²³: what fbgemm's kernel does to a row that is UNIT.
        level = row[i] / scale * _f32(127) + _f32(128)
        small[i] = _u8(_i32((level + _f32(12582912.0)) - _f32(12582912.0)))


# Kernels.


@njit(inline="always", **_FAST)
def _call_of(address: int) -> Any:
    return carray(_pointer(address), (_CALL_FIELDS,), _i64)


@njit(inline="always", **_FAST)
def _claim(address: int, call: Any, thread: int, turn: int, num_items: int) -> Any:
    """An item that nobody has claimed, `num_items` if there is none; and the turn: how many shares are done.

    To be called with turn 0 first, then with what it returned.
    """
    shares = call[_SHARES]
    while turn < shares:
        share = (thread + turn) % shares
        item = num_items * share // shares + _take(address + 8 * (_CALL_FIELDS + share))
        if item < num_items * (share + 1) // shares:
            return item, turn
        turn += 1
    return num_items, turn


_KERNEL = types.void(types.int64, types.int64)


@cfunc(_KERNEL, **_VECTOR)
def _add_and_norm(address: int, thread: int) -> None:
    """Of each row: the stream grows by the product and its bias, is normalised, and made ready.

    Without a product the stream begins: with the embeddings of token and position.
    """
    call = _call_of(address)
    step = carray(_pointer(call[_STEP]), (STEP_FIELDS,), _i64)
    layer = carray(_pointer(call[_LAYER]), (NORM_FIELDS,), _i64)
    num_rows, width = step[NUM_ROWS], step[WIDTH]
    stream, bias = _matrix(step[X], num_rows, width), _floats(layer[NORM_BIAS_IN], width)
    norm_weight, norm_bias = _floats(layer[NORM_WEIGHT], width), _floats(layer[NORM_BIAS], width)
    scales, product = _floats(step[SCALES_IN], num_rows), _matrix(call[_PRODUCT], num_rows, width)
    sources = carray(_pointer(step[SOURCES]), (num_rows,), _i64)
    rows = _wholes(step[ROWS], num_rows, ROW_FIELDS)
    epsilon = carray(_pointer(step[EPSILON]), (1,), _f32)[0]
    scratch = thread * step[SCRATCH_STRIDE]
    lanes = _floats(step[SCRATCH] + 4 * scratch, LANES)
    normed = _floats(step[SCRATCH] + 4 * (scratch + LANES), width)
    turn = 0
    while True:
        number, turn = _claim(address, call, thread, turn, num_rows)
        if number >= num_rows:
            return
        source = number if step[SOURCES] == 0 else sources[number]
        x = stream[source]
        if call[_PRODUCT] == 0:
            token = _floats(step[TOKEN_EMBEDDING] + 4 * width * rows[number, ROW_ID], width)
            position = _floats(step[POSITION_EMBEDDING] + 4 * width * rows[number, ROW_POSITION], width)
            for i in range(width):
                x[i] = token[i] + position[i]
        else:
            scale, more = scales[source], product[source]
            for i in range(width):
                x[i] = x[i] + (more[i] * scale + bias[i])
        mean = _sum(x, lanes) / _f32(width)
        for i in range(width):
            normed[i] = x[i] - mean
        inverse = _f32(1) / np.sqrt(_sum_of_squares(normed, lanes) / _f32(width) + epsilon)
        for i in range(width):
            normed[i] = normed[i] * inverse * norm_weight[i] + norm_bias[i]
        _prepare(normed, number, step)


@njit(inline="always", **_VECTOR)
def _of_entry(entry: int, head: int, step: Any, layer: Any) -> tuple[int, int]:
    """Where a head's keys and values of a entry begin."""
    keys = layer[KEYS] + step[ENTRY_KEYS] * entry + step[ENTRY_KEYS] // step[HEADS] * head
    return keys, layer[VALUES] + step[ENTRY_VALUES] * entry + step[ENTRY_VALUES] // step[HEADS] * head


@njit(inline="always", **_VECTOR)
def _of_suffix(suffix: int, head: int, step: Any, layer: Any) -> tuple[int, int]:
    """The same of a suffix."""
    keys = layer[SUFFIXES_KEYS] + step[SUFFIX_KEYS] * suffix + step[SUFFIX_KEYS] // step[HEADS] * head
    return keys, layer[SUFFIXES_VALUES] + step[SUFFIX_VALUES] * suffix + step[SUFFIX_VALUES] // step[HEADS] * head


@njit(inline="always", **_VECTOR)
def _places(number: int, head: int, rows: Any, step: Any, layer: Any) -> tuple[int, int, int]:
    """Where the keys of a row's block of positions begin, which of them is the row's, and where its value is."""
    size, item = step[HEAD_SIZE], step[ITEM_BYTES]
    value_width = (size + VECTOR - 1) // VECTOR * VECTOR
    if rows[number, ROW_SUFFIX] >= 0:
        position = rows[number, ROW_SUFFIX_SEEN] - 1
        keys, values = _of_suffix(rows[number, ROW_SUFFIX], head, step, layer)
    else:
        position = rows[number, ROW_SEEN] - 1
        keys, values = _of_entry(rows[number, ROW_ENTRY], head, step, layer)
    block = keys + item * (position // VECTOR * size * VECTOR)
    return block, position % VECTOR, values + item * position * value_width


@njit(**_VECTOR)
def _keep(own: int, number: int, head: int, rows: Any, step: Any, layer: Any) -> None:
    """Stores one head's key and value of a row; `own` is where its queries, keys and values of all heads are, of which
    the key may be overwritten."""
    width, size, item = step[WIDTH], step[HEAD_SIZE], step[ITEM_BYTES]
    keys, which, values = _places(number, head, rows, step, layer)
    keys += item * which
    key, value = own + 4 * (width + head * size), own + 4 * (2 * width + head * size)
    key_row, value_row = _floats(key, size), _floats(value, size)
    if item == 4:
        lane, whole = _floats(keys, size * VECTOR), _floats(values, size)
        for i in range(size):
            lane[i * VECTOR] = key_row[i]
            whole[i] = value_row[i]
        return
    vectors = size // VECTOR * VECTOR
    for i in range(vectors, size):
        _put_half(keys + 2 * i * VECTOR, key_row[i])
        _put_half(values + 2 * i, value_row[i])
    for first in range(0, vectors, VECTOR):
        _put_halves(key + 4 * first, key + 2 * first)
        _put_halves(value + 4 * first, values + 2 * first)
    halves, half_lane = carray(_pointer(key), (size,), _u16), carray(_pointer(keys), (size * VECTOR,), _u16)
    for i in range(vectors):
        half_lane[i * VECTOR] = halves[i]


@cfunc(_KERNEL, **_VECTOR)
def _store(address: int, thread: int) -> None:
    """Of each head and STORE_ROWS rows: their queries, and their keys and values where they are kept."""
    call = _call_of(address)
    step = carray(_pointer(call[_STEP]), (STEP_FIELDS,), _i64)
    layer = carray(_pointer(call[_LAYER]), (LAYER_FIELDS,), _i64)
    num_rows, width, heads, size = step[NUM_ROWS], step[WIDTH], step[HEADS], step[HEAD_SIZE]
    scales, rows = _floats(step[SCALES], num_rows), _wholes(step[ROWS], num_rows, ROW_FIELDS)
    num_groups = (num_rows + STORE_ROWS - 1) // STORE_ROWS
    turn = 0
    while True:
        item, turn = _claim(address, call, thread, turn, heads * num_groups)
        if item >= heads * num_groups:
            return
        head, first = item // num_groups, item % num_groups * STORE_ROWS
        last = min(first + STORE_ROWS, num_rows)
        # All at once: each of these pieces is too short for the CPU to see what comes next.
        for number in range(first, last):
            for part in range(3):
                _ask_for(call[_PRODUCT] + 4 * ((3 * number + part) * width + head * size), 4 * size)
            keys, which, values = _places(number, head, rows, step, layer)
            if number == first or which == 0 or rows[number, ROW_SUFFIX] >= 0:
                _ask_for(keys, step[ITEM_BYTES] * size * VECTOR)
            _ask_for(values, step[ITEM_BYTES] * size)
        # Neighbours in a prompt share the cache lines of their keys.
        for number in range(first, last):
            scale, row = scales[number], call[_PRODUCT] + 12 * number * width
            for part in range(3):
                at = 4 * (part * width + head * size)
                numbers, bias = _floats(row + at, size), _floats(layer[QKV_BIAS] + at, size)
                to = _floats(step[QUERY] + 4 * (number * width + head * size), size) if part == 0 else numbers
                # From 0 on: of other ranges numba does not know that no index is negative, and makes no vectors.
                for i in range(size):
                    to[i] = numbers[i] * scale + bias[i]
            _keep(row, number, head, rows, step, layer)


@njit(**_VECTOR)
def _attend_tile(step: Any, layer: Any, tile: Any, rows: Any, head: int, scratch: int, following: int) -> None:
    """Attention of one head of up to TILE rows that see the same entry, into MEAN.

    While keys are read, their values are asked for; while those are read, what lies at `following`.
    """
    size, width = step[HEAD_SIZE], step[WIDTH]
    value_width = (size + VECTOR - 1) // VECTOR * VECTOR
    num_rows, stride, is_half = tile[0], step[SCORE_STRIDE], step[ITEM_BYTES] == 2
    query = scratch
    sums = query + 4 * TILE * size
    sums_width = value_width + TOTALS
    scores = sums + 4 * TILE * sums_width
    in_entry = 0
    for i in range(num_rows):
        number = tile[1 + i]
        in_entry = max(in_entry, rows[number, ROW_SEEN])
        theirs = _floats(step[QUERY] + 4 * (number * width + head * size), size)
        copy = _floats(query + 4 * i * size, size)
        for d in range(size):
            copy[d] = theirs[d]
    keys, values = _of_entry(rows[tile[1], ROW_ENTRY], head, step, layer)
    blocks = (in_entry + VECTOR - 1) // VECTOR
    _score(num_rows, blocks, query, keys, scores, stride, size, is_half, values)
    for i in range(num_rows):
        number = tile[1 + i]
        seen, in_suffix = rows[number, ROW_SEEN], rows[number, ROW_SUFFIX_SEEN]
        ours, suffixes = scores + 4 * i * stride, scores + 4 * (i * stride + blocks * VECTOR)
        most = _f32(LEAST)
        if seen > 0:
            most = _most(ours, seen)
        if in_suffix > 0:
            suffix_blocks = (in_suffix + VECTOR - 1) // VECTOR
            at, _ = _of_suffix(rows[number, ROW_SUFFIX], head, step, layer)
            # Suffixes are short: what is asked for ahead of them is only themselves.
            _score(1, suffix_blocks, query + 4 * i * size, at, suffixes, stride, size, is_half, at)
            most = max(most, _most(suffixes, in_suffix))
            _weigh(suffixes, in_suffix, suffix_blocks, most)
        if blocks > 0:
            _weigh(ours, seen, blocks, most)
        _clear(sums + 4 * i * sums_width, sums_width // VECTOR)
    _sum_values(num_rows, scores, stride, values, value_width, in_entry, sums, is_half, following)
    for i in range(num_rows):
        number = tile[1 + i]
        in_suffix = rows[number, ROW_SUFFIX_SEEN]
        if in_suffix > 0:
            _, at = _of_suffix(rows[number, ROW_SUFFIX], head, step, layer)
            weights = scores + 4 * (i * stride + blocks * VECTOR)
            _sum_values(1, weights, stride, at, value_width, in_suffix, sums + 4 * i * sums_width, is_half, at)
        total = _floats(sums + 4 * i * sums_width, sums_width)
        mean = _floats(step[MEAN] + 4 * (number * width + head * size), size)
        inverse = _f32(1) / total[value_width]
        for d in range(size):
            mean[d] = total[d] * inverse


@cfunc(_KERNEL, **_VECTOR)
def _attend(address: int, thread: int) -> None:
    """Of each tile and head: attention. Whoever does a tile's last head makes its rows ready."""
    call = _call_of(address)
    step = carray(_pointer(call[_STEP]), (STEP_FIELDS,), _i64)
    layer = carray(_pointer(call[_LAYER]), (LAYER_FIELDS,), _i64)
    num_rows, num_tiles, heads, width = step[NUM_ROWS], step[NUM_TILES], step[HEADS], step[WIDTH]
    rows, tiles = _wholes(step[ROWS], num_rows, ROW_FIELDS), _wholes(step[TILES], num_tiles, 1 + TILE)
    means = _matrix(step[MEAN], num_rows, width)
    scratch = step[SCRATCH] + 4 * thread * step[SCRATCH_STRIDE]
    turn = 0
    while True:
        # By heads, as they were stored.
        item, turn = _claim(address, call, thread, turn, heads * num_tiles)
        if item >= heads * num_tiles:
            return
        tile = item % num_tiles
        # The next is the next tile of this head or the first of the next, unless another thread has it.
        after = min(item + 1, heads * num_tiles - 1)
        following, _ = _of_entry(rows[tiles[after % num_tiles, 1], ROW_ENTRY], after // num_tiles, step, layer)
        _attend_tile(step, layer, tiles[tile], rows, item // num_tiles, scratch, following)
        done = _take(step[HEADS_DONE] + 8 * tile)
        if done % heads == heads - 1:
            for i in range(tiles[tile, 0]):
                number = tiles[tile, 1 + i]
                _prepare(means[number], number, step)


@cfunc(_KERNEL, **_VECTOR)
def _act(address: int, thread: int) -> None:
    """Of each row: the activation of the product and its bias, made ready. The product is overwritten."""
    call = _call_of(address)
    step = carray(_pointer(call[_STEP]), (STEP_FIELDS,), _i64)
    layer = carray(_pointer(call[_LAYER]), (LAYER_FIELDS,), _i64)
    num_rows, inner = step[NUM_ROWS], step[INNER]
    product, bias = _matrix(call[_PRODUCT], num_rows, inner), _floats(layer[UP_BIAS], inner)
    scales = _floats(step[SCALES], num_rows)
    turn = 0
    while True:
        number, turn = _claim(address, call, thread, turn, num_rows)
        if number >= num_rows:
            return
        scale, row = scales[number], product[number]
        for i in range(inner):
            row[i] = row[i] * scale + bias[i]
        _activate(row, step[ACTIVATION])
        _prepare(row, number, step)


@cfunc(_KERNEL, **_VECTOR)
def _scale(address: int, thread: int) -> None:
    """Of each row: the product, of as many columns as the call has in its layer's place, times the row's scale."""
    call = _call_of(address)
    step = carray(_pointer(call[_STEP]), (STEP_FIELDS,), _i64)
    num_rows = step[NUM_ROWS]
    product, scales = _matrix(call[_PRODUCT], num_rows, call[_LAYER]), _floats(step[SCALES], num_rows)
    turn = 0
    while True:
        number, turn = _claim(address, call, thread, turn, num_rows)
        if number >= num_rows:
            return
        row, scale = product[number], scales[number]
        for i in range(len(row)):
            row[i] = row[i] * scale


@njit(**_VECTOR)
def _group_maxima(logits: Any, maxima: Any) -> None:
    """Token i is of group i % GROUPS."""
    vocab = len(logits)
    for i in range(GROUPS):
        maxima[i] = _f32(LEAST)
    for first in range(0, vocab, GROUPS):
        piece = logits[first : min(first + GROUPS, vocab)]
        for i in range(len(piece)):
            maxima[i] = max(maxima[i], piece[i])


@njit(**_FAST)
def _log_total(logits: int, vocab: int, most: Any, sums: int) -> float:
    """log Σ exp(logits), of which `most` is the largest; in double but for LANES sums of every so many."""
    total = 0.0
    whole = vocab // LANES
    if whole > 0:
        _sum_exp(logits, whole, most, sums)
        lanes = _floats(sums, LANES)
        for lane in range(LANES):
            total += lanes[lane]
    rest = _floats(logits + 4 * LANES * whole, vocab - LANES * whole)
    for i in range(len(rest)):
        total += _exp(rest[i] - most)
    return float(most) + math.log(total)


@njit(**_FAST)
def _reached_by(numbers: Any, n: int) -> Any:
    """A number that n of GROUPS numbers reach, and few more unless they are equal: to count takes less than to sort.

    By halving the range it can be in. Bits of floats, those of negative ones turned round, are ordered as the floats.
    """
    bits = numbers.view(np.int32)
    low, high = np.int64(-(1 << 31)), np.int64((1 << 31) - 1)
    while low < high:
        middle = (low + high + 1) >> 1
        least = _i32(middle)
        count = _i32(0)
        for i in range(GROUPS):
            one = bits[i] ^ ((bits[i] >> 31) & _i32(0x7FFFFFFF))
            count += _i32(one >= least)
        if count >= n:
            low = middle
            if count <= n + n // 4:
                break
        else:
            high = middle - 1
    found = _i32(low)
    return _i32(found ^ ((found >> 31) & _i32(0x7FFFFFFF))).view(np.float32)


@njit(**_FAST)
def _likeliest(logits: Any, maxima: Any, values: Any, ids: Any) -> int:
    """The NUM_CANDIDATES likeliest, best first; of equals the smaller id first. Returns how many there are.

    As many groups have a maximum of at least the threshold, so the likeliest are no less.
    """
    vocab = len(logits)
    most = min(NUM_CANDIDATES, vocab)
    threshold = _reached_by(maxima, most)
    number = 0
    for group in range(min(GROUPS, vocab)):
        if maxima[group] < threshold:
            continue
        for token in range(group, vocab, GROUPS):
            if logits[token] >= threshold:
                number = _insert(logits[token], token, values, ids, number)
    return number


@njit(**_FAST)
def _insert(value: Any, token: int, values: Any, ids: Any, number: int) -> int:
    """Puts a token among `number` others, best first; of equals the smaller id first. Returns how many there are."""
    last = number
    if number == NUM_CANDIDATES:
        last = number - 1
        if value < values[last] or (value == values[last] and token > ids[last]):
            return number
    while last > 0 and (values[last - 1] < value or (values[last - 1] == value and ids[last - 1] > token)):
        values[last], ids[last] = values[last - 1], ids[last - 1]
        last -= 1
    values[last], ids[last] = value, token
    return min(number + 1, NUM_CANDIDATES)


@njit(**_FAST)
def _likeliest_allowed(logits: Any, most: Any, draw: Any, values: Any, ids: Any) -> int:
    """The same of the tokens that a draw can choose; `most` is the largest logit of all."""
    num_allowed, num_more = int(draw[NUM_ALLOWED]), int(draw[NUM_IF_LIKELIEST])
    choices = carray(_pointer(int(draw[CHOICES])), (num_allowed + num_more,), _i32)
    number = 0
    for i in range(num_allowed):
        number = _insert(logits[choices[i]], int(choices[i]), values, ids, number)
    for i in range(num_allowed, num_allowed + num_more):
        if logits[choices[i]] >= most:
            number = _insert(logits[choices[i]], int(choices[i]), values, ids, number)
    return number


@njit(**_FAST)
def _pick(values: Any, number: int, draw: Any, probs: Any) -> int:
    """Which of the candidates: as `sampling.pick`, in its order."""
    if draw[TEMPERATURE] == 0:
        return int(draw[RANK])
    kept = number if draw[TOP_K] > number else int(draw[TOP_K])
    total = 0.0
    for i in range(kept):
        probs[i] = math.exp((float(values[i]) - float(values[0])) / draw[TEMPERATURE])
        total += probs[i]
    before, mass, end = 0.0, 0.0, 0
    for i in range(kept):
        # Top-p keeps a token if those before it have less than top_p: the first is always kept.
        if i > 0 and before >= draw[TOP_P]:
            break
        before += probs[i] / total
        mass = before
        end = i + 1
    target, after = draw[UNIFORM] * mass, 0.0
    for i in range(end):
        after += probs[i] / total
        if after > target:
            return i
    return end - 1


@cfunc(_KERNEL, **_FAST)
def _sample(address: int, thread: int) -> None:
    """Of each draw that needs no more than NUM_CANDIDATES candidates: its token and log-probability, into the table.

    Where the table has a token already, only its log-probability.
    """
    call = _call_of(address)
    step = carray(_pointer(call[_STEP]), (SAMPLE_FIELDS,), _i64)
    num_draws, vocab = step[SAMPLE_ROWS], step[SAMPLE_VOCAB]
    table = carray(_pointer(step[SAMPLE_TABLE]), (num_draws, DRAW_FIELDS), np.float64)
    stride = step[SAMPLE_SCRATCH_STRIDE]
    scratch = step[SAMPLE_SCRATCH] + 4 * thread * stride
    maxima, sums = _floats(scratch, GROUPS), scratch + 4 * GROUPS
    values = _floats(sums + 4 * LANES, NUM_CANDIDATES)
    ids = np.empty(NUM_CANDIDATES, np.int64)
    probs = np.empty(NUM_CANDIDATES, np.float64)
    turn = 0
    while True:
        number, turn = _claim(address, call, thread, turn, num_draws)
        if number >= num_draws:
            return
        draw = table[number]
        row = call[_PRODUCT] + 4 * vocab * int(draw[DRAW_ROW])
        logits = _floats(row, vocab)
        _group_maxima(logits, maxima)
        most = _most(scratch, GROUPS)
        if draw[NUM_ALLOWED] > 0:
            num_likeliest = _likeliest_allowed(logits, most, draw, values, ids)
        else:
            num_likeliest = _likeliest(logits, maxima, values, ids)
        log_total = _log_total(row, vocab, most, sums)
        if draw[TOKEN] < 0:
            draw[TOKEN] = ids[_pick(values, num_likeliest, draw, probs)]
        draw[LOGPROB] = float(logits[int(draw[TOKEN])]) - log_total


@cfunc(_KERNEL, **_FAST)
def _advance(address: int, _thread: int) -> None:
    """Each row is that of the token which has been drawn of it, and what follows is drawn by the next table.

    Sets the interrupt flag if a sequence has ended. The call has the flag's address in its layer's place, the draws'
    parameters in its product's; draw i is row i's.
    """
    call = _call_of(address)
    step = carray(_pointer(call[_STEP]), (STEP_FIELDS,), _i64)
    draws = carray(_pointer(call[_PRODUCT]), (SAMPLE_FIELDS,), _i64)
    num_rows = step[NUM_ROWS]
    table = carray(_pointer(draws[SAMPLE_TABLE]), (num_rows, DRAW_FIELDS), np.float64)
    rows = _wholes(step[ROWS], num_rows, ROW_FIELDS)
    for number in range(num_rows):
        rows[number, ROW_ID] = _i64(table[number, TOKEN])
        if rows[number, ROW_ID] == step[END_ID]:
            _add(call[_LAYER], 1)
        rows[number, ROW_POSITION] += 1
        rows[number, ROW_SUFFIX_SEEN] += 1
    draws[SAMPLE_TABLE] += 8 * DRAW_FIELDS * num_rows


# The product with 8-bit weights.


if HAS_DOT_PRODUCTS:  # a compiler that is asked for instructions that are not there gives up

    @njit(inline="always", **_FAST)
    def _multiply_block(call: Any, step: Any, block: int, following: int) -> None:
        """The last block may overlap the one before it: what both write is the same.

        Args:
            following: the address of the weights that are wanted after this block's.
        """
        inputs, outputs = step[INPUTS], step[OUTPUTS]
        first = 4 * min(block * BLOCK, outputs - BLOCK)
        weights, starts, factors = step[WEIGHTS] + block * BLOCK * inputs, step[STARTS] + first, step[FACTORS] + first
        x, out, left = call[_LAYER], call[_PRODUCT] + first, call[_ROWS]
        if HAS_AMX and left > step[MOST_DOT_ROWS]:
            ahead = FETCH_AHEAD_BYTES
            while left > 0:
                rows = min(left, 2 * AMX_ROWS)
                if rows > AMX_ROWS:
                    _amx_dots(2, rows, weights, starts, factors, x, inputs, out, outputs, ahead)
                else:
                    _amx_dots(1, rows, weights, starts, factors, x, inputs, out, outputs, ahead)
                x, out, left, ahead = x + rows * inputs, out + 4 * rows * outputs, left - rows, 0
            return
        end = following + BLOCK * inputs
        while left > DOT_ROWS:
            if following < end:
                _dots(6, LINES_FOR_MANY, weights, starts, factors, x, inputs, out, outputs, following)
            else:
                _dots(6, 0, weights, starts, factors, x, inputs, out, outputs, following)
            x, out, left = x + DOT_ROWS * inputs, out + 4 * DOT_ROWS * outputs, left - DOT_ROWS
            following += LINES_FOR_MANY * 64 * inputs // 4  # what was asked for, as `_dots` has it
        if left == 6:
            _dots(6, LINES_FOR_FEW, weights, starts, factors, x, inputs, out, outputs, following)
        elif left == 5:
            _dots(5, LINES_FOR_FEW, weights, starts, factors, x, inputs, out, outputs, following)
        elif left == 4:
            _dots(4, LINES_FOR_FEW, weights, starts, factors, x, inputs, out, outputs, following)
        elif left == 3:
            _dots(3, LINES_FOR_FEW, weights, starts, factors, x, inputs, out, outputs, following)
        elif left == 2:
            _dots(2, LINES_FOR_FEW, weights, starts, factors, x, inputs, out, outputs, following)
        elif left == 1:
            _dots(1, LINES_FOR_FEW, weights, starts, factors, x, inputs, out, outputs, following)

    @cfunc(_KERNEL, **_FAST)
    def _multiply(address: int, thread: int) -> None:
        """The product [rows, outputs] float32 of rows and weights, both in 8 bits, as `_dots` has it."""
        call = _call_of(address)
        step = carray(_pointer(call[_STEP]), (PRODUCT_FIELDS,), _i64)
        num_blocks, block_bytes = (step[OUTPUTS] + BLOCK - 1) // BLOCK, BLOCK * step[INPUTS]
        share = thread % call[_SHARES]
        last = num_blocks * (share + 1) // call[_SHARES] - 1
        after_last = step[WEIGHTS] + (last + 1) * block_bytes
        if step[NEXT_PRODUCT] != 0:
            after = carray(_pointer(step[NEXT_PRODUCT]), (PRODUCT_FIELDS,), _i64)
            first = (after[OUTPUTS] + BLOCK - 1) // BLOCK * share // call[_SHARES]
            after_last = after[WEIGHTS] + first * BLOCK * after[INPUTS]
        turn = 0
        while True:
            block, turn = _claim(address, call, thread, turn, num_blocks)
            if block >= num_blocks:
                break
            _multiply_block(
                call, step, block, after_last if block == last else step[WEIGHTS] + (block + 1) * block_bytes
            )
        if HAS_AMX and call[_ROWS] > step[MOST_DOT_ROWS]:
            _release_amx()


# Calling them.


@intrinsic
def _invoke(_context: Any, kernel: Any, call: Any, thread: Any) -> Any:
    """Calls the kernel at an address."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2)
        builder.call(builder.inttoptr(args[0], ir.PointerType(kind)), args[1:])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 3), codegen


@intrinsic
def _pause(_context: Any) -> Any:
    """Lets the core's other thread have its units for a moment."""

    def codegen(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if IS_X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.none(), codegen


@intrinsic
def _futex(_context: Any, syscall: Any, address: Any, operation: Any, value: Any) -> Any:
    """`futex(2)` by libc's `syscall`: sleeps while the int32 at `address` is `value`, or wakes so many sleepers."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        i64 = ir.IntType(64)
        kind = ir.FunctionType(i64, [i64] * 5)
        number, no_time = ir.Constant(i64, FUTEX), ir.Constant(i64, 0)
        builder.call(builder.inttoptr(args[0], ir.PointerType(kind)), [number, *args[1:], no_time])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 4), codegen


@njit(inline="always", **_FAST)
def _wait_for_all(address: int, head: Any, target: int) -> None:
    """Returns when it has been called `target` times, by all threads of a program together.

    OpenMP's own barrier puts a thread to sleep at once where a process has more threads that compute than there are
    cores, and to wake it takes as long as a kernel runs.
    """
    passed, asleep = address + 8 * _NUM_PASSED, address + 8 * _NUM_ASLEEP
    if _take(passed) + 1 == target:
        if _look(asleep) > 0:
            _futex(head[_SYSCALL], passed, FUTEX_WAKE, FUTEX_ALL)
        return
    for _ in range(NUM_SPINS):
        if _look(passed) >= target:
            return
        _pause()
    _add(asleep, 1)
    while True:
        sofar = _look(passed)
        if sofar >= target:
            break
        _futex(head[_SYSCALL], passed, FUTEX_WAIT, sofar)
    _add(asleep, -1)


@intrinsic
def _number_of(_context: Any, function: Any) -> Any:
    """What `omp_get_num_threads` says; 1 where its address is 0."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        i32, i64 = ir.IntType(32), ir.IntType(64)
        place = cgutils.alloca_once_value(builder, ir.Constant(i64, 1))
        with builder.if_then(cgutils.is_not_null(builder, args[0])):
            number = builder.call(builder.inttoptr(args[0], ir.PointerType(ir.FunctionType(i32, []))), [])
            builder.store(builder.sext(number, i64), place)
        return builder.load(place, typ=i64)

    return types.int64(types.int64), codegen


@cfunc(types.void(types.int64), **_FAST)
def _run_program(address: int) -> None:
    """Each thread goes through all entries, as often as is asked for, and after each waits for the others.

    To begin a parallel region for each entry instead would cost some 50 µs: a thread that has nothing to do between
    two of them falls asleep. Where one thread does the last entry, it then looks whether all this is to go on.
    """
    head = carray(_pointer(address), (_HEAD_FIELDS,), _i64)
    num_threads, thread = _number_of(head[_TEAM_SIZE]), _take(address + 8 * _NUM_BEGUN)
    length = head[_LENGTH]
    time = 0
    while time < _look(address + 8 * _NUM_TIMES):
        for number in range(length):
            at = address + 8 * (_HEAD_FIELDS + number * head[_STRIDE])
            entry = carray(_pointer(at), (_ENTRY_FIELDS,), _i64)
            if entry[_IS_LARGE] != 0 or _take(at + 8 * _NUM_ARRIVED) == time * num_threads:
                _invoke(entry[_FUNCTION], at + 8 * _ENTRY_FIELDS, thread)
                if number == length - 1 and entry[_IS_LARGE] == 0 and _look(head[_INTERRUPT]) != 0:
                    head[_NUM_TIMES] = time + 1
            if num_threads > 1:
                _wait_for_all(address, head, (time * length + number + 1) * num_threads)
            shares = carray(_pointer(at + 8 * (_ENTRY_FIELDS + _CALL_FIELDS)), (num_threads,), _i64)
            shares[thread] = 0  # for the next time
        time += 1


class Kernels:
    """Calls kernels, on as many threads as torch computes with. Each call is a program of one entry.

    They run on torch's own OpenMP threads: others would fight those for the cores. Where its library is not found,
    or is another one, one thread does it all.
    """

    def __init__(self, num_threads: int) -> None:
        openmp = _openmp() if num_threads > 1 else None
        self.num_threads = 1 if openmp is None else num_threads
        self._parallel = None if openmp is None else openmp.GOMP_parallel
        self.team_size = 0 if openmp is None else ctypes.cast(openmp.omp_get_num_threads, ctypes.c_void_p).value or 0
        self._program = Program(self, [(scale, 0, 0, 0)])

    def run(
        self,
        kernel: Any,
        step: int,
        layer: int,
        product: int,
        is_large: bool,
        num_rows: int = 0,
        *,
        holds: bool = False,
    ) -> None:
        """
        Args:
            step, layer, product: addresses, see the module; 0 where there is none.
            is_large: whether it pays to wake other threads.
            num_rows: for a matrix product; the others find it in the step.
            holds: keeps the interpreter meanwhile: to win it back would take longer than the kernel does.
        """
        program = self._program
        program.memory[_HEAD_FIELDS + _FUNCTION] = kernel.address
        program.memory[_HEAD_FIELDS + _ENTRY_FIELDS :][:_ROWS] = step, layer, product
        program.run(num_rows, 1, np.array((is_large,)), holds=holds)

    def start(self, program: int, num_threads: int, holds: bool) -> None:
        """Runs the program at this address."""
        if num_threads > 1:
            assert self._parallel is not None
            self._parallel(_run_program.address, program, num_threads, 0)
        elif holds:
            _RUN_AND_HOLD(program)
        else:
            _run_program.ctypes(program)


class Program:
    """Kernels one after another, in one call, with the interpreter free for others meanwhile."""

    def __init__(
        self, kernels: Kernels, entries: Items[tuple[Any, int, int, int]], interrupt: Interrupt | None = None
    ) -> None:
        """
        Args:
            entries: kernels, each with step, layer and product as `Kernels.run` takes them.
            interrupt: interrupts a program that is run several times, if one thread does its last entry.
        """
        self._interrupt = interrupt or Interrupt()
        stride = _ENTRY_FIELDS + _CALL_FIELDS + kernels.num_threads
        self.memory = np.zeros(_HEAD_FIELDS + len(entries) * stride, np.int64)
        self.memory[_STRIDE] = stride
        self.memory[_SYSCALL] = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0
        self.memory[_INTERRUPT] = self._interrupt.address
        self._entries = self.memory[_HEAD_FIELDS:].reshape(len(entries), stride)
        self._entries[:, _FUNCTION] = [kernel.address for kernel, *_ in entries]
        self._calls = self._entries[:, _ENTRY_FIELDS:]
        self._calls[:, :_ROWS] = [addresses for _, *addresses in entries]
        self._kernels = kernels
        self._address = self.memory.ctypes.data

    def run(self, num_rows: Any, num_entries: int, is_large: Any, *, num_times: int = 1, holds: bool = False) -> int:
        """How often it has been run, which is less than `num_times` if the interrupt rang.

        Args:
            num_rows: for matrix products, of all or of each entry; the others find it in the step.
            num_entries: how many of them, from the first on.
            is_large: of each entry, whether it pays to share it among threads.
            num_times: how often all of them.
            holds: as of `Kernels.run`.
        """
        is_large = is_large[:num_entries]
        num_threads = self._kernels.num_threads if is_large.any() else 1
        entries, calls = self._entries[:num_entries], self._calls[:num_entries]
        entries[:, _IS_LARGE], entries[:, _NUM_ARRIVED] = is_large, 0
        calls[:, _ROWS], calls[:, _SHARES] = num_rows, np.where(is_large, num_threads, 1)
        calls[:, _CALL_FIELDS:] = 0
        self.memory[_LENGTH], self.memory[_NUM_TIMES] = num_entries, num_times
        self.memory[_NUM_BEGUN:_TEAM_SIZE] = 0
        self.memory[_TEAM_SIZE] = self._kernels.team_size if num_threads > 1 else 0
        self._kernels.start(self._address, num_threads, holds)
        return int(self.memory[_NUM_TIMES])


def _openmp() -> Any:
    """The OpenMP library that this process has loaded already, or None."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp5" in line or "libomp" in line}
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        return library
    return None


_RUN_AND_HOLD = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(_run_program.address)

add_and_norm, store, attend, act, scale = _add_and_norm, _store, _attend, _act, _scale
sample, advance = _sample, _advance
multiply = _multiply if HAS_DOT_PRODUCTS else None
