"""`tercet bench samples`: what an editor would show for everyday openings, to be read by a person.

No figure tells word salad from a sentence. Ten openings, five suggestions each, from the real gateway, always with the
same seeds, so that two checkpoints or two settings are read side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deploy.bench.harness.options import Options, progress
from deploy.bench.harness.report import Document
from deploy.bench.harness.server import ROOT, Server
from shared.errors import StartError

OPENINGS = ROOT / "workers" / "training" / "openings.txt"
NUM_SUGGESTIONS = 5
SEEDS_APART = 100  # further than a request's branches and those that replace them


class Sample(msgspec.Struct, frozen=True):
    """An opening and what was suggested, best first."""

    opening: str
    suggestions: list[str]


class SamplesBench:
    """Asks for each opening once."""

    def __init__(self, options: Options, fields: Mapping[str, Any], console: Console) -> None:
        """
        Args:
            fields: of each request, as in `POST /autocomplete`.
        """
        self._options, self._fields, self._console = options, fields, console

    def run(self, document: Document) -> None:
        """Fills in the document's rows, `Sample` each.

        Raises:
            StartError: the server gave no suggestions for an opening.
        """
        openings = OPENINGS.read_text(encoding="utf-8").splitlines()
        fields = {"n_samples": NUM_SUGGESTIONS, **self._fields}
        with self._console.status("Starting a server to read …"):
            server = Server(self._options.models, self._options.server_settings)
        document.workload = {"fields": fields}
        with (
            server,
            httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
            progress(self._console, "Writing", len(openings)) as turn,
        ):
            for number, opening in enumerate(openings):
                turn(opening)
                seed = self._options.seed + SEEDS_APART * number
                response = client.post("/autocomplete", json={"context": opening, "seed": seed, **fields})
                if response.status_code != httpx.codes.OK:
                    raise StartError(f"No suggestions for {opening!r}: {response.text}")
                values = [one["value"] for one in response.json()["sentences"]]
                document.rows.append(Sample(opening, values))


def table(rows: Sequence[Sample]) -> Table:
    found = Table("opening", "suggestions", title="What the editor would show", show_lines=True)
    for row in rows:
        # Not markup: a model may write square brackets.
        found.add_row(Text(row.opening), Text("\n".join(f"…{_on_a_line(one)}" for one in row.suggestions)))
    return found


def _on_a_line(text: str) -> str:
    """A space at the beginning stays: a suggestion without one goes on inside the opening's last word."""
    return " / ".join(line for line in text.split("\n") if line)
