"""What tests of `make test-deploy` need besides Python: Debian packages and root."""

from __future__ import annotations

import os
import shutil

import pytest


def need(*packages: str, root: bool = False) -> None:
    """Fail, not skip, where a package is missing: these tests run only where they are wanted.

    Args:
        packages: Debian packages, each with a program of the same name, or `package:program`.
    """
    missing = [package.partition(":")[0] for package in packages if shutil.which(package.rpartition(":")[2]) is None]
    if missing:
        pytest.fail(f"as root: apt-get install --no-install-recommends {' '.join(missing)}")
    if root and os.geteuid():
        pytest.fail("this test needs root: it changes user, and mounts file systems")
