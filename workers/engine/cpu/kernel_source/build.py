"""Compiles the kernels for this machine's CPU and writes their image: `python -m workers.engine.cpu.kernel_source.build
<file>`. Takes half a minute."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from workers.engine.cpu.kernel_image import KernelImage, write_image
from workers.engine.cpu.kernel_source.activations import activate
from workers.engine.cpu.kernel_source.attention import attend
from workers.engine.cpu.kernel_source.int8 import HAS_AMX, HAS_DOT_PRODUCTS, multiply
from workers.engine.cpu.kernel_source.kv_store import store_kv
from workers.engine.cpu.kernel_source.linking import link
from workers.engine.cpu.kernel_source.norms import add_and_norm, scale
from workers.engine.cpu.kernel_source.program import run_program
from workers.engine.cpu.kernel_source.sampling import advance, sample

KERNELS: dict[str, Any] = {
    "activate": activate,
    "add_and_norm": add_and_norm,
    "advance": advance,
    "attend": attend,
    "run_program": run_program,
    "sample": sample,
    "scale": scale,
    "store_kv": store_kv,
    **({"multiply": multiply} if HAS_DOT_PRODUCTS else {}),
}
C_LIBRARY = frozenset({"abort", "erff", "exp", "expf", "log", "logf", "memcpy", "memmove", "memset", "tanhf"})
# What numba's wrapper of a function calls after an exception, and for arrays that it allocated: kernels have neither.
NEVER_CALLED = frozenset(
    {
        *(
            "NRT_Free",
            "NRT_MemInfo_call_dtor",
            "PyBytes_FromStringAndSize",
            "PyErr_Clear",
            "PyErr_SetNone",
            "PyErr_SetString",
        ),
        *(
            "PyErr_WriteUnraisable",
            "PyExc_RuntimeError",
            "PyExc_StopIteration",
            "PyExc_SystemError",
            "PyUnicode_FromString",
        ),
        *("Py_DecRef", "numba_do_raise", "numba_gil_ensure", "numba_gil_release", "numba_runtime_build_excinfo_struct"),
        "numba_unpickle",
    }
)


def build() -> KernelImage:
    """Compile and link the kernels.

    Raises:
        LinkError: a kernel uses what an image cannot have.
    """
    objects, names = {}, {}
    for name, kernel in KERNELS.items():
        library = kernel._library
        names[kernel.native_name] = name
        objects[kernel.native_name] = library._codegen._tm.emit_object(library._final_module)
    linked = link(objects, C_LIBRARY, NEVER_CALLED)
    functions = {names[symbol]: offset for symbol, offset in linked.functions.items()}
    return KernelImage(linked.code, functions, linked.pointers, linked.imports, HAS_DOT_PRODUCTS, HAS_AMX)


if __name__ == "__main__":
    write_image(build(), Path(sys.argv[1]))
