"""`python -m tests.chaos`: measures rows of docs/RELIABILITY.md, prints them and records their figures."""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from deploy.tuning.load.run import command_line, describe, versions
from tests.bench.results import RESULTS, Result
from tests.chaos.measure import Context, Findings, Size
from tests.chaos.registry import ROWS
from tests.e2e.harness import ROOT


def main() -> int:
    """Exit code 1 if a row falls short."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", default="", help="rows to measure, like R1,R14; by default all")
    parser.add_argument("--seed", type=int, default=1, help="of every random choice (default: %(default)s)")
    parser.add_argument("--soak", action="store_true", help="ten times the amounts")
    parser.add_argument("--short", action="store_true", help="the amounts of `make test-integration`")
    parser.add_argument("--record", default="", metavar="NAME", help="write the figures into docs/results/NAME.json")
    options = parser.parse_args()
    wanted = set(filter(None, options.only.upper().split(",")))
    if unknown := wanted - {row.name for row in ROWS}:
        parser.error(f"there are no rows {', '.join(sorted(unknown))}; there are {', '.join(r.name for r in ROWS)}")
    size: Size = "soak" if options.soak else "short" if options.short else "full"
    console = Console(stderr=True)
    gc.freeze()  # what is imported, torch too: each full collection would stop all clients and proxies for 85 ms
    started_at = time.monotonic()
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    # A short path, for the Unix sockets in it.
    base = Path(tempfile.mkdtemp(prefix="chaos-"))
    context = Context(base, size, options.seed)
    found: list[Findings] = []
    try:
        for row in [row for row in ROWS if not wanted or row.name in wanted]:
            with console.status(f"{row.name}: {row.promise}"):
                findings = row.run(context)
            print(findings.markdown(), flush=True)
            for shortfall in findings.shortfalls:
                console.print(f"  {shortfall}", style="red", highlight=False, markup=False)
            found.append(findings)
    finally:
        context.close()
        shutil.rmtree(base, ignore_errors=True)
    machine = describe()
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    described = f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 1e9:.0f} GB memory; {machine.system}; "
    described += ", ".join(f"{name} {number}" for name, number in versions().items())
    result = Result(
        command=f"{command_line()}, seed {options.seed}, {(time.monotonic() - started_at) / 60:.0f} minutes",
        model="embedded",
        commit=commit or "unknown (no git checkout)",
        date=date,
        machine=described,
        rows=[{"row": findings.row, "measured": findings.measured()} for findings in found],
    )
    document = msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n"
    print(document)
    if options.record:
        (RESULTS / f"{options.record}.json").write_text(document, encoding="utf-8")
    return int(not all(findings.held for findings in found))


if __name__ == "__main__":
    sys.exit(main())
