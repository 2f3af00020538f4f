"""A package index with builds of torch: tiny wheels over HTTP, in place of PyTorch's indexes and of PyPI."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from tests.gateway.pool.helpers import respond, serving_requests

# The libraries that a build for this version of CUDA requires here, one for all.
LIBRARIES = {"12.6": "nvidia-cublas-cu12==12.6.4.1", "12.8": "nvidia-cublas-cu12==12.8.4.1"} | {
    "13.0": "nvidia-cublas==13.1.0.3",
    "13.2": "nvidia-cublas==13.3.0.5",
}


@dataclass(frozen=True, slots=True)
class PackageIndex:
    """Indexes by the first folder of their path.

    Attributes:
        folder: that holds the folders.
        url: of that folder.
        requests: paths of all requests, in order.
    """

    folder: Path
    url: str
    requests: list[str] = field(default_factory=list)


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: Sequence[str] = ()) -> Path:
    """A wheel for any Python, in the project's own folder of an index."""
    escaped = name.replace("-", "_")
    info = f"{escaped}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    files = files | {
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / name / f"{escaped}-{version}-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{each},,\n" for each in [*files, f"{info}/RECORD"]))
    return path


def write_torch(folder: Path, version: str, cuda: str | None) -> None:
    """A build of torch and the library that it requires. As on PyPI, `version` may leave out the local part."""
    text = f"from typing import Optional\n\n__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\n"
    requires = [] if cuda is None else [LIBRARIES[cuda]]
    write_wheel(folder, "torch", version, {"torch/__init__.py": "", "torch/version.py": text}, requires)
    for name, _, pinned in (each.partition("==") for each in requires):
        write_wheel(folder, name, pinned, {f"{name.replace('-', '_')}.py": ""})


@functools.cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def serving(folder: Path) -> Iterator[PackageIndex]:
    """Serve the indexes in the folders of `folder`: a project's files with their hashes (PEP 503)."""
    requests: list[str] = []

    def answer(connection: socket.socket, request: bytes) -> None:
        requests.append(unquote(request.split()[1].decode()))
        found = folder / requests[-1].strip("/")
        if not found.is_dir():
            respond(connection, 200, found.read_bytes()) if found.is_file() else respond(connection, 404, b"")
            return
        files = sorted(found.glob("*.whl"))
        links = (f'<a href="{path.name.replace("+", "%2B")}#sha256={_digest(path)}">x</a>\n' for path in files)
        page = f"<!DOCTYPE html><html><body>\n{''.join(links)}</body></html>"
        respond(connection, 200, page.encode(), {"Content-Type": "text/html"})

    with serving_requests(answer) as server:
        yield PackageIndex(folder, f"http://{server.address}", requests)


def pip_environ(index_url: str) -> dict[str, str]:
    """The environment of this process, in which pip is configured with this index and nothing else."""
    environ = {name: value for name, value in os.environ.items() if not name.upper().startswith(("PIP_", "TORCH"))}
    # A proxy would not know this machine's own address.
    own = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index_url, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return environ | own | {"PIP_NO_CACHE_DIR": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
