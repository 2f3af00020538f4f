"""Runs `tercet bench …` in a process of its own, as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def run_bench(*arguments: str, is_quick: bool = True) -> tuple[dict[str, Any], str]:
    """The JSON document, which must be the only line on standard output, and the text on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "deploy", "bench", *arguments, *(["--quick"] if is_quick else [])],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    document: dict[str, Any] = json.loads(line)
    return document, done.stderr
