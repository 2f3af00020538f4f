"""Stand-ins for programs that are not on this machine: shell scripts with their names."""

from __future__ import annotations

from pathlib import Path


def write_program(path: Path, body: str) -> None:
    """A program at `path` that runs these lines of shell."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
