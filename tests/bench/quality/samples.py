"""`typist --openings`: suggestions for everyday openings, for a person to read.

No figure distinguishes word salad from a sentence. Ten openings, five suggestions each, through the real gateway and
always with the same seeds, so that two checkpoints or two settings can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.load.options import Options
from deploy.load.report import Document
from deploy.load.run import progress
from deploy.load.server import ROOT
from tests.bench.quality.suggestions import SEEDS_APART, gateway_source

OPENINGS = ROOT / "workers" / "training" / "openings.txt"
NUM_SUGGESTIONS = 5


class Sample(msgspec.Struct, frozen=True):
    """An opening and its suggestions, best first."""

    opening: str
    suggestions: tuple[str, ...]


def sample_openings(options: Options, fields: Mapping[str, Any], document: Document, console: Console) -> None:
    """Fill the document.

    Args:
        fields: fields of each request, as in `POST /autocomplete`.

    Raises:
        StartError: the server returned no suggestions for an opening.
    """
    openings = OPENINGS.read_text(encoding="utf-8").splitlines()
    document.workload = {"fields": {"n_samples": NUM_SUGGESTIONS, **fields}}
    with (
        gateway_source(options, document.workload["fields"], console) as source,
        progress(console, "Openings", len(openings)) as turn,
    ):
        for number, opening in enumerate(openings):
            turn(opening)
            found = source.suggest(opening, options.seed + SEEDS_APART * number)
            document.rows.append(Sample(opening, found.suggestions))


def samples_table(rows: Sequence[Sample]) -> Table:
    table = Table("opening", "suggestions", title="What the editor would show", show_lines=True)
    for row in rows:
        # `Text`, because a model may write square brackets, which rich would read as markup. A leading space is kept:
        # without it, a suggestion completes the opening's last word.
        lines = ("…" + " / ".join(filter(None, suggestion.split("\n"))) for suggestion in row.suggestions)
        table.add_row(Text(row.opening), Text("\n".join(lines)))
    return table
