"""This version and a later one in one pool; tests/gateway/jobs/test_versions.py has their jobs.

The later version is a copy of this code with a higher version and another protocol: no release exists yet.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from shared.protocol import PROTOCOL
from shared.version import tercet_version
from tests.e2e.harness import ROOT, Gunicorn, serving

CODE = ("deploy", "gateway", "shared", "workers")
LATER = "99.0.0"


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A later version that works with this one; tests/gateway/pool/test_watcher.py has others."""
    folder = tmp_path_factory.mktemp("v")
    for name in CODE:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "gunicorn.conf.py", folder)
    for name, pattern, value in (
        ("pyproject.toml", r"^version = .*", f'version = "{LATER}"'),
        ("shared/protocol.py", r"^PROTOCOL = .*", f"PROTOCOL = {PROTOCOL + 1}"),
    ):
        source = folder / name if (folder / name).exists() else ROOT / name
        text, count = re.subn(pattern, value, source.read_text(), flags=re.MULTILINE)
        assert count == 1, name
        (folder / name).write_text(text)
    return folder


def pools(base: Path, later: Path, role: str) -> tuple[Gunicorn, Gunicorn]:
    """Gateway and workers in one run directory; the pool of `role` is of the later version."""
    gateway, workers = Gunicorn(base, "gateway"), Gunicorn(base, "workers")
    (gateway if role == "gateway" else workers).root = later
    return gateway, workers


@pytest.mark.parametrize("role", ["gateway", "workers"])
def test_a_pool_of_the_next_version_works_with_the_other(role: str, later: Path, short_tmp_path: Path) -> None:
    gateway, workers = pools(short_tmp_path, later, role)
    with serving(workers), serving(gateway):
        [slot] = gateway.wait_until_warm()
        page = gateway.ready()
        assert page is not None
        versions = {"gateway": page["version"], "workers": slot["version"]}
        assert versions == {"gateway": tercet_version(), "workers": tercet_version()} | {role: LATER}
        assert len(gateway.ask()["sentences"]) == 3
        assert gateway.ask(strategy="predict", familiar_only=True)["sentences"]
