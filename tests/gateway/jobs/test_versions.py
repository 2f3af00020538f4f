"""Gateways of two versions over one store: each computes what the other has accepted."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
# The last commit whose jobs had a value for each field that its gateway knew.
EARLIER = "71bc1399"
BODY = {"prompt": "He saw", "num_samples": 2, "temperature": 0.5, "stop": ["x"]}
SENT = {"context": "He saw", "n_samples": 2, "temperature": 0.5, "stop": ["x"]}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of the earlier commit."""
    command = ["git", "-C", str(ROOT), "archive", EARLIER, "gateway", "shared"]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no history with commit {EARLIER}")
    directory = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(directory, filter="data")
    return directory


def run(directory: Path, store: Path, body: object = None) -> str:
    """Submit a job with the code of a directory, or compute one."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("version_child.py")), str(directory)]
    bodies = [] if body is None else [json.dumps(body)]
    return subprocess.check_output([*command, f"sqlite:{store}", *bodies], text=True, cwd=directory)


def test_a_job_of_one_version_is_computed_by_the_other(earlier: Path, tmp_path: Path) -> None:
    for one, other in ((earlier, ROOT), (ROOT, earlier)):
        run(one, tmp_path / "jobs.sqlite3", BODY)
        request: dict[str, Any] = json.loads(run(other, tmp_path / "jobs.sqlite3"))
        assert SENT.items() <= request.items()
