"""Stage `tests`: every test that is marked `gpu`, in pytest's own process, with the reasons of failures."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from deploy.bench.gpu.commands import run_command
from deploy.bench.gpu.context import LOGS, Context
from deploy.bench.gpu.record import Recorder, Skipped
from deploy.load.server import ROOT

MAX_REASON_CHARS = 400
NOTHING_COLLECTED = 5  # pytest's exit code


def run(context: Context, record: Recorder) -> None:
    files = gpu_test_files(ROOT)
    # A file of its own for each row: a run that is cut off keeps those that have ended.
    for path in files:
        record.measure(path, partial(_run_file, path, context, context.limit_s))


def gpu_test_files(root: Path) -> list[str]:
    """Test files with a `gpu` mark, by their text: collecting all tests would import what this machine may lack."""
    found = [path for path in sorted((root / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    return [str(path.relative_to(root)) for path in found]


def _run_file(path: str, context: Context, limit_s: float) -> dict[str, Any]:
    report = context.out / LOGS / f"tests-{re.sub(r'[^a-z0-9]+', '-', path)}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    command = [
        # Another machine has other versions of packages, and their warnings say nothing about Tercet.
        *(sys.executable, "-m", "pytest", path, "-m", "gpu", "-q", "-p", "no:cacheprovider", "--tb=short"),
        *("-o", "filterwarnings=default", "--timeout", str(max(10, int(limit_s))), f"--junitxml={report}"),
    ]
    done = run_command(command, limit_s)
    (report.with_suffix(".log")).write_text(done.output)
    if done.code == NOTHING_COLLECTED:
        raise Skipped(f"no test of {path} was selected: this machine has no GPU")
    if done.code is None or not report.is_file():
        raise RuntimeError(f"ended with {done.code or 'its limit'}: {done.last_line[:MAX_REASON_CHARS]}")
    return parse_junit(report.read_text())


def parse_junit(text: str) -> dict[str, Any]:
    """Counts, seconds and failures of pytest's JUnit file."""
    cases = ElementTree.fromstring(text).findall(".//testcase")
    failures, skips, num_passed = {}, {}, 0
    for case in cases:
        name = case.get("name", "")
        bad = case.find("failure") if case.find("failure") is not None else case.find("error")
        skip = case.find("skipped")
        if bad is not None:
            failures[name] = (bad.get("message") or bad.text or "")[:MAX_REASON_CHARS]
        elif skip is not None:
            skips[name] = (skip.get("message") or "")[:MAX_REASON_CHARS]
        else:
            num_passed += 1
    seconds = {case.get("name", ""): float(case.get("time", 0)) for case in cases}
    return {
        "num_passed": num_passed, "num_failed": len(failures), "num_skipped": len(skips), "failures": failures,
        "skips": skips, "seconds": {name: round(value, 1) for name, value in seconds.items() if value >= 1},
    }  # fmt: skip
