"""What the tests of editors' plug-ins share: builds, stand-in hosts, and a server that requires a key."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.clients.plugins import install_tools
from shared.api_keys import new_key
from tests.e2e.harness import ROOT, Tercet, running
from tests.npm_package import NpmPackage, skipping_without_npm


def build_plugin(
    name: str, build: Callable[[Path, Path], Path], package: NpmPackage, request: pytest.FixtureRequest
) -> Path:
    """Build a plug-in in a folder of pytest's cache; skips the test if its tools cannot be installed."""
    assert request.config.cache is not None
    work = request.config.cache.mkdir(f"{name}-plugin")
    with skipping_without_npm():
        install_tools(name, work)
    return build(work, package.packed)


def bundle_host(work: Path, source: Path, types: list[str], *options: str) -> Path:
    """Type-check a stand-in host against the editor's types in the plug-in's work folder, and bundle it."""
    folder = work / "host"
    folder.mkdir(exist_ok=True)
    shutil.copy(source, folder)
    config = {"extends": "../tsconfig.json", "compilerOptions": {"types": types}, "files": [source.name]}
    (folder / "tsconfig.json").write_text(json.dumps(config))
    binaries = work / "node_modules/.bin"
    check = subprocess.run([binaries / "tsc", "--noEmit"], cwd=folder, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout
    bundle = folder / f"{source.stem}.mjs"
    options = (source.name, "--bundle", "--log-level=warning", f"--outfile={bundle}", *options)
    subprocess.run([binaries / "esbuild", *options], cwd=folder, check=True)
    return bundle


@contextmanager
def running_with_key(base: Path, origin: str = "") -> Iterator[tuple[Tercet, str]]:
    """A server and its key. Two models: `embedded`, and `slow`, the same with at least 100 ms per decode step."""
    key = new_key(base / "keys", "editor")[0]
    models = f"embedded,slow={ROOT}/workers/checkpoints/embedded"
    # No limit of requests: a slow start is polled with the key.
    keys = {"keys": str(base / "keys"), "api_key": key, "key_rate": "0"}
    with running(base, models=models, test_step_delay_ms="1=100", origins=origin, **keys) as tercet:
        yield tercet, key
