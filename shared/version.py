"""The version of Tercet: pyproject.toml has it, and nothing else."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
UNKNOWN = "unknown"


@cache
def tercet_version() -> str:
    """The version of this checkout, whether or not it is installed; else that of the installed package."""
    if PYPROJECT.is_file():
        found: str = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["version"]
        return found
    try:
        return version("tercet")
    except PackageNotFoundError:  # a folder with the code alone
        return UNKNOWN
