"""Runs kernels on torch's own threads: one kernel, or a program of many in one call.

Each call from Python releases the interpreter lock and must get it back from the threads that serve clients, so what
can be a program, all layers of a step, is one call.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from workers.engine.cpu.layouts import CALL, ENTRY, PROGRAM
from workers.engine.cpu_kernels import Kernels

_HEAD_BYTES = PROGRAM.itemsize


class Interrupt:
    """Ends a multi-step decode after its current step: a flag that compiled code can poll. Any thread may set it.

    Attributes:
        address: address of an int64, other than 0 while the flag is set.
    """

    def __init__(self) -> None:
        self._memory = array("q", (0,))
        self.address = self._memory.buffer_info()[0]

    def set(self) -> None:
        self._memory[0] = 1

    def clear(self) -> None:
        self._memory[0] = 0


class KernelCall(NamedTuple):
    """A kernel's address and those that it is called with; the kernel's docstring says what they are of."""

    kernel: int
    step_at: int
    layer_at: int = 0
    product_at: int = 0


class ThreadTeam:
    """The threads that kernels run on.

    These are torch's OpenMP threads: a second set would compete with them for the cores. Where torch's OpenMP library
    is not found, or lacks `GOMP_parallel`, kernels run on the calling thread.
    """

    def __init__(self, kernels: Kernels, num_threads: int) -> None:
        self._run_program = kernels.run_program
        self._run = ctypes.CFUNCTYPE(None, ctypes.c_int64)(kernels.run_program)
        self._run_with_gil = ctypes.PYFUNCTYPE(None, ctypes.c_int64)(kernels.run_program)
        openmp = _openmp() if num_threads > 1 else None
        self.num_threads = 1 if openmp is None else num_threads
        self.team_size_at = 0
        self._parallel = None
        if openmp is not None:
            self.team_size_at = ctypes.cast(openmp.omp_get_num_threads, ctypes.c_void_p).value or 0
            self._parallel = openmp.GOMP_parallel
        self._single = Program(self, [KernelCall(0, 0)])  # replaced at each call

    def run(self, call: KernelCall, is_shared: bool, num_rows: int = 0, *, holds_gil: bool = False) -> None:
        """Runs one kernel.

        Args:
            is_shared: whether to wake the other threads for it.
            num_rows: rows of a matrix product; other kernels find it in their STEP.
            holds_gil: keeps the interpreter lock, for a kernel that takes less time than getting the lock back.
        """
        self._single.replace(0, call)
        self._single.run(num_rows, 1, np.array((is_shared,)), holds_gil=holds_gil)

    def start(self, program_at: int, num_threads: int, holds_gil: bool) -> None:
        """Runs the PROGRAM at this address."""
        if num_threads > 1:
            assert self._parallel is not None
            self._parallel(self._run_program, program_at, num_threads, 0)
        elif holds_gil:
            self._run_with_gil(program_at)
        else:
            self._run(program_at)


class Program:
    """Kernels to run one after another in one call, without the interpreter lock."""

    def __init__(self, team: ThreadTeam, calls: Sequence[KernelCall], interrupt: Interrupt | None = None) -> None:
        """
        Args:
            interrupt: stops a program that runs several times, if its last entry is not shared.
        """
        self._team, self._interrupt = team, interrupt or Interrupt()
        layout = np.dtype([("entry", ENTRY), ("call", CALL), ("counters", "i8", (team.num_threads,))], align=True)
        self._memory = np.zeros(_HEAD_BYTES + len(calls) * layout.itemsize, np.uint8)
        self._head = self._memory[:_HEAD_BYTES].view(PROGRAM)[0]
        self._head["entry_bytes"] = layout.itemsize
        self._head["interrupt_at"] = self._interrupt.address
        entries = self._memory[_HEAD_BYTES:].view(layout)
        self._entries, self._calls, self._counters = entries["entry"], entries["call"], entries["counters"]
        self._is_shared, self._num_arrivals = self._entries["is_shared"], self._entries["num_arrivals"]
        self._num_rows, self._num_shares = self._calls["num_rows"], self._calls["num_shares"]
        self._address = self._memory.ctypes.data
        for number, call in enumerate(calls):
            self.replace(number, call)

    def replace(self, number: int, call: KernelCall) -> None:
        """Makes `call` the entry `number`."""
        self._entries[number] = call.kernel, 0, 0
        self._calls[number] = call.step_at, call.layer_at, call.product_at, 0, 1

    def run(
        self, num_rows: Any, num_entries: int, is_shared: Any, *, num_times: int = 1, holds_gil: bool = False
    ) -> int:
        """How often the first `num_entries` entries ran: less than `num_times` after an interrupt.

        Args:
            num_rows: rows of matrix products, of all entries or [num_entries]; other kernels find it in their STEP.
            is_shared: [entries at least] bool, whether to divide an entry's work among the threads.
            holds_gil: as in `ThreadTeam.run`.
        """
        is_shared = is_shared[:num_entries]
        num_threads = self._team.num_threads if is_shared.any() else 1
        self._is_shared[:num_entries], self._num_arrivals[:num_entries] = is_shared, 0
        self._num_rows[:num_entries], self._num_shares[:num_entries] = num_rows, np.where(is_shared, num_threads, 1)
        self._counters[:num_entries] = 0
        head = self._head
        head["num_entries"], head["num_times"] = num_entries, num_times
        head["num_started"] = head["num_arrivals"] = head["num_asleep"] = 0
        head["team_size_at"] = self._team.team_size_at if num_threads > 1 else 0
        self._team.start(self._address, num_threads, holds_gil)
        return int(head["num_times"])


def _openmp() -> Any:
    """The OpenMP library that this process has loaded already, or None."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp5" in line or "libomp" in line}
    except OSError:  # not Linux
        return None
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        return library
    return None
