"""Finds the image of the kernels for this CPU, and has it made where there is none.

`kernel_source.build` makes it in a process of its own, once for each version of the sources, of numba and of the CPU: a
worker that compiled would keep 200 MB of numba and LLVM. Where an image cannot be linked (on ARM), the worker compiles,
and numba caches what it compiled.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from workers.engine.cpu.kernel_image import KernelImage, LoadedKernels, load, read_image

PACKAGE = Path(__file__).parent
ROOT = PACKAGE.parents[2]
# Files of other keys that stay, those used last: two versions, or two types of CPU, may share a place.
MAX_OTHERS = 2
# What tells two types of CPU apart in /proc/cpuinfo, on x86 and on ARM.
_CPU_FIELDS = re.compile(
    r"^(?:vendor_id|cpu family|model|model name|stepping|flags|CPU (?:implementer|variant|part)|Features)\s*:.*$",
    re.MULTILINE,
)
log = logging.getLogger(__name__)
_directory: Path | None = None


def use_directory(directory: Path) -> None:
    """Keep the file in `directory`. To be called before the kernels are imported.

    By default it lies in the package's `__pycache__`, or in the user's cache directory where that is read-only.
    """
    global _directory  # noqa: PLW0603 - like the code itself, one for the process
    _directory = directory


@cache
def kernels() -> LoadedKernels:
    """The kernels for this CPU, compiled if no file has them yet."""
    if platform.machine() == "x86_64":
        try:
            return load(_image())
        except (OSError, RuntimeError) as error:
            log.warning("Compiled kernels cannot be loaded from a file (%s), so this worker keeps the compiler.", error)
    return _compile_here()


def _compile_here() -> LoadedKernels:
    """The kernels by numba in this process."""
    import numba

    for base in _places():
        with suppress(OSError, RuntimeError):
            numba.config.CACHE_DIR = str(_writable(base.expanduser() / f"numba-{_key()}"))
            break
    from workers.engine.cpu.kernel_source import build, int8

    return LoadedKernels(
        {name: kernel.address for name, kernel in build.KERNELS.items()},
        int8.HAS_DOT_PRODUCTS,
        int8.HAS_AMX,
    )


def _image() -> KernelImage:
    """
    Raises:
        OSError: the compiler cannot be started, or its result cannot be written or read.
        RuntimeError: it failed; standard error has the reason.
    """
    name = f"kernels-{_key()}.bin"
    for base in _places():
        try:
            path = _writable(base.expanduser()) / name
        except (OSError, RuntimeError):  # read-only; no home directory
            if (image := _read_in(base, name)) is not None:
                return image
            continue
        return _read_or_build(path)
    log.warning(
        "Compiled kernels cannot be cached, so each worker compiles them at its start, for half a minute: set "
        "TERCET_CACHE_DIR to a directory that can be written to."
    )
    with tempfile.TemporaryDirectory() as directory:
        return _read_or_build(Path(directory) / name)


def _places() -> list[Path]:
    return [PACKAGE / "__pycache__", Path("~/.cache/tercet")] if _directory is None else [_directory]


def _key() -> str:
    return content_key(sources(), *versions(), cpu_type())


def _read_or_build(path: Path) -> KernelImage:
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers that start together compile once
        image = read_image(path)
        if image is None:
            command = [sys.executable, "-m", "workers.engine.cpu.kernel_source.build", str(path)]
            done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=False)
            if done.returncode or (image := read_image(path)) is None:
                raise RuntimeError(f"the CPU kernels could not be compiled (exit code {done.returncode})")
            remove_others(path)
    with suppress(OSError):  # it may be another user's
        path.touch()
    return image


def sources() -> list[Path]:
    """Every file that determines the image."""
    return [*sorted((PACKAGE / "kernel_source").glob("*.py")), PACKAGE / "layouts.py", PACKAGE / "kernel_image.py"]


def versions() -> list[str]:
    """Return the compiler's versions without importing it."""
    return [version(name) for name in ("numba", "llvmlite", "numpy")]


def cpu_type() -> str:
    """What compiled code depends on in this machine's CPU."""
    first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    return "\n".join(_CPU_FIELDS.findall(first))


def content_key(paths: Iterable[Path], *names: str) -> str:
    """A digest of the files' names and contents, and of `names`."""
    digest = hashlib.sha256(repr(names).encode())
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def remove_others(path: Path) -> None:
    """Remove the images of other keys next to `path` but the MAX_OTHERS that were used last."""
    others = [other for other in path.parent.glob("kernels-*.bin") if other != path and not other.is_symlink()]
    for old in sorted(others, key=_used_at, reverse=True)[MAX_OTHERS:]:
        old.unlink(missing_ok=True)
        old.with_suffix(".lock").unlink(missing_ok=True)


def _writable(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass
    return directory


def _read_in(base: Path, name: str) -> KernelImage | None:
    try:
        return read_image(base.expanduser() / name)
    except RuntimeError:  # no home directory
        return None


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


if __name__ == "__main__":  # as `make setup` does, before the rest is installed
    kernels()
