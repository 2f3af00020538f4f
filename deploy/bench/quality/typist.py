"""`tercet bench typist`: the share of keystrokes that suggestions save a writer of prose that the model never saw.

A simulated writer goes through passages word by word. At each word's start the server is asked; of a suggestion the
writer takes the longest beginning that is what comes, up to the end of a word, if that costs fewer keys than typing it:
one key for the first suggestion, two for the others (an arrow, then Tab). Everything else is typed.

What is asked at a place does not depend on what was taken before it, so one set of answers serves writers who look at
one, two or three suggestions, and writers with less patience.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import httpx
import msgspec
from rich.console import Console
from rich.table import Table

from deploy.bench.harness.options import Options, progress
from deploy.bench.harness.report import Document
from deploy.bench.harness.rounds import percentile
from deploy.bench.harness.server import Server
from gateway.api.autocomplete import DEFAULT_MAX_TOKENS, sampling_of
from gateway.api.schema import AutocompleteRequest
from gateway.generation.request import BranchResult, rank_first_token
from gateway.generation.selection import Selection, SelectionPolicy
from shared.errors import StartError
from shared.protocol import Failed, GenerateRequest
from shared.settings import Settings
from workers.checkpoints.resolve import resolve
from workers.codec import Codec
from workers.engine.request import EngineRequest
from workers.engine.result_stream import ResultStream
from workers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workers.engine.engine import Engine

MAX_SUGGESTIONS = 3
BUDGETS_MS = (50.0, 100.0, 200.0, float("inf"))
CONTEXT_CHARS = 1500
NUM_RESAMPLES = 2000
BATCH = 16  # places that the engine is asked for at once
# What an agent-assist team published for its own fine-tuned model, in chats of one business.
PUBLISHED = "8 to 15 %, published for a model fine-tuned on one contact centre's chats"
_Branch: TypeAlias = tuple[GenerateRequest, EngineRequest, ResultStream]
_WORD_START = re.compile(r"(?<=\s)\S")


class Saved(msgspec.Struct, kw_only=True, frozen=True):
    """One writer's result: the share of all keys that were not pressed, with its 95 % confidence interval (bootstrap
    over passages)."""

    file: str
    num_suggestions: int
    budget_ms: float | None
    share: float
    low: float
    high: float
    num_characters: int


@dataclass(slots=True)
class Passage:
    """A part of a text; `places` are its words' starts in it."""

    file: str
    text: str
    start: int
    end: int
    places: list[int]
    suggestions: dict[int, list[str]] = field(default_factory=dict)
    latency_ms: dict[int, float] = field(default_factory=dict)

    def context(self, place: int) -> str:
        return self.text[max(0, place - CONTEXT_CHARS) : place]


class Source(Protocol):
    """Who suggests."""

    def suggest(self, contexts: Sequence[str], seeds: Sequence[int]) -> list[tuple[list[str], float]]:
        """Of each context: sentences, best first, and milliseconds."""


def choose_passages(texts: Mapping[str, str], num_passages: int, num_words: int, rng: random.Random) -> list[Passage]:
    """`num_passages` of each text, from anywhere but its first words."""
    passages = []
    for file, text in texts.items():
        starts = [found.start() for found in _WORD_START.finditer(text)]
        most = max(1, len(starts) - num_words - 1)
        for _ in range(num_passages):
            first = rng.randrange(min(100, most), most + 1)
            places = starts[first : first + num_words]
            end = starts[first + num_words] if first + num_words < len(starts) else len(text)
            passages.append(Passage(file, text, places[0], end, places))
    return passages


def matching(suggestion: str, text: str) -> int:
    """Characters of the longest beginning of both that ends at the end of a word in both."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(suggestion, text, strict=False))
    most = sum(1 for _ in alike)
    return max((at for at in range(most + 1) if not _is_inside(suggestion, at) and not _is_inside(text, at)), default=0)


def _is_inside(text: str, at: int) -> bool:
    """Whether `at` is inside a word; 0 is not."""
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()


def num_keys(passage: Passage, num_suggestions: int, budget_ms: float) -> int:
    """Keys that a writer presses for a passage who looks at so many suggestions and waits so long for them."""
    keys, at = 0, passage.start
    known = set(passage.places)
    while at < passage.end:
        best, cost = 0, 0
        if at in known and passage.latency_ms[at] <= budget_ms:
            for rank, suggestion in enumerate(passage.suggestions[at][:num_suggestions]):
                length = min(matching(suggestion, passage.text[at:]), passage.end - at)
                price = 1 if rank == 0 else 2
                if length - price > best - cost:
                    best, cost = length, price
        keys += cost or 1
        at += best or 1
    return keys


def saved(passages: Sequence[Passage], file: str, num_suggestions: int, budget_ms: float) -> Saved:
    """The share saved over all passages."""
    pairs = [(num_keys(one, num_suggestions, budget_ms), one.end - one.start) for one in passages]
    rng = random.Random(0)
    shares = [_share(rng.choices(pairs, k=len(pairs))) for _ in range(NUM_RESAMPLES)]
    low, high = percentile(shares, 0.025), percentile(shares, 0.975)
    return Saved(
        file=file,
        num_suggestions=num_suggestions,
        budget_ms=None if budget_ms == float("inf") else budget_ms,
        share=round(_share(pairs), 4),
        low=round(low, 4),
        high=round(high, 4),
        num_characters=sum(number for _, number in pairs),
    )


def _share(pairs: Sequence[tuple[int, int]]) -> float:
    return 1 - sum(keys for keys, _ in pairs) / sum(number for _, number in pairs)


class GatewaySource:
    """The real thing: one request after another, so that latencies are those of one writer."""

    def __init__(self, client: httpx.Client, fields: Mapping[str, Any]) -> None:
        self._client = client
        self._fields = fields

    def suggest(self, contexts: Sequence[str], seeds: Sequence[int]) -> list[tuple[list[str], float]]:
        answers = []
        for context, seed in zip(contexts, seeds, strict=True):
            start = time.perf_counter()
            response = self._client.post("/autocomplete", json={"context": context, "seed": seed, **self._fields})
            ms = 1e3 * (time.perf_counter() - start)
            answers.append(([one["value"] for one in response.json().get("sentences", [])], ms))
        return answers


class EngineSource:
    """The engine in this process, many places at once: the gateway's choosing, no HTTP, nothing topped up."""

    def __init__(self, engine: Engine, translator: Codec, fields: Mapping[str, Any]) -> None:
        self._engine = engine
        self._translator = translator
        self._request = msgspec.convert({"context": "", **fields}, AutocompleteRequest)

    def suggest(self, contexts: Sequence[str], seeds: Sequence[int]) -> list[tuple[list[str], float]]:
        asked = [self._submit(context, seed) for context, seed in zip(contexts, seeds, strict=True)]
        return [(self._choose(context, branches), 0.0) for context, branches in zip(contexts, asked, strict=True)]

    def _submit(self, context: str, seed: int) -> list[_Branch]:
        request = self._request
        found = []
        for number in range(request.n_samples):
            ask = GenerateRequest(
                prompt=context, max_prompt_tokens=request.max_tokens or DEFAULT_MAX_TOKENS, heal=True,
                sampling=rank_first_token(sampling_of(request), number), seed=seed + number, deadline_ms=1e9,
            )  # fmt: skip
            asked = self._translator.request(ask, time.monotonic())
            found.append((ask, asked, self._engine.submit(asked)))
        return found

    def _choose(self, context: str, branches: Sequence[_Branch]) -> list[str]:
        request = self._request
        selection = Selection(
            SelectionPolicy(
                context, request.n_samples, request.length, Settings.load({}).similarity, request.temperature == 0
            )
        )
        for number, (ask, asked, generation) in enumerate(branches):
            done = self._translator.last_line(ask, asked, generation.result())
            if isinstance(done, Failed):
                raise StartError(done.detail)
            selection.add(BranchResult(number, ask.seed, 0, "", done, 0.0))
        return [suggestion.text for suggestion in selection.result().suggestions]


class TypistBench:
    """Asks for every place, then counts keys."""

    def __init__(
        self, options: Options, texts: Mapping[str, str], num_passages: int, num_words: int,
        fields: Mapping[str, Any], console: Console, *, is_engine: bool,
    ) -> None:  # fmt: skip
        """
        Args:
            fields: of each request, as in `POST /autocomplete`.
            is_engine: ask the engine, without latencies, instead of a gateway.
        """
        self._options, self._texts = options, texts
        self._num_passages, self._num_words = num_passages, num_words
        self._fields, self._console, self._is_engine = fields, console, is_engine

    def run(self, document: Document) -> None:
        """Fills in the document's rows, `Saved` each."""
        passages = choose_passages(self._texts, self._num_passages, self._num_words, random.Random(self._options.seed))
        places = [(passage, place) for passage in passages for place in passage.places]
        with ExitStack() as stack:
            source = stack.enter_context(self._engine() if self._is_engine else self._gateway())
            size = BATCH if self._is_engine else 1
            batches = [places[first : first + size] for first in range(0, len(places), size)]
            with progress(self._console, "Typing", len(batches)) as turn:
                for number, batch in enumerate(batches):
                    turn(batch[0][0].file)
                    seeds = [1000 * (number * size + at) for at in range(len(batch))]
                    answers = source.suggest([passage.context(place) for passage, place in batch], seeds)
                    for (passage, place), (sentences, ms) in zip(batch, answers, strict=True):
                        passage.suggestions[place], passage.latency_ms[place] = sentences, ms
        budgets = BUDGETS_MS[-1:] if self._is_engine else BUDGETS_MS
        files = [*self._texts, *(["all"] if len(self._texts) > 1 else [])]
        document.workload = {"fields": dict(self._fields), "passages": self._num_passages, "words": self._num_words}
        document.rows = [
            saved([one for one in passages if file in (one.file, "all")], file, number, budget_ms)
            for file in files
            for budget_ms in reversed(budgets)
            for number in range(1, MAX_SUGGESTIONS + 1)
        ]
        document.notes += [f"Elsewhere: {PUBLISHED}.", *_latencies(passages, is_engine=self._is_engine)]

    @contextmanager
    def _gateway(self) -> Iterator[Source]:
        with self._console.status("Starting a server to measure …"):
            server = Server(self._options.models, self._options.server_settings)
        with server, httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client:
            source = GatewaySource(client, self._fields)
            source.suggest(["Once upon a time there was"] * 10, range(10))
            yield source

    @contextmanager
    def _engine(self) -> Iterator[Source]:
        from workers.engine.engine import Engine, EngineConfig  # torch, which a gateway's writer does without
        from workers.engine.model.loader import load_model

        [spec] = self._options.load_settings().models
        checkpoint = resolve(spec.name, spec.source)
        directory = Path(checkpoint.directory)
        tokenizer = Tokenizer.from_directory(directory, checkpoint.vocab_size)
        loaded = load_model(directory, dtype=self._options.settings.get("dtype", "int8"), tokenizer=tokenizer)
        fatal: list[BaseException] = []
        config = EngineConfig(max_batch=BATCH * 8, num_threads=self._options.num_threads, hang_s=0)
        engine = Engine(config, lambda _: loaded, on_fatal=fatal.append)
        engine.start()
        while engine.status().state not in {"warm", "failed"}:
            time.sleep(0.01)
        try:
            yield EngineSource(engine, Codec(tokenizer, loaded.config.n_positions), self._fields)
        finally:
            engine.stop(0)


def table(rows: Sequence[Saved]) -> Table:
    """A line for each text and patience, a column for each number of suggestions."""
    found = Table("text", "waits for at most", title="Keystrokes saved (95 % confidence interval)")
    for number in range(1, MAX_SUGGESTIONS + 1):
        found.add_column(f"{number} suggestion{'s' * (number > 1)}", justify="right")
    lines: dict[tuple[str, float | None], list[str]] = {}
    for row in rows:
        cells = lines.setdefault((row.file, row.budget_ms), [])
        cells.append(f"{row.share:.1%} ({row.low:.1%}–{row.high:.1%})")
    for (file, budget_ms), cells in lines.items():
        found.add_row(file, "any time" if budget_ms is None else f"{budget_ms:.0f} ms", *cells)
    return found


def _latencies(passages: Sequence[Passage], *, is_engine: bool) -> list[str]:
    if is_engine:
        return []
    all_ms = [ms for passage in passages for ms in passage.latency_ms.values()]
    shares = ", ".join(f"p{100 * share:.0f} {percentile(all_ms, share):.0f} ms" for share in (0.5, 0.9, 0.99))
    return [f"{len(all_ms)} answers: {shares}."]
