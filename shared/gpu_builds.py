"""Which build of torch serves which GPU, and which driver it needs.

The tables are PyTorch's and NVIDIA's; docs/GPU.md shows them by card, with their sources. They are used before a worker
starts, from what `nvidia-smi` says, and again by the worker, from the architectures of the torch that it has imported.
This module imports no torch and asks no driver.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from shared.extras import torch_command

Capability = tuple[int, int]
Release = tuple[int, int]

OLDEST_BF16: Capability = (8, 0)
INDEX = "https://download.pytorch.org/whl"
TABLE = "docs/GPU.md has the table"


@dataclass(frozen=True, slots=True)
class Build:
    """A build of torch, 2.11 or newer, for Linux on x86-64.

    Source: the CUDA support matrix in PyTorch's RELEASE.md (of 2.11, and of 2.12 to 2.14).

    Attributes:
        tag: as in the name of its package index, and the local part of its version.
        cuda: version of CUDA.
        architectures: as `torch.cuda.get_arch_list()` names them.
        oldest, newest: minor releases of torch that have this build. `newest` is None if the last one known has it.
    """

    tag: str
    cuda: str
    architectures: tuple[str, ...]
    oldest: Release = (2, 11)
    newest: Release | None = None

    @property
    def min_driver(self) -> int:
        """Oldest major version of the driver that runs it."""
        return MIN_DRIVERS[int(self.cuda.partition(".")[0])]


_TURING_AND_NEWER = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
BUILDS = (
    Build("cu126", "12.6", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")),
    Build("cu128", "12.8", _TURING_AND_NEWER, newest=(2, 11)),
    Build("cu130", "13.0", (*_TURING_AND_NEWER, "compute_120")),
    Build("cu132", "13.2", (*_TURING_AND_NEWER, "compute_120"), oldest=(2, 12)),
)
# Oldest driver for each major version of CUDA (minor version compatibility).
# Source: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
MIN_DRIVERS = {11: 450, 12: 525, 13: 580}


def is_served(capability: Capability, architectures: Sequence[str]) -> bool:
    """Whether a build with code for `architectures` runs on a GPU of this compute capability.

    Code for sm_XY runs on X.Z with Z ≥ Y; compute_XY is compiled by the driver for anything newer.
    """
    for match in filter(None, (re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name) for name in architectures)):
        compiled = int(match[2]), int(match[3])
        is_major = match[1] == "compute" or compiled[0] == capability[0]
        # Code of an architecture with a letter runs there only.
        if compiled == capability or (not match[4] and is_major and compiled <= capability):
            return True
    return False


def dtype_problem(name: str, capability: Capability, dtype: str) -> str | None:
    """Why a GPU cannot compute in `dtype` (a value of TERCET_DTYPE), and what to do; None if it can."""
    if dtype == "bf16" and capability < OLDEST_BF16:
        return f"{_card(name, capability)} computes no bf16: set TERCET_DTYPE=fp16 or auto."
    return None


def build_problem(
    name: str, capability: Capability, cuda: str | None, architectures: Sequence[str] | None, driver: str = ""
) -> str | None:
    """Why the installed torch does not serve a GPU, and what to install; None if it does, or if that is not known.

    Args:
        cuda: version of CUDA that torch was built for; None if it was built without.
        architectures: that torch has code for; None to look them up for `cuda`.
        driver: version, like 535.183.01; empty if it is not known.
    """
    if architectures is None:
        architectures = next((build.architectures for build in BUILDS if build.cuda == cuda), None)
        if architectures is None and cuda is not None:
            return None
    if cuda is not None and is_served(capability, architectures or ()):
        return None
    what = "was built without CUDA" if cuda is None else f"was built for CUDA {cuda} and has no code for this GPU"
    release = installed_release()
    fitting = fitting_builds(release, capability)
    if not fitting:
        return (
            f"No build of torch {release} serves {_card(name, capability)}: name other GPUs in TERCET_DEVICES, or cpu "
            f"({TABLE})."
        )
    # A driver that is not known may be old: the builds that run with the oldest one are then the safe ones.
    oldest = min(build.min_driver for build in fitting)
    runnable = fitting_builds(release, capability, _major(driver) or oldest)
    build = (runnable or fitting_builds(release, capability, oldest))[-1]
    update = "" if runnable else f"update the driver from {driver} to {oldest} or newer, then "
    return (
        f"{_card(name, capability)} needs another build of torch, as the installed one {what}: "
        f"{update}{torch_command(release, build.tag, INDEX)} ({TABLE})."
    )


def driver_problem(name: str, capability: Capability | None, driver: str, cuda: str | None) -> str | None:
    """Why a driver does not serve the installed torch, and what to do; None if it does, or if that is not known.

    Args:
        driver: version, like 535.183.01.
        cuda: version of CUDA that torch was built for; None if it was built without.
    """
    needed = None if cuda is None else MIN_DRIVERS.get(int(cuda.partition(".")[0]))
    major = _major(driver)
    if needed is None or major is None or major >= needed:
        return None
    release = installed_release()
    fitting = fitting_builds(release, capability, major)
    or_build = (
        f", or install a build of torch for it: {torch_command(release, fitting[-1].tag, INDEX)}" if fitting else ""
    )
    return (
        f"The driver {driver} of {name} is too old for torch's build for CUDA {cuda}, which needs {needed} or newer: "
        f"update the driver{or_build} ({TABLE})."
    )


def fitting_builds(release: str, capability: Capability | None, driver: int | None = None) -> list[Build]:
    """The builds of this release of torch that serve a GPU, by version of CUDA.

    Args:
        release: version of torch, like 2.13.0.
        capability: of the GPU; None for any.
        driver: major version; None for any.
    """
    major, minor, *_ = map(int, release.split("."))
    return [
        build
        for build in BUILDS
        if build.oldest <= (major, minor) <= (build.newest or (major, minor))
        and (capability is None or is_served(capability, build.architectures))
        and (driver is None or driver >= build.min_driver)
    ]


def installed_release() -> str:
    """The version of the torch that is installed, like 2.13.0, without what its build adds."""
    match = re.match(r"\d+\.\d+(\.\d+)?", version("torch"))
    assert match is not None
    return match[0]


def installed_cuda() -> tuple[bool, str | None]:
    """Whether torch is installed, and the version of CUDA that it was built for, if any. Does not import torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False, None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    match = re.search(r"^cuda(?::[^=]*)?\s*=\s*['\"]([0-9.]+)['\"]", text, re.MULTILINE)
    return True, match[1] if match else None


def _major(driver: str) -> int | None:
    major = driver.partition(".")[0]
    return int(major) if major.isdigit() else None


def _card(name: str, capability: Capability) -> str:
    return f"{name} (compute capability {capability[0]}.{capability[1]})"
