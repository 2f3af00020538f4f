"""LLVM IR for the kernels: vectors, loops, dispatch on a number, prefetching, atomics, addresses as arrays.

Two kinds of helpers: functions that take an IR builder and emit instructions, and those that compiled code calls. Knows
no layout and no kernel.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from workers.engine.cpu.layouts import VECTOR

IS_X86 = platform.machine() == "x86_64"
# Every decorator of a kernel takes these. On x86-64 `build` links what is compiled, and numba's cache has no objects.
FAST: dict[str, Any] = {"nogil": True, "cache": not IS_X86, "error_model": "numpy"}
# Assumes no NaN and no infinity, and fuses a product with a sum: none of these lets a sum change its order.
FAST_MATH: dict[str, Any] = {**FAST, "fastmath": {"nnan", "ninf", "nsz", "contract"}}
KERNEL = types.void(types.int64, types.int64)  # address of a CALL, number of the calling thread

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
FLOATS, INTS = ir.VectorType(F32, VECTOR), ir.VectorType(I32, VECTOR)
MAX_HALF = 65504.0  # the largest finite float16


def emits(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that compiled code can call of one that emits the instructions of the call.

    The latter takes an IR builder and the values of the arguments, and returns that of the result, if there is one.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        @intrinsic
        @wraps(emit)  # numba reads the number of the arguments from it; the builder stands for its typing context
        def declare(*_kinds: Any) -> Any:
            def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
                result = emit(builder, *args)
                return context.get_dummy_value() if result is None else result

            return signature, codegen

        return declare

    return decorate


def const(number: int) -> Any:
    return ir.Constant(I64, number)


def plus(builder: Any, address: Any, *terms: Any) -> Any:
    """The sum of int64; a term may be a Python int."""
    for term in terms:
        address = builder.add(address, const(term) if isinstance(term, int) else term)
    return address


def times(builder: Any, value: Any, factor: Any) -> Any:
    return builder.mul(value, const(factor) if isinstance(factor, int) else factor)


def load(builder: Any, kind: Any, address: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, ir.PointerType(kind)), typ=kind)
    value.align = align
    return value


def store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type))).align = align


def load_floats(builder: Any, address: Any, item_bytes: int = 4) -> Any:
    """VECTOR float32, kept as float32 or float16 (`item_bytes` 4 or 2)."""
    if item_bytes == 4:
        return load(builder, FLOATS, address, 4)
    return builder.fpext(load(builder, ir.VectorType(F16, VECTOR), address, 2), FLOATS)


def load_ints(builder: Any, address: Any) -> Any:
    """VECTOR int32."""
    return load(builder, INTS, address, 4)


def store_vector(builder: Any, value: Any, address: Any) -> None:
    store(builder, value, address, 4)


def splat(builder: Any, number: Any) -> Any:
    """A vector of VECTOR equal lanes."""
    vector = ir.VectorType(number.type, VECTOR)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(INTS, [0] * VECTOR))


def const_floats(number: float) -> Any:
    # Rounded to float32 first: LLVM refuses a constant that its type cannot represent.
    return ir.Constant(FLOATS, [float(np.float32(number))] * VECTOR)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c with one rounding, of VECTOR float32."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{VECTOR}f32"), [a, b, c])


def larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def lanes_before(builder: Any, first: Any, end: Any) -> Any:
    """A mask of the lanes whose position, `first` + lane, is less than `end`."""
    num_left = splat(builder, builder.trunc(builder.sub(end, first), I32))
    return builder.icmp_signed("<", ir.Constant(INTS, list(range(VECTOR))), num_left)


def to_half(builder: Any, numbers: Any) -> Any:
    """Rounds a float32, or a vector of them, to float16; saturates at ±MAX_HALF."""
    for limit, is_beyond in ((-MAX_HALF, "<"), (MAX_HALF, ">")):
        is_vector = isinstance(numbers.type, ir.VectorType)
        bound = ir.Constant(numbers.type, [limit] * VECTOR if is_vector else limit)
        numbers = builder.select(builder.fcmp_ordered(is_beyond, numbers, bound), bound, numbers)
    return builder.fptrunc(numbers, ir.VectorType(F16, VECTOR) if isinstance(numbers.type, ir.VectorType) else F16)


def loop(builder: Any, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """Emits `values = body(i, values)` for i from 0 to `count` - 1, at least once; returns the last values."""
    before = builder.block
    inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
    builder.branch(inside)
    builder.position_at_end(inside)
    index = builder.phi(I64)
    index.add_incoming(const(0), before)
    values = [builder.phi(start.type) for start in starts]
    for value, start in zip(values, starts, strict=True):
        value.add_incoming(start, before)
    results = body(index, values)
    following = builder.add(index, const(1))
    index.add_incoming(following, inside)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, inside)
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return results


def dispatch(builder: Any, value: Any, cases: Iterable[int], emit: Callable[[int], None]) -> None:
    """Emits `emit(case)` for the case that the int64 `value` equals; a value that is no case takes the last one.

    Instructions need their register counts when they are compiled, so each case is a copy of its own.
    """
    *others, last = cases
    default, done = builder.append_basic_block("last_case"), builder.append_basic_block("done")
    switch = builder.switch(value, default)
    for case in others:
        block = builder.append_basic_block("case")
        switch.add_case(const(case), block)
        builder.position_at_end(block)
        emit(case)
        builder.branch(done)
    builder.position_at_end(default)
    emit(last)
    builder.branch(done)
    builder.position_at_end(done)


def call_llvm(builder: Any, name: str, kinds: list[Any], args: list[Any], returns: Any = None) -> Any:
    """Calls the LLVM intrinsic `name`."""
    kind = ir.FunctionType(returns or ir.VoidType(), kinds)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def prefetch_line(builder: Any, address: Any) -> None:
    """Prefetches 64 bytes into L2. Any address is allowed, mapped or not."""
    pointer = ir.PointerType(I8)
    is_read, level_2, is_data = (ir.Constant(I32, number) for number in (0, 2, 1))
    args = [builder.inttoptr(address, pointer), is_read, level_2, is_data]
    call_llvm(builder, "llvm.prefetch.p0", [pointer, I32, I32, I32], args)


def prefetch_lines(builder: Any, address: Any, num_bytes: int) -> None:
    for first in range(0, num_bytes, 64):
        prefetch_line(builder, plus(builder, address, first))


@emits(types.none(types.int64, types.int64))
def prefetch(builder: Any, address: Any, num_bytes: Any) -> None:
    """Prefetches `num_bytes` bytes, at least one, into L2."""

    def body(line: Any, _: list[Any]) -> list[Any]:
        prefetch_line(builder, plus(builder, address, times(builder, line, 64)))
        return []

    loop(builder, builder.sdiv(plus(builder, num_bytes, 63), const(64)), [], body)


@emits(types.voidptr(types.int64))
def pointer_to(builder: Any, address: Any) -> Any:
    """An address as a pointer, for `carray`."""
    return builder.inttoptr(address, ir.PointerType(I8))


@emits(types.int64(types.int64, types.int64))
def atomic_add(builder: Any, address: Any, number: Any) -> Any:
    """Adds to the int64 at `address`; returns what it was before."""
    return builder.atomic_rmw("add", builder.inttoptr(address, ir.PointerType(I64)), number, "seq_cst")


@emits(types.int64(types.int64))
def atomic_load(builder: Any, address: Any) -> Any:
    """The int64 at `address`, which other threads change."""
    return builder.load_atomic(builder.inttoptr(address, ir.PointerType(I64)), "seq_cst", 8, typ=I64)


@njit(inline="always", **FAST)
def floats(address: int, length: int) -> Any:
    """The float32 at `address`, as an array [length]."""
    return carray(pointer_to(address), (length,), np.float32)


@njit(inline="always", **FAST)
def matrix(address: int, rows: int, columns: int) -> Any:
    """The float32 at `address`, as an array [rows, columns]."""
    return carray(pointer_to(address), (rows, columns), np.float32)


@njit(inline="always", **FAST)
def records(address: int, length: int, layout: Any) -> Any:
    """The records at `address`, as an array [length] of the structured dtype `layout`."""
    return carray(pointer_to(address), (length,), layout)


@njit(inline="always", **FAST)
def record(address: int, layout: Any) -> Any:
    """The record at `address`."""
    return carray(pointer_to(address), (1,), layout)[0]
