"""`python -m tests.all`, which is `make test-all`: runs all suites of tests, one after another, and prints one summary.

Each suite's result is written as it ends, and its output is in `build/test-all/`. After an interruption, the same
command continues with the suites that have no result for this state of the working tree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "test-all"
COUNTS = re.compile(r"\d+ (passed|failed|skipped|errors?)\b")
PYTEST = (sys.executable, "-m", "pytest", "-rs", "--hypothesis-profile=full")
# Suites by name, with the longest time that each may take, in minutes.
SUITES: dict[str, tuple[float, tuple[str, ...]]] = {
    "lint": (10, ("make", "lint")),
    "test": (40, ("make", "test", "ARGS=--hypothesis-profile=full")),
    "integration": (60, ("make", "test-integration", "ARGS=--hypothesis-profile=full -rs")),
    # Firefox, Obsidian, VS Code, the Triton interpreter.
    "full": (40, (*PYTEST, "-m", "full and not clients and not deploy", "--ignore=tests/clients")),
    "clients": (40, ("make", "test-clients", "ARGS=-rs")),
    "deploy": (60, ("make", "test-deploy")),
    "chaos": (60, ("make", "chaos")),
    "bench": (40, (*PYTEST, "-m", "bench", "tests/bench")),
    "defects": (30, (sys.executable, "-m", "tests.defects")),
}


@dataclass(frozen=True)
class Result:
    """How a suite ended.

    Attributes:
        tree: digest of the working tree that was tested.
        last_line: pytest's counts; of another suite, what it printed last.
    """

    suite: str
    tree: str
    exit_code: int
    minutes: float
    last_line: str


def digest_of_tree() -> str:
    """A digest of the commit and of every change to it, new files included."""

    def git(*args: str) -> bytes:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, check=True).stdout

    digest = hashlib.sha256(git("rev-parse", "HEAD") + git("diff", "HEAD"))
    for name in git("ls-files", "--others", "--exclude-standard", "-z").split(b"\0")[:-1]:
        digest.update(name + (ROOT / os.fsdecode(name)).read_bytes())
    return digest.hexdigest()[:16]


def read_results(tree: str) -> dict[str, Result]:
    """The results of earlier runs for this tree, by suite."""
    found = (Result(**json.loads(path.read_text())) for path in RESULTS.glob("*.json"))
    return {result.suite: result for result in found if result.tree == tree}


def run(suite: str, tree: str) -> Result:
    """Run a suite in a session of its own, end what it leaves, and write its result."""
    limit_minutes, command = SUITES[suite]
    log = RESULTS / f"{suite}.log"
    began = time.monotonic()
    # Without the ARGS of `make test-all`, which make hands on to the make of a suite.
    environ = {name: value for name, value in os.environ.items() if name not in {"ARGS", "MAKEFLAGS", "MFLAGS"}}
    # Unix sockets have paths in it, so a longer name would be refused. Removed with what killed servers left there.
    temporary = tempfile.mkdtemp(prefix="t")
    Path(temporary).chmod(0o755)  # containers and units of the tests run as other users
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**environ, "TMPDIR": temporary},
            )
            try:
                exit_code = process.wait(timeout=60 * limit_minutes)
            except subprocess.TimeoutExpired:
                exit_code = -signal.SIGKILL
            finally:
                end_session(process.pid)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    lines = [line.strip("= ") for line in log.read_text(errors="replace").split("\n")]
    counts = [line for line in lines if COUNTS.match(line)]  # of pytest, which may print warnings after them
    last_line = next((line for line in reversed(counts or lines) if line and not line.startswith("make")), "")
    result = Result(suite, tree, exit_code, round((time.monotonic() - began) / 60, 1), last_line[:160])
    (RESULTS / f"{suite}.json").write_text(json.dumps(asdict(result)))
    return result


def end_session(leader: int) -> None:
    """Kill every process of a session that `run` began, and wait for their ends."""
    left = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                process.kill()
                left.append(process)
        except (OSError, psutil.Error):  # it has ended meanwhile
            continue
    psutil.wait_procs(left, timeout=10)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-all", description=__doc__)
    parser.add_argument("--again", action="store_true", help="forget the results of earlier runs")
    parser.add_argument("--only", nargs="+", choices=SUITES, default=list(SUITES), help="suites to run")
    options = parser.parse_args()
    # A shell lets what it starts in the background ignore Ctrl-C, and so would the commands that suites interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # An exception, so that `run` ends what it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    RESULTS.mkdir(parents=True, exist_ok=True)
    if options.again:
        for path in RESULTS.glob("*.json"):
            path.unlink()
    tree = digest_of_tree()
    results = read_results(tree)
    for suite in options.only:
        if suite not in results:
            print(f"{suite}: {RESULTS.relative_to(ROOT)}/{suite}.log", flush=True)
            results[suite] = run(suite, tree)
    print()
    for suite in options.only:
        result = results[suite]
        verdict = "passed" if result.exit_code == 0 else f"FAILED ({result.exit_code})"
        print(f"{suite:12} {verdict:12} {result.minutes:6.1f} min  {result.last_line}")
    print(f"{'all':12} {'':12} {sum(results[suite].minutes for suite in options.only):6.1f} min")
    return int(any(results[suite].exit_code for suite in options.only))


if __name__ == "__main__":
    sys.exit(main())
