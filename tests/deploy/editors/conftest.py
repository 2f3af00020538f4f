"""Fixtures: the built plug-ins, and a Tercet server that requires a key and has a fast and a slow model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.keys import new_key
from tests.browser.conftest import browser, site
from tests.browser.driver import StaticSite
from tests.e2e.harness import ROOT, Tercet, running

__all__ = ["browser", "site"]  # fixtures


@pytest.fixture(scope="session")
def key_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="session")
def key(key_path: Path) -> str:
    return new_key(key_path, "editor")[0]


@pytest.fixture(scope="session")
def tercet(site: StaticSite, tmp_path_factory: pytest.TempPathFactory, key_path: Path, key: str) -> Iterator[Tercet]:
    """Two models: `embedded`, and `slow`, the same checkpoint with at least 100 ms per decode step."""
    models = f"embedded,slow={ROOT}/workers/checkpoints/embedded"
    # No limit of requests: a slow start is polled with the key.
    keys = {"keys": str(key_path), "api_key": key, "key_rate": "0"}
    base = tmp_path_factory.mktemp("t")
    with running(base, models=models, test_step_delay_ms="1=100", origins=site.origin, **keys) as instance:
        yield instance


@contextmanager
def skipping_without_npm() -> Iterator[None]:
    """Skips the test if npm cannot install what is installed inside."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm could not install the tools: {error}; {getattr(error, 'stderr', '') or ''}")


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
