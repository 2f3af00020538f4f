"""The stored choices of kernels: a JSON file that all workers of a machine share.

A choice holds for one key: the GPU's model, the versions of everything that the kernels are compiled and run by, the
kernels' sources, and the model's shape and dtype. Also says for which GPUs there is a choice at all. Imports no torch,
so that the command line can read it. Does not know how a choice is made, nor where the file lies.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import structlog

# Compute capabilities for which the kernels are compiled ahead of time in the tests, and their registers bounded.
OLDEST_CAPABILITY = (7, 5)
NEWEST_CAPABILITY = (9, 0)
FILE_NAME = "kernels.json"
FORMAT = 1
DRIVER_FILE = Path("/proc/driver/nvidia/version")
log = structlog.get_logger()

Kernels = Literal["torch", "triton"]
KERNELS: tuple[Kernels, ...] = ("torch", "triton")
CHECKING = "checking"  # a process runs the kernels for the first time, or ended while it did


class Shape(Protocol):
    """The part of `ModelConfig` that kernels depend on."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def n_inner(self) -> int: ...
    @property
    def n_positions(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class Gpu(msgspec.Struct, frozen=True):
    """A model of GPU, with its driver.

    Attributes:
        name: as the driver gives it.
        capability: compute capability, (major, minor).
        driver: version of the kernel driver, like 580.65.06; empty if unknown.
    """

    name: str
    capability: tuple[int, int]
    driver: str = ""


class StoredChoice(msgspec.Struct, frozen=True):
    """What was chosen for a key.

    Attributes:
        status: the kernels, or CHECKING. Another version may have stored kernels that this one does not have.
        reason: why the plain kernels, if they are not the fastest.
        at: when, ISO 8601, UTC.
    """

    status: str
    reason: str = ""
    at: str = ""

    @property
    def kernels(self) -> Kernels | None:
        """The kernels; None if they are being checked, or this version does not have them."""
        return next((kernels for kernels in KERNELS if kernels == self.status), None)


class _File(msgspec.Struct):
    format: int = FORMAT
    choices: dict[str, StoredChoice] = {}


def kernel_key(gpu: Gpu, shape: Shape, dtype: str) -> str:
    """What a choice holds for, in words.

    Args:
        dtype: bf16, fp16 or fp32.
    """
    major, minor = gpu.capability
    parts = [
        gpu.name,
        f"sm_{major}{minor}",
        f"driver {gpu.driver or 'unknown'}",
        *(f"{package} {installed_version(package) or 'none'}" for package in ("torch", "triton")),
        f"kernels {source_digest()}",
        f"{shape.n_layer} layers, {shape.n_head} heads, {shape.n_embd}/{shape.n_inner} wide",
        f"{shape.n_positions} positions, {shape.vocab_size} tokens",
        dtype,
    ]
    return "; ".join(parts)


def refusal(capability: tuple[int, int]) -> str | None:
    """Why a GPU of this compute capability takes the plain kernels; None if it does not have to."""
    if capability < OLDEST_CAPABILITY:
        return f"the kernels need compute capability {_dotted(OLDEST_CAPABILITY)}, this GPU has {_dotted(capability)}"
    if capability > NEWEST_CAPABILITY:
        return (
            f"the kernels are compiled for compute capabilities up to {_dotted(NEWEST_CAPABILITY)}, this GPU has "
            f"{_dotted(capability)}"
        )
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_digest(directory: Path = Path(__file__).parent) -> str:
    """A digest of the sources of the kernels and of what they are compared with."""
    digest = hashlib.sha256()
    for path in [directory / "step_kernels.py", *sorted((directory / "kernels").rglob("*.py"))]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def driver_version(path: Path = DRIVER_FILE) -> str:
    """The version of NVIDIA's kernel driver, as `nvidia-smi` gives it; empty if the system does not say."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return ""
    return found[1] if found else ""


class KernelStore:
    """The file of choices. A file that cannot be read or written is logged, and otherwise counts as empty."""

    def __init__(self, directory: Path | None) -> None:
        """
        Args:
            directory: where the file lies; made if it does not exist. None stores nothing.
        """
        self._path = None if directory is None else directory / FILE_NAME

    def read(self, key: str) -> StoredChoice | None:
        """The choice for `key`, or None."""
        return self._read().choices.get(key)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Excludes all other processes from writing; waits until they have. Without a usable file, excludes none."""
        if self._path is None:
            yield
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.with_suffix(".lock").open("a")
        except OSError as error:
            self._log_discarded(error)
            yield
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def write(self, key: str, choice: StoredChoice | None) -> None:
        """Stores a choice, or forgets it; to be called while `locked`."""
        if self._path is None:
            return
        file = self._read()
        file.choices.pop(key, None)
        if choice is not None:
            at = datetime.now(UTC).isoformat(timespec="seconds")
            file.choices[key] = msgspec.structs.replace(choice, at=at)
        temporary = self._path.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n")
            temporary.replace(self._path)
        except OSError as error:
            self._log_discarded(error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _read(self) -> _File:
        if self._path is None:
            return _File()
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return _File()
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("kernel_choices_ignored", path=str(self._path), reason=str(error))
            return _File()
        return file if file.format == FORMAT else _File()

    def _log_discarded(self, error: OSError) -> None:
        log.warning("kernel_choice_discarded", path=str(self._path), reason=error.strerror)
