"""Relative paths in settings begin where `tercet` was started; tests/deploy/packaging/test_wheel.py has the wheel."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.deploy.paths import check_relative_paths


def test_every_path_is_relative_to_the_shell_that_started_the_checkout(short_tmp_path: Path) -> None:
    check_relative_paths([str(Path(sys.executable).parent / "tercet")], short_tmp_path)
