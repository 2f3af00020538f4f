"""The release of memory that is no longer used."""

from __future__ import annotations

import gc

import torch


def release_memory() -> None:
    """Frees what only cycles reference (an exception and its frames are one), then the GPU memory that torch keeps."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
