"""`tercet bench duplicates`: how often two of a request's branches begin alike, before the gateway selects and tops up.

Once with the seeds that the gateway gives to the branches of a request, which are consecutive, and once with seeds far
apart, whose draws are independent. Knows an engine; does not know the gateway's selection.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.bench.quality.sources import engine_source
from deploy.load.options import Options
from deploy.load.passages import choose_passages
from deploy.load.report import Document
from deploy.load.run import progress

NUM_BRANCHES = 3
MAX_DRAWN_SEED = 2**53
# The editor's defaults.
FIELDS: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.8, "length": 20}
# Name → the words that are compared; None: the whole text.
STARTS: Mapping[str, int | None] = {"text": None, "first word": 1, "first three words": 3}


class DuplicatesRow(msgspec.Struct, frozen=True):
    """Of one kind of seeds: the share of requests of which two branches begin alike, by what is compared."""

    seeds: str
    num_requests: int
    shares: dict[str, float]


class DuplicatesBench:
    """One run. `run` fills the document."""

    def __init__(
        self, options: Options, texts: Mapping[str, str], num_contexts: int, fields: Mapping[str, Any], console: Console
    ) -> None:
        """
        Args:
            texts: file name → prose.
            num_contexts: of each text.
            fields: of each request, as in `POST /autocomplete`.
        """
        self._options, self._texts, self._num_contexts, self._console = options, texts, num_contexts, console
        self._fields = {**FIELDS, **fields}

    def run(self, document: Document) -> None:
        """
        Raises:
            StartError: the engine failed to continue a context.
        """
        rng = random.Random(self._options.seed)
        passages = choose_passages(self._texts, self._num_contexts, 1, rng)
        document.workload = {"contexts": len(passages), "branches": NUM_BRANCHES, "fields": self._fields}
        found: dict[str, list[list[str]]] = {"consecutive": [], "independent": []}
        with (
            engine_source(self._options, self._fields) as source,
            progress(self._console, "Contexts", len(passages)) as turn,
        ):
            for passage in passages:
                turn(passage.file)
                first, *others = (rng.randrange(MAX_DRAWN_SEED) for _ in range(1 + NUM_BRANCHES))
                seeds = [*range(first, first + NUM_BRANCHES), *others]
                texts = source.continuations(passage.context(passage.start), seeds)
                found["consecutive"].append(texts[:NUM_BRANCHES])
                found["independent"].append(texts[NUM_BRANCHES:])
        document.rows = [
            DuplicatesRow(
                name, len(requests), {start: share_of_duplicates(requests, words) for start, words in STARTS.items()}
            )
            for name, requests in found.items()
        ]


def share_of_duplicates(requests: Sequence[Sequence[str]], num_words: int | None) -> float:
    """The share of requests of whose texts two begin with the same `num_words` words, or are equal if that is None."""
    starts = [{tuple(text.split()[:num_words]) for text in texts} for texts in requests]
    return sum(len(one) < len(texts) for one, texts in zip(starts, requests, strict=True)) / len(requests)


def duplicates_table(rows: Sequence[DuplicatesRow]) -> Table:
    table = Table("seeds", *STARTS, "requests", title=f"Requests with two of {NUM_BRANCHES} branches alike")
    for row in rows:
        table.add_row(row.seeds, *(f"{100 * row.shares[start]:.1f} %" for start in STARTS), f"{row.num_requests:,}")
    return table
