"""`python -m tests.chaos`: measures the rows of docs/RELIABILITY.md and prints the table."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from deploy.load.machine import describe, versions
from tests.chaos.measure import Context, RowResult, Size, num_cores
from tests.chaos.registry import NOT_MEASURED, ROWS
from tests.chaos.report import Run, commit, figures, page, terminal_table, verdict


def main() -> int:
    """Exit code 1 if a row falls short."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--only", default="", help="rows to measure, like R1,S13; by default all")
    parser.add_argument("--seed", type=int, default=1, help="of every random choice (default: %(default)s)")
    parser.add_argument("--soak", action="store_true", help="ten times the amounts")
    parser.add_argument("--short", action="store_true", help="the amounts of `make test`")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table to FILE, like docs/RELIABILITY.md")
    options = parser.parse_args()
    wanted = set(filter(None, options.only.upper().split(",")))
    if unknown := wanted - {row.name for row in ROWS}:
        parser.error(f"there are no rows {', '.join(sorted(unknown))}; there are {', '.join(r.name for r in ROWS)}")
    size: Size = "soak" if options.soak else "short" if options.short else "full"
    console = Console(stderr=True)
    started_at = time.monotonic()
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    # A short path, for the Unix sockets in it.
    base = Path(tempfile.mkdtemp(prefix="chaos-"))
    context = Context(base, size, options.seed, console)
    results: list[RowResult] = []
    try:
        for row in ROWS:
            if wanted and row.name not in wanted:
                continue
            with console.status(f"{row.name}: {row.promise}"):
                result = row.run(context)
            results.append(result)
            style = "green" if result.held else "red"
            console.print(f"[bold]{row.name}[/] [{style}]{verdict(result)}[/] {figures(result)}", highlight=False)
            for shortfall in result.shortfalls:
                console.print(f"  {shortfall}", style="red", highlight=False, markup=False)
    finally:
        context.close()
        shutil.rmtree(base, ignore_errors=True)
    Console().print(terminal_table(results))
    if options.write is not None:
        run = Run(
            command=shlex.join(["python", "-m", "tests.chaos", *sys.argv[1:]]),
            date=date,
            elapsed_s=time.monotonic() - started_at,
            seed=options.seed,
            commit=commit(),
            machine=describe(),
            versions=versions(),
            num_cores=num_cores(),
        )
        options.write.write_text(page(results, run, NOT_MEASURED), encoding="utf-8")
    return int(not all(result.held for result in results))


if __name__ == "__main__":
    sys.exit(main())
