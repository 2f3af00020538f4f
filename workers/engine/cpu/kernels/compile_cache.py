"""Where numba keeps the compiled kernels: a directory that is keyed by everything they are compiled from.

numba compares the source file of the function it loads, and no other: after a change of a helper module it would
load kernels that still contain the old helper. The directory's name holds a digest of all sources instead.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

import llvmlite
import numba
import numpy as np
from llvmlite import binding


def sources() -> list[Path]:
    """Every file that determines the compiled code."""
    package = Path(__file__).parent
    return [*sorted(package.glob("*.py")), package.parent / "layouts.py"]


def content_key(paths: Iterable[Path], *versions: str) -> str:
    """A digest of the files' names and contents, and of `versions`."""
    digest = hashlib.sha256(repr(versions).encode())
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def cache_directory(base: Path, key: str) -> Path:
    """The directory for `key` under `base`, made if missing.

    Raises:
        OSError: if it cannot be written to.
    """
    directory = base / f"numba-{key}"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        return directory


def use_content_keyed_cache() -> None:
    """Points numba at the cache directory; without effect on functions that have been decorated already.

    The directory lies in numba's own setting (`NUMBA_CACHE_DIR`) if there is one, else in the package's `__pycache__`,
    or in the user's cache directory where that is read-only. Where none can be written to, numba's default applies.
    """
    versions = numba.__version__, llvmlite.__version__, np.__version__, binding.get_host_cpu_name()
    key = content_key(sources(), *versions)
    chosen = numba.config.CACHE_DIR
    defaults = Path(__file__).parent / "__pycache__", Path("~/.cache/tercet")
    for base in (Path(chosen),) if chosen else defaults:
        try:
            numba.config.CACHE_DIR = str(cache_directory(base.expanduser(), key))
        except (OSError, RuntimeError):  # read-only; no home directory
            continue
        return
