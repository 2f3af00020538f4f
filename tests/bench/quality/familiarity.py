"""`familiarity`: how well a model knows text of many kinds, by the score that `familiar_only` uses.

Each text is cut at random places, as a writer's cursor would be; the last tokens before it are scored.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.load.prompts import tokenizer_of
from deploy.load.run import progress
from shared.cpu_features import num_cores
from shared.protocol import MAX_SCORED_TOKENS, GenerateRequest
from shared.settings import ModelSpec, Settings
from tests.bench.run import BenchDocument, Options
from workers.checkpoints.resolve import resolve
from workers.codec import Codec
from workers.engine.engine import Engine, EngineConfig
from workers.engine.loader import load_model
from workers.prompt_score import prompt_score, scoring_request
from workers.text.token_healing import TokenHealing

TEXTS = Path(__file__).with_name("texts")
KNOWN = ("letters", "documentation", "essays")
NUM_PLACES = 200
QUICK_PLACES = 20
CONTEXT_CHARS = 300  # more than the scored tokens have


class FamiliarityRow(msgspec.Struct, kw_only=True, frozen=True):
    """Scores of one kind of text, in nats per character, and the share of places that get no suggestion."""

    kind: str
    num_places: int
    low: float  # 1st percentile
    median: float
    high: float  # 99th percentile
    refused: float


def read_kinds(novels: Mapping[str, str]) -> dict[str, list[str]]:
    """The texts of each kind: those in the model's language first."""
    kinds = {"novels": list(novels.values())} if novels else {}
    kinds |= {kind: [path.read_text("utf-8") for path in sorted((TEXTS / kind).glob("*.txt"))] for kind in KNOWN}
    return kinds | {path.stem: [path.read_text("utf-8")] for path in sorted((TEXTS / "unfamiliar").glob("*.txt"))}


@contextmanager
def running_engine(spec: ModelSpec, cache: Path | None) -> Iterator[tuple[Engine, Codec]]:
    """A warm engine in this process."""
    checkpoint = resolve(spec.name, spec.source, cache=cache)
    tokenizer = tokenizer_of(checkpoint)
    loaded = load_model(Path(checkpoint.directory), dtype="int8", tokenizer=tokenizer)
    config = EngineConfig(num_threads=num_cores(), hang_s=0)
    engine = Engine(config, lambda _: loaded, on_fatal=lambda _: None)
    engine.start()
    while engine.status().state not in {"warm", "failed"}:
        time.sleep(0.01)
    try:
        yield engine, Codec(TokenHealing(tokenizer), loaded.config.n_positions)
    finally:
        engine.stop(0)


def run_familiarity(
    options: Options, novels: Mapping[str, str], document: BenchDocument, console: Console, cache: Path | None
) -> None:
    """Fill the document.

    Raises:
        StartError: the model is not on this machine, or the engine fails.
    """
    rng = random.Random(options.seed)
    settings: Settings = options.load_settings()
    [spec], floor = settings.model.models, settings.model.min_familiarity
    num_places = QUICK_PLACES if options.is_quick else NUM_PLACES
    kinds = read_kinds(novels)
    document.workload = {"places": num_places, "tokens": MAX_SCORED_TOKENS, "min_familiarity": floor}
    with running_engine(spec, cache) as (engine, codec), progress(console, "Kinds of text", len(kinds)) as turn:
        for kind, texts in kinds.items():
            turn(kind)
            scores = []
            for context in _contexts(texts, num_places, rng):
                request = GenerateRequest(
                    prompt=context, max_prompt_tokens=4 * MAX_SCORED_TOKENS, heal=True, score_last=MAX_SCORED_TOKENS
                )
                if (scoring := scoring_request(request, codec, time.monotonic())) is not None:
                    score = prompt_score(codec, scoring, engine.submit(scoring).result())
                    scores += [] if score is None else [score]
            document.rows.append(_row(kind, scores, floor))


def familiarity_table(rows: Sequence[FamiliarityRow]) -> Table:
    table = Table("text", "places", title="Log-probability of a character at the end of a context, in nats")
    for heading in ("1 %", "median", "99 %", "no suggestion"):
        table.add_column(heading, justify="right")
    for row in rows:
        cells = f"{row.low:.2f}", f"{row.median:.2f}", f"{row.high:.2f}", f"{row.refused:.1%}"
        table.add_row(row.kind, str(row.num_places), *cells)
    return table


def _contexts(texts: Sequence[str], number: int, rng: random.Random) -> Iterator[str]:
    for _ in range(number):
        text = rng.choice(texts)
        end = rng.randint(min(len(text), CONTEXT_CHARS) // 2, len(text))
        yield text[max(0, end - CONTEXT_CHARS) : end]


def _row(kind: str, scores: Sequence[float], floor: float) -> FamiliarityRow:
    low, *_, high = statistics.quantiles(scores, n=100, method="inclusive")
    refused = sum(score < floor for score in scores) / len(scores)
    return FamiliarityRow(
        kind=kind,
        num_places=len(scores),
        low=low,
        median=statistics.median(scores),
        high=high,
        refused=round(refused, 4),
    )
