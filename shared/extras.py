"""The command that installs an optional part of Tercet, an extra of pyproject.toml.

Tercet runs from its checkout and is on no package index, so the command names the checkout: a bare name would install
whatever was published under it.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def install_command(extra: str) -> str:
    """A shell command that works in any directory and installs `extra` for the Python that is running."""
    return shlex.join([sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[{extra}]"])
