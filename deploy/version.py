"""The version of Tercet."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def tercet_version() -> str:
    """Return the version of this checkout, whether or not it is installed; else that of the installed package."""
    if not PYPROJECT.is_file():
        return version("tercet")
    found: str = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["version"]
    return found
