"""`typist`: keystroke savings of a writer of prose unknown to the model, by several rules.

Requests suggestions where the simulated writers (`writers`) want them, for each model from a server of its own.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any, TypeAlias

from deploy.tuning.load.run import progress
from deploy.tuning.load.server import ROOT
from shared.errors import StartError
from tests.bench.quality.keystrokes import Answer, Suggest, Usage, savings, usage_row
from tests.bench.quality.passages import Passage
from tests.bench.quality.suggestions import SEEDS_APART, GatewaySource, gateway_source
from tests.bench.quality.writers import KEY_INTERVAL_MS, PageWriter, Writer, write_by_literature
from tests.bench.results import Row, err
from tests.bench.rounds import percentile
from tests.bench.run import BenchDocument, Options
from workers.text.typography import TYPOGRAPHIC, Speller

RULES = ("literature", "page")
# Kinds of text: the held-out books, and the folders of texts that are typed whole; their sources are beside them.
TEXTS = ROOT / "tests" / "bench" / "quality" / "texts"
KINDS = ("novels", "letters", "documentation", "essays")
PUBLISHED = "For comparison: 8 to 15 %, published for a model fine-tuned on one contact centre's chats."

# Results by rule and number of suggestions on show, for each passage.
_Usages: TypeAlias = dict[tuple[str, int], list[Usage]]


# What the editor requests when the writer thinks: the defaults of its settings (gateway/static/index.html).
IDEA_FIELDS = {"strategy": "idea", "length": 20, "temperature": 0.8, "top_p": 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypistOptions:
    """What is typed, and how.

    Attributes:
        rules: a selection of `RULES`.
        num_samples: suggestions of each request, and on show at most.
        num_writers: writers who type at the same time, each another passage.
        min_usefulness: the editor's threshold, by the rule page (`PageWriter`).
        min_probability: of the requests for predictions, by the rule page; 0 by the others.
        context_chars: characters of each request's context. None for as many as the editor sends.
        fields: fields of each request, as in `POST /autocomplete`.
        idea_fields: fields of the requests for ideas, by the rule page, in place of `IDEA_FIELDS`.
    """

    rules: Sequence[str] = RULES
    num_samples: int = 3
    num_writers: int = 1
    min_usefulness: float = 1.0
    min_probability: float = 0.5
    context_chars: int | None = None
    fields: Mapping[str, Any]
    idea_fields: Mapping[str, Any] = field(default_factory=dict)

    def writers(self, think: Suggest) -> dict[str, Writer]:
        """By rule.

        Args:
            think: ideas at a position, for the rule page.
        """
        # Only live, with predictions at each key, has the editor ideas besides.
        page = PageWriter(self.min_usefulness, think if self.fields.get("strategy") == "predict" else None)
        all_writers: dict[str, Writer] = {"literature": write_by_literature, "page": page}
        return {rule: all_writers[rule] for rule in self.rules}


class TypistBench:
    """One run of one model. `run` adds to the document."""

    def __init__(self, options: Options, typist: TypistOptions, passages: Sequence[Passage]) -> None:
        """
        Args:
            passages: passages to type; those of one file or kind share a row.
        """
        self._options, self._typist, self._passages = options, typist, passages

    def run(self, document: BenchDocument) -> None:
        words = sum(len(passage.text[passage.start : passage.end].split()) for passage in self._passages)
        document.workload = {**asdict(self._typist), "passages": len(self._passages), "words": words}
        document.workload["fields"] = self._fields
        usages, latencies_ms, dtype = self._type_with_tercet()
        files = list(dict.fromkeys(passage.file for passage in self._passages))
        for file in [*files, *(["all"] if len(files) > 1 and not set(files) <= {*KINDS} else [])]:
            own = [index for index, passage in enumerate(self._passages) if file in (passage.file, "all")]
            for rule in self._typist.rules:
                found = [[each[index] for index in own] for (of, _), each in usages.items() if of == rule]
                saved = {f"{number} shown: saved, %": savings(each) for number, each in enumerate(found, 1)}
                row: Row = {"text": file, "rule": rule, "model": f"{self._options.models.partition('=')[0]}, {dtype}"}
                document.rows.append({**row, **saved, **usage_row(sum(found[-1], Usage()))})
        document.notes.append(f"{self._options.models}: {describe_latencies(latencies_ms)}")

    @property
    def _fields(self) -> dict[str, Any]:
        return {"n_samples": self._typist.num_samples, **self._typist.fields}

    def _type_with_tercet(self) -> tuple[_Usages, list[float], str]:
        """The usages, the latencies of all requests in milliseconds, and the dtype that the model was served in."""
        passages = self._passages
        usages: _Usages = {}
        latencies_ms: list[float] = []
        is_over = threading.Event()  # after Ctrl-C or a failed request, no writer sends another
        with (
            gateway_source(self._options, self._fields) as source,
            progress(err, f"Passages, {self._options.models}", len(passages)) as turn,
            ThreadPoolExecutor(self._typist.num_writers) as pool,
        ):
            done = pool.map(partial(self._type, source, is_over), passages, _seeds(passages))
            try:
                for passage, (found, passage_latencies_ms) in zip(passages, done, strict=True):
                    turn(passage.file)
                    for key, usage in found.items():
                        usages.setdefault(key, []).append(usage)
                    latencies_ms += passage_latencies_ms
            finally:
                is_over.set()
        return usages, latencies_ms, source.dtype

    def _type(
        self, source: GatewaySource, is_over: threading.Event, passage: Passage, seeds: Mapping[int, int]
    ) -> tuple[dict[tuple[str, int], Usage], list[float]]:
        """Type a passage by all rules; no position is requested twice."""
        latencies_ms = []

        @cache
        def suggest(position: int, min_probability: float) -> Answer:
            if is_over.is_set():
                raise StartError("The run was stopped.")
            context = passage.context(position, self._typist.context_chars)
            answer = source.suggest(context, seeds[position], min_probability=min_probability)
            latencies_ms.append(answer.latency_ms)
            return answer

        @cache
        def think(position: int) -> Answer:
            return source.suggest(
                passage.context(position), seeds[position], **{**IDEA_FIELDS, **self._typist.idea_fields}
            )

        is_live = self._typist.fields.get("strategy") == "predict"
        probabilities = {"page": self._typist.min_probability} if is_live else {}
        found = {
            (rule, number): write(passage, partial(suggest, min_probability=probabilities.get(rule, 0.0)), number)
            for rule, write in self._typist.writers(think).items()
            for number in range(1, self._typist.num_samples + 1)
        }
        return found, latencies_ms


def read_kind(kind: str, num_texts: int | None, num_words: int | None, rng: random.Random) -> list[Passage]:
    """A folder's texts, each to be typed whole: all of them or this many, all their words or this many."""
    texts = [path.read_text(encoding="utf-8").strip() for path in sorted((TEXTS / kind).glob("*.txt"))]
    chosen = texts if num_texts is None else rng.sample(texts, min(num_texts, len(texts)))
    ends = ([word.end() for word in re.finditer(r"\S+", text)] for text in chosen)
    return [Passage(kind, text, 0, own[:num_words][-1]) for text, own in zip(chosen, ends, strict=True)]


def in_typographic_marks(passage: Passage) -> Passage:
    """The same passage as phones and word processors write it: “ ” ‘ ’ — … in place of plain marks."""

    def written(text: str) -> str:
        speller = Speller(TYPOGRAPHIC, "")
        return speller.feed(text) + speller.finish()

    text, start, end = passage.text, passage.start, passage.end
    return replace(passage, text=written(text), start=len(written(text[:start])), end=len(written(text[:end])))


def _seeds(passages: Sequence[Passage]) -> list[dict[int, int]]:
    """Return the seed of the request at each position of each passage."""
    numbers = itertools.count()
    return [
        {position: SEEDS_APART * next(numbers) for position in range(passage.start, passage.end)}
        for passage in passages
    ]


def describe_latencies(latencies_ms: Sequence[float]) -> str:
    """The number of requests, and how long they took."""
    percentiles = ", ".join(f"p{share} {percentile(latencies_ms, share / 100):.0f} ms" for share in (50, 90, 99))
    late = sum(ms > KEY_INTERVAL_MS for ms in latencies_ms) / len(latencies_ms)
    return f"{len(latencies_ms)} requests: {percentiles}; {late:.1%} arrived after the writer's next key."
