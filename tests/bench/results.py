"""Rows of figures: as tables on a terminal, as result files, and as the tables of the docs.

`--record NAME` writes a run into `docs/results/NAME.json`. A page has it where `<!-- written by tests.bench.results:
NAME -->` stands (`make docs`), or with `NAME; heading; heading` some of its columns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.tuning.load.run import Document
from deploy.tuning.load.server import ROOT
from shared.errors import StartError
from tests.programs import run_program

# A file has no width; this is the width of the widest table.
err = Console(stderr=True, width=None if sys.stderr.isatty() else 180, highlight=False)
RESULTS = ROOT / "docs" / "results"
# By heading, which has the unit. None: not measured.
Row: TypeAlias = dict[str, str | int | float | None]


class Result(msgspec.Struct, kw_only=True):
    """A result file.

    Attributes:
        command: that measured it.
        model: under test.
        machine: what the figures depend on.
        is_transcribed: the figures were copied from a page, since the machine is not at hand.
    """

    command: str
    model: str
    commit: str
    date: str
    machine: str
    is_transcribed: bool = False
    rows: list[Row]


def record(name: str, document: Document, rows: Sequence[Row]) -> None:
    """
    Raises:
        StartError: the figures are not to be quoted.
    """
    if document.is_quick:
        raise StartError("--record: a quick run is not recorded.")
    machine = document.machine
    described = f"{machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB"
    versions = ", ".join(f"{package} {version}" for package, version in document.versions.items())
    busy = f"other processes used {machine.others_share_of_cores:.0%} of the cores"
    commit = run_program(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, check=True).stdout.strip()
    result = Result(
        command=re.sub(r"/\S*/", "", document.command),  # of paths the last part, as anywhere
        model=document.model,
        commit=commit,
        date=document.started_at[:10],
        machine=f"{described}; {versions}; {busy}",
        rows=list(rows),
    )
    (RESULTS / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def table(name: str) -> str:
    """The table of a result file in Markdown, and where its figures are from.

    Args:
        name: of the file; after it, each with "; " before it, the headings of the columns to show.
    """
    name, *columns = name.split("; ")
    result = read(name)
    source = f"`{result.command}`; {result.model}; commit {result.commit}, {result.date}; {result.machine}"
    return f"{markdown(result.rows, columns)}\n\n*{source}{'; transcribed' * result.is_transcribed}.*"


def markdown(rows: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """The rows in Markdown.

    Args:
        columns: headings of those to show; none: all.
    """
    columns = columns or list(rows[0])
    head, *lines = (
        f"| {' | '.join(line)} |" for line in (columns, *([cell(row[name]) for name in columns] for row in rows))
    )
    return "\n".join([head, "|---" * len(columns) + "|", *lines])


def read(name: str) -> Result:
    """
    Raises:
        FileNotFoundError: there is no such result.
    """
    return msgspec.json.decode((RESULTS / f"{name}.json").read_bytes(), type=Result)


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    """The rows on a terminal: those that follow each other and have the same headings share a table."""
    for headings, own in groupby(rows, key=tuple):
        found = Table()
        for heading in headings:
            found.add_column(heading)
        for row in own:
            # `Text`, because a model may write square brackets, which rich would read as markup.
            found.add_row(*(Text(cell(value)) for value in row.values()))
        yield found


def cell(value: str | int | float | None) -> str:
    """Three significant digits of a fraction."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else value or ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
