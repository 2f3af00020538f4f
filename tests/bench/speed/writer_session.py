"""What the parts of `writer` share: the server under test, prose to write, requests and a result row.

Knows prose, HTTP and the server's log. Does not know which parts exist and what they measure.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.load.clients import Exchange
from tests.bench.rounds import percentile
from tests.bench.run import BenchDocument, Options
from tests.bench.server import MeasuredServer, ThreadConnections, start_server

CONTEXT_CHARS = 1200
MIN_CONTEXT_CHARS = 300
NUM_WARM_UPS = 10
QUICK_SHARE = 0.02
MIN_REPEATS = 4

LogLine = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How the writers of a run write.

    Attributes:
        fields: fields of each request to `POST /autocomplete`, unless a part sets them itself.
        num_writers: writers at once, where a part has several.
        keys_per_s: keys that each writer types per second.
        context_chars: text before a writer's first key.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    num_writers: int = 8
    keys_per_s: float = 8.0
    context_chars: int = MIN_CONTEXT_CHARS


class Part(msgspec.Struct, kw_only=True):
    """One row of a part's table: what was measured, and its figures by heading."""

    part: str
    what: str
    figures: dict[str, float]


class WriterSession:
    """A warm server and the texts that its writers write. Any thread may send requests."""

    def __init__(
        self, server: MeasuredServer, texts: Sequence[str], options: WriterOptions, console: Console, *, is_quick: bool
    ) -> None:
        self.server = server
        self.options = options
        self.console = console
        self._texts = texts
        self._share = QUICK_SHARE if is_quick else 1.0
        self._connections = ThreadConnections(server.port)

    def num_repeats(self, full: int) -> int:
        """How often to measure what a full run measures `full` times."""
        return max(MIN_REPEATS, int(full * self._share))

    def contexts(self, number: int, rng: random.Random) -> list[str]:
        """Random positions at the end of a word, each with up to `CONTEXT_CHARS` of the text before it."""
        contexts: list[str] = []
        while len(contexts) < number:
            text = rng.choices(self._texts, [len(text) for text in self._texts])[0]
            found = re.search(r"(?<=\w)(?=\s)", text[rng.randrange(MIN_CONTEXT_CHARS, len(text)) :])
            if found is not None:
                end = text.index(found.string) + found.start()
                contexts.append(text[max(0, end - CONTEXT_CHARS) : end])
        return contexts

    def passage(self, num_keys: int, rng: random.Random) -> str:
        """The context before a writer's first key, then `num_keys` characters to type."""
        text = rng.choice(self._texts)
        num_chars = self.options.context_chars + num_keys
        start = rng.randrange(0, max(1, len(text) - num_chars))
        return text[start : start + num_chars]

    def request(self, context: str, *, request_id: str = "", **fields: Any) -> Exchange:
        """`POST /autocomplete` on the calling thread's own connection."""
        headers = {"X-Request-Id": request_id} if request_id else {}
        body = {"context": context, **self.options.fields, **fields}
        return self._connections.exchange(body, headers)

    def log_lines(self, event: str) -> dict[str, list[LogLine]]:
        """The server's log lines of one event, by request id."""
        found: dict[str, list[LogLine]] = {}
        for line in self.server.log_lines():
            if line.get("event") == event:
                found.setdefault(line["request_id"], []).append(line)
        return found


def run_parts(
    parts: Sequence[Callable[[WriterSession], list[Part]]],
    options: Options,
    writing: WriterOptions,
    texts: Sequence[str],
    document: BenchDocument,
    console: Console,
) -> None:
    """Start a server and run the parts one after another; their rows go into the document."""
    document.workload = asdict(writing)
    with start_server(console, options.models, {**options.server_settings, "log": "debug"}) as server:
        document.settings |= server.in_effect()
        session = WriterSession(server, texts, writing, console, is_quick=options.is_quick)
        for context in session.contexts(NUM_WARM_UPS, random.Random(1)):
            session.request(context)
        for run_part in parts:
            document.rows += run_part(session)


def latency_figures(samples_ms: Sequence[float]) -> dict[str, float]:
    """Percentiles and the number of samples, by heading."""
    shares = {"p50 ms": 0.5, "p90 ms": 0.9, "p99 ms": 0.99, "max ms": 1.0}
    return {name: percentile(samples_ms, share) for name, share in shares.items()} | {"n": float(len(samples_ms))}


def ends_at_word(sentence: str) -> bool:
    """Whether a sentence ends with a whole word and its punctuation."""
    return re.search(r"\w[^\w\s]*$", sentence) is not None


def part_tables(rows: Sequence[Part], percentages: frozenset[str]) -> list[Table]:
    """A table for each part and set of headings.

    Args:
        percentages: the headings whose figures are shares (0 to 1).
    """
    found: dict[tuple[str, ...], Table] = {}
    for row in rows:
        key = (row.part, *row.figures)
        if key not in found:
            found[key] = Table(row.part, *row.figures)
            for column in found[key].columns[1:]:
                column.justify = "right"
        values = [f"{value:.1%}" if name in percentages else f"{value:,.2f}" for name, value in row.figures.items()]
        found[key].add_row(row.what, *values)
    return list(found.values())
