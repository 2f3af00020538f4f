"""Where numba keeps the compiled kernels: a directory that is keyed by everything they are compiled from.

numba compares the source file of the function it loads, and no other: after a change of a helper module it would
load kernels that still contain the old helper. The directory's name holds a digest of all sources instead.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import llvmlite
import numba
import numpy as np
from llvmlite import binding

# Directories of other keys that stay, those used last: two versions, or two types of CPU, may share a place.
MAX_OTHERS = 2
log = logging.getLogger(__name__)


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
    """The directory for `key` under `base`, made if missing; of other keys' directories MAX_OTHERS stay.

    Raises:
        OSError: if it cannot be written to.
    """
    directory = base / f"numba-{key}"
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass
    directory.touch()
    others = [path for path in base.glob("numba-*") if path != directory and not path.is_symlink()]
    for old in sorted(others, key=_used_at, reverse=True)[MAX_OTHERS:]:
        shutil.rmtree(old, ignore_errors=True)
    return directory


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def use_content_keyed_cache() -> bool:
    """Points numba at the cache directory; without effect on functions that have been decorated already.

    The directory lies in numba's own setting (`NUMBA_CACHE_DIR`) if there is one, else in the package's `__pycache__`,
    or in the user's cache directory where that is read-only.

    Returns:
        False if none can be written to: kernels can then be compiled, but not cached.
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
        return True
    log.warning(
        "Compiled kernels cannot be cached, so each worker compiles them at its start, for half a minute: set "
        "TERCET_CACHE_DIR to a directory that can be written to."
    )
    return False
