"""How threads divide a kernel's work: a share of the items each, then stealing; and their barrier.

The items of a kernel are partitioned statically: the same thread gets the same part of them in each kernel, which
keeps its data in its own caches and lets it read memory in one piece. A thread that has finished its share steals
items from the next shares. One thread and many run the same code and give the same bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types

from workers.engine.cpu.kernel_source.ir import FAST, I64, IS_X86, atomic_add, atomic_load, call_llvm, emits
from workers.engine.cpu.layouts import CALL, PROGRAM

# A thread looks this often whether the others have arrived, about 50 ns each time, before it sleeps.
NUM_SPINS = 4000
# Linux: the number of the system call futex (98 is the table that newer architectures share), its operations within
# a process, and "wake all".
FUTEX, FUTEX_WAIT, FUTEX_WAKE, WAKE_ALL = 202 if IS_X86 else 98, 128, 129, 1 << 30

_COUNTERS = CALL.itemsize
_ARRIVALS, _ASLEEP = PROGRAM.fields["num_arrivals"][1], PROGRAM.fields["num_asleep"][1]  # type: ignore[index]


@njit(inline="always", **FAST)
def claim(call_at: int, call: Any, thread: int, turn: int, num_items: int) -> Any:
    """The next item for a thread, and the turn to pass to the next call; `num_items` if none is left.

    Share s consists of the items from ⌊num_items · s / num_shares⌋ on; its counter says how many are claimed.

    Args:
        turn: 0 at first; how many shares are exhausted.
    """
    shares = call.num_shares
    while turn < shares:
        share = (thread + turn) % shares
        item = num_items * share // shares + atomic_add(call_at + _COUNTERS + 8 * share, 1)
        if item < num_items * (share + 1) // shares:
            return item, turn
        turn += 1
    return num_items, turn


@emits(types.none())
def _pause(builder: Any) -> None:
    """Tells the CPU that the thread spins, which frees execution units for the core's other thread."""
    if IS_X86:
        call_llvm(builder, "llvm.x86.sse2.pause", [], [])


@emits(types.none(*[types.int64] * 4))
def _futex(builder: Any, syscall_at: Any, address: Any, operation: Any, value: Any) -> None:
    """`futex(2)` through libc's `syscall`: sleeps while the int32 at `address` is `value`, or wakes `value` threads."""
    kind = ir.FunctionType(I64, [I64] * 5)
    number, no_timeout = ir.Constant(I64, FUTEX), ir.Constant(I64, 0)
    syscall = builder.inttoptr(syscall_at, ir.PointerType(kind))
    builder.call(syscall, [number, address, operation, value, no_timeout])


@njit(inline="always", **FAST)
def wait_for_all(program_at: int, program: Any, target: int) -> None:
    """The barrier: returns when the threads of a program have called it `target` times in total.

    OpenMP's own barrier puts a thread to sleep at once where a process has more computing threads than there are
    cores; waking it takes as long as a kernel runs.
    """
    arrivals, asleep = program_at + _ARRIVALS, program_at + _ASLEEP
    if atomic_add(arrivals, 1) + 1 == target:
        if atomic_load(asleep) > 0:
            _futex(program.syscall_at, arrivals, FUTEX_WAKE, WAKE_ALL)
        return
    for _ in range(NUM_SPINS):
        if atomic_load(arrivals) >= target:
            return
        _pause()
    atomic_add(asleep, 1)
    while True:
        num_arrivals = atomic_load(arrivals)
        if num_arrivals >= target:
            break
        _futex(program.syscall_at, arrivals, FUTEX_WAIT, num_arrivals)
    atomic_add(asleep, -1)
