"""The release of memory that is no longer used."""

from __future__ import annotations

import ctypes
import gc

import torch

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it


def release_memory() -> None:
    """Frees what only cycles reference (an exception and its frames are one), then the memory that the C library and,
    on a GPU, torch keep for later allocations."""
    gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def device_bytes() -> int:
    """GPU memory that torch's allocator holds in this process; 0 without a GPU."""
    return int(torch.cuda.memory_reserved())
