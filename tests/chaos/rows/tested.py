"""Rows whose promise is a table or a rule: the tests that check all of it are run, and their number is the figure."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.chaos.measure import Context, Findings, MeasureRow
from tests.e2e.harness import ROOT

TIMEOUT_S = 600


def run_tests(*nodes: str, only: str = "") -> MeasureRow:
    """A row that runs tests.

    Args:
        nodes: test files or test ids, relative to the repository.
        only: pytest's `-k`.
    """

    def measure(context: Context, findings: Findings) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-m",
            "not deploy",
            *nodes,
        ]
        done = subprocess.run(
            [*command, "-k", only] if only else command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        counts = {name: int(number) for number, name in re.findall(r"(\d+) (passed|failed|error|skipped)", done.stdout)}
        findings.figures["tests passed"] = counts.get("passed", 0)
        findings.note = "shown by " + ", ".join(f"`{node}`" for node in nodes)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        findings.require(not failed, f"failed: {', '.join(failed)}")
        findings.require(
            done.returncode == 0 and counts.get("passed", 0) > 0,
            f"pytest ended with {done.returncode}: {' '.join(done.stdout.split())[-300:]}",
        )

    return measure
