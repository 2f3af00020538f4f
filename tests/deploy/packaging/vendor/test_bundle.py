"""The bundle of CodeMirror that is committed: made from its lock, byte for byte."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.packaging.vendor import bundles


def test_the_lock_gives_the_committed_bytes(tmp_path: Path) -> None:
    try:
        files = bundles.build(tmp_path)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm could not install the tools: {error}; {getattr(error, 'stderr', '') or ''}")
    for name, data in files.items():
        assert (bundles.VENDOR / name).read_bytes() == data, f"{name} differs: run `make vendor`"
