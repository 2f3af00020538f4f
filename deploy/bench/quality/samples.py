"""`tercet bench samples`: suggestions for everyday openings, for a person to read.

No figure distinguishes word salad from a sentence. Ten openings, five suggestions each, through the real gateway and
always with the same seeds, so that two checkpoints or two settings can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.load.options import Options
from deploy.load.report import Document
from deploy.load.run import progress, start_server
from deploy.load.server import ROOT
from shared.errors import StartError

OPENINGS = ROOT / "workers" / "training" / "openings.txt"
NUM_SUGGESTIONS = 5
SEEDS_APART = 100  # further than a request's branches and those that replace them


class Sample(msgspec.Struct, frozen=True):
    """An opening and its suggestions, best first."""

    opening: str
    suggestions: list[str]


class SamplesBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, fields: Mapping[str, Any], console: Console) -> None:
        """
        Args:
            fields: of each request, as in `POST /autocomplete`.
        """
        self._options, self._fields, self._console = options, fields, console

    def run(self, document: Document) -> None:
        """
        Raises:
            StartError: the server returned no suggestions for an opening.
        """
        openings = OPENINGS.read_text(encoding="utf-8").splitlines()
        fields = {"n_samples": NUM_SUGGESTIONS, **self._fields}
        document.workload = {"fields": fields}
        with (
            start_server(self._console, self._options.models, self._options.server_settings) as server,
            httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
            progress(self._console, "Openings", len(openings)) as turn,
        ):
            for number, opening in enumerate(openings):
                turn(opening)
                seed = self._options.seed + SEEDS_APART * number
                response = client.post("/autocomplete", json={"context": opening, "seed": seed, **fields})
                if response.status_code != httpx.codes.OK:
                    raise StartError(f"No suggestions for {opening!r}: {response.text}")
                suggestions = [sentence["value"] for sentence in response.json()["sentences"]]
                document.rows.append(Sample(opening, suggestions))


def samples_table(rows: Sequence[Sample]) -> Table:
    table = Table("opening", "suggestions", title="What the editor would show", show_lines=True)
    for row in rows:
        # `Text`, because a model may write square brackets, which rich would read as markup.
        suggestions = "\n".join(f"…{_on_one_line(suggestion)}" for suggestion in row.suggestions)
        table.add_row(Text(row.opening), Text(suggestions))
    return table


def _on_one_line(text: str) -> str:
    """Line breaks become " / ". A leading space is kept: without it, a suggestion completes the opening's last word."""
    return " / ".join(line for line in text.split("\n") if line)
