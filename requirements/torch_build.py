"""Chooses the build of torch for this machine: `python3 requirements/torch_build.py` prints requirements for pip.

PyPI serves a CUDA build for Linux, gigabytes with its libraries. Without an NVIDIA device the CPU build is chosen, from
PyTorch's CPU index if that answers, else what pip is configured with. A torch of the pinned version that this Python
has already stays. Stderr says what was chosen, and why. Installs nothing, and needs the standard library alone, because
it runs before anything is installed.

Environment: TORCH is `cpu`, `cuda`, `default` (what pip is configured with) or empty (the device decides). TORCH_INDEX
is an index of CPU builds in place of PyTorch's, TORCH_ROOT a directory in place of / for the device check.
"""

from __future__ import annotations

import html
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote
from urllib.request import Request, urlopen

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# With the start of Python, an index that does not answer costs less than two seconds.
LIMIT_S = 1.8
MAX_BYTES = 32 << 20
# As in deploy/tuning/gpus.py: all patterns of a group must exist.
DEVICE_NODES = (("/dev/nvidia[0-9]*",), ("/dev/nvidiactl",), ("/dev/dxg", "/usr/lib/wsl/lib/libcuda.so*"))
LINK = re.compile(r"""\bhref\s*=\s*["']([^"'#?]+)[^"'#]*(?:#([^"']*))?["']""", re.IGNORECASE)
WHEEL = re.compile(r"torch-([^-]+)(?:-\d[^-]*)?-([^-]+)-([^-]+)-([^-]+)\.whl")


def find_device(root: Path) -> str | None:
    """What shows that this machine has an NVIDIA device, if it has one. A card without a driver counts, too."""
    for group in DEVICE_NODES:
        found = [sorted(root.glob(pattern.lstrip("/"))) for pattern in group]
        if all(found):
            return str(found[0][0])
    for card in root.glob("sys/bus/pci/devices/*"):
        with suppress(OSError):
            # NVIDIA makes other chips, too: the class is that of displays.
            if (card / "vendor").read_text() == "0x10de\n" and (card / "class").read_text().startswith("0x03"):
                return str(card)
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=True).stdout
        if listed.strip() and "no devices" not in listed.lower():
            return "nvidia-smi -L"
    return None


def read_page(url: str, limit_s: float = LIMIT_S) -> str:
    """The text at `url`, asked for once; empty if it has not come within `limit_s`, or is none."""
    pages = [""]

    def read() -> None:
        request = Request(url, headers={"Accept": "text/html", "User-Agent": "tercet"})
        with suppress(OSError, ValueError, HTTPException), urlopen(request, timeout=limit_s) as answer:
            pages.append(answer.read(MAX_BYTES).decode(errors="replace"))

    # A thread, because the socket's timeout ends neither a name server that hangs nor an answer that trickles.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(limit_s)
    return pages[-1]


def find_cpu_build(page: str, release: str) -> tuple[str, list[str]] | None:
    """The version of torch's CPU build on an index's page (PEP 503) for this Python and machine, and its hashes.

    Returns:
        The version, with the local part `cpu` if the page names it, and the SHA-256 of each of its files that pip may
        take: none, if the page lacks one of them. None if the page has no such file.
    """
    found: dict[str, list[str | None]] = {}
    for path, fragment in LINK.findall(html.unescape(page)):
        wheel = WHEEL.fullmatch(unquote(path).rpartition("/")[2])
        if wheel and wheel[1] in (release, f"{release}+cpu") and _is_for_this_python(*wheel.group(2, 3, 4)):
            digest = re.search(r"\bsha256=([0-9a-f]{64})\b", fragment)
            found.setdefault(wheel[1], []).append(digest[1] if digest else None)
    if not found:
        return None
    version = max(found, key=len)
    digests = [digest for digest in found[version] if digest]
    return version, digests if len(digests) == len(found[version]) else []


def _is_for_this_python(python: str, abi: str, platforms: str) -> bool:
    major, minor = sys.version_info[:2]
    own = f"cp{major}{minor}"
    system = "macosx" if sys.platform == "darwin" else "(many)?linux"
    pattern = re.compile(rf"any|{system}\w*_{re.escape(platform.machine())}")
    return (
        bool({own, f"py{major}", f"py{major}{minor}"} & {*python.split(".")})
        and bool({own + sys.abiflags, "none"} & {*abi.split(".")})
        and any(map(pattern.fullmatch, platforms.split(".")))
    )


def installed_version() -> str:
    """The version of torch that this Python has; empty if it has none."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version("torch")
    return ""


def choose(release: str, environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Requirements for pip, and a sentence that says what was chosen, and why.

    Raises:
        ValueError: TORCH has another value.
    """
    choice = environ.get("TORCH", "")
    if choice not in ("cpu", "cuda", "default", ""):
        raise ValueError(f"TORCH={choice} names no build of torch: set it to cpu, cuda or default, or leave it out.")
    installed = installed_version()
    if installed.partition("+")[0] == release:
        return [], f"{installed} is installed and stays"
    configured = "from what pip is configured with"
    if choice == "cuda":
        # An index with both builds would give the CPU build, because its version has a local part.
        return [f"torch=={release}, !={release}+cpu"], f"a CUDA build of {release} {configured}: TORCH=cuda"
    if choice == "default":
        return [f"torch=={release}"], f"{release} {configured}: TORCH=default"
    device = None if choice else find_device(Path(environ.get("TORCH_ROOT") or "/"))
    if device:
        return [f"torch=={release}"], f"{release} {configured}: this machine has an NVIDIA device ({device})"
    why = f"TORCH={choice}" if choice else "this machine has no NVIDIA device (TORCH=cuda or TORCH=default overrules)"
    index = (environ.get("TORCH_INDEX") or CPU_INDEX).rstrip("/")
    name = "TORCH_INDEX" if environ.get("TORCH_INDEX") else index  # an address of one's own may hold a password
    build = find_cpu_build(read_page(f"{index}/torch/"), release)
    if build is None:
        return [f"torch=={release}"], f"{release} {configured}, as {name} does not answer with a CPU build of it: {why}"
    version, digests = build
    hashes = "".join(f" --hash=sha256:{digest}" for digest in digests)
    return [f"--index-url {index}", f"torch=={version}{hashes}"], f"the CPU build {version} from {name}: {why}"


def main() -> None:
    [release] = re.findall(r"^torch==(\S+)", Path(__file__).with_name("torch.txt").read_text(), re.MULTILINE)
    try:
        requirements, sentence = choose(release, os.environ)
    except ValueError as error:
        sys.exit(str(error))
    print(f"torch: {sentence}.", file=sys.stderr)
    print("\n".join(["# Written by requirements/torch_build.py.", *requirements]))


if __name__ == "__main__":
    main()
