"""A program: kernels that the threads of a team run one after another, with a barrier after each."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils

from workers.engine.cpu.kernel_source.ir import FAST, I32, I64, atomic_add, atomic_load, emits, record, records
from workers.engine.cpu.kernel_source.partition import wait_for_all
from workers.engine.cpu.layouts import CALL, ENTRY, PROGRAM

_HEAD_BYTES, _ENTRY_BYTES, _CALL_BYTES = PROGRAM.itemsize, ENTRY.itemsize, CALL.itemsize
_NUM_STARTED = PROGRAM.fields["num_started"][1]  # type: ignore[index]
_NUM_TIMES = PROGRAM.fields["num_times"][1]  # type: ignore[index]
_ENTRY_ARRIVALS = ENTRY.fields["num_arrivals"][1]  # type: ignore[index]


@emits(types.none(*[types.int64] * 3))
def _invoke(builder: Any, kernel_at: Any, call_at: Any, thread: Any) -> None:
    """Calls the kernel at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 2)
    builder.call(builder.inttoptr(kernel_at, ir.PointerType(kind)), [call_at, thread])


@emits(types.int64(types.int64))
def _team_size(builder: Any, function_at: Any) -> Any:
    """What `omp_get_num_threads`, at this address, returns; 1 where the address is 0."""
    place = cgutils.alloca_once_value(builder, ir.Constant(I64, 1))
    with builder.if_then(cgutils.is_not_null(builder, function_at)):
        number = builder.call(builder.inttoptr(function_at, ir.PointerType(ir.FunctionType(I32, []))), [])
        builder.store(builder.sext(number, I64), place)
    return builder.load(place, typ=I64)


@cfunc(types.void(types.int64), **FAST)
def run_program(program_at: int) -> None:
    """Runs all entries `num_times` times, each thread of the team; after each entry a barrier.

    A parallel region for each entry would cost some 50 µs: OpenMP's threads sleep between two of them. If the last
    entry runs on one thread, that thread then reads the interrupt flag.
    """
    program = record(program_at, PROGRAM)
    num_threads, thread = _team_size(program.team_size_at), atomic_add(program_at + _NUM_STARTED, 1)
    num_entries = program.num_entries
    time = 0
    while time < atomic_load(program_at + _NUM_TIMES):
        for number in range(num_entries):
            entry_at = program_at + _HEAD_BYTES + number * program.entry_bytes
            entry = record(entry_at, ENTRY)
            is_shared = entry.is_shared != 0
            if is_shared or atomic_add(entry_at + _ENTRY_ARRIVALS, 1) == time * num_threads:
                _invoke(entry.kernel_at, entry_at + _ENTRY_BYTES, thread)
                if number == num_entries - 1 and not is_shared and atomic_load(program.interrupt_at) != 0:
                    program.num_times = time + 1
            if num_threads > 1:
                wait_for_all(program_at, program, (time * num_entries + number + 1) * num_threads)
            counters = records(entry_at + _ENTRY_BYTES + _CALL_BYTES, num_threads, np.int64)
            counters[thread] = 0
        time += 1
