"""Which typographic marks a model does not know is measured once, and decides what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.bench.quality.typist import TEXTS
from tests.workers.helpers import EMBEDDED
from workers.checkpoints.int8_check import PAGE
from workers.checkpoints.typography_check import measured_typography, unknown_marks
from workers.engine.core import ScoreFn, prompt_logprobs
from workers.engine.cpu.runner import CpuRunner
from workers.engine.cpu.team import Interrupt
from workers.engine.loader import load_model
from workers.text.tokenizer import Tokenizer
from workers.text.typography import PLAIN, TYPOGRAPHIC, Speller, Typography

TOKENIZER = Tokenizer.from_directory(EMBEDDED, 8192)
STRAIGHT = [PAGE.read_text("utf-8"), *(path.read_text("utf-8") for path in sorted((TEXTS / "letters").glob("*.txt")))]


@pytest.fixture(scope="module")
def score() -> ScoreFn:
    runner = CpuRunner(load_model(EMBEDDED, dtype="int8"), 1, Interrupt())
    return partial(prompt_logprobs, runner, 1024)


def curly(text: str) -> str:
    speller = Speller(TYPOGRAPHIC, "")
    return speller.feed(text) + speller.finish()


def cost(score: ScoreFn, text: str) -> float:
    """Nats per character."""
    return -sum(score(TOKENIZER.encode(text))) / len(text)


def test_the_embedded_checkpoint_knows_no_mark(score: ScoreFn) -> None:
    assert set(unknown_marks(TOKENIZER, score)) == set(PLAIN)


def test_a_model_for_which_marks_cost_little_knows_them() -> None:
    """A stand-in for GPT-2 and SmolLM2, which no test can fetch: each token costs the same."""
    assert unknown_marks(TOKENIZER, lambda ids: [-0.05] * len(ids)) == []


def test_letters_and_novels_in_curly_spelling_cost_what_they_cost_in_straight_spelling(score: ScoreFn) -> None:
    typography = Typography(unknown_marks(TOKENIZER, score))
    for straight in STRAIGHT:
        as_typed = curly(straight)
        assert cost(score, typography.plain(as_typed)) == pytest.approx(cost(score, straight), abs=0.05)
        if len(straight) > 2000:
            assert cost(score, as_typed) > cost(score, straight) + 0.05  # what the model would lose


def test_it_is_measured_once(tmp_path: Path, score: ScoreFn) -> None:
    def fail(_: Sequence[int]) -> list[float]:
        raise AssertionError

    found = measured_typography(EMBEDDED, TOKENIZER, score, tmp_path)
    again = measured_typography(EMBEDDED, TOKENIZER, fail, tmp_path)
    assert again.plain("“It’s late…”") == found.plain("“It’s late…”") == '"It\'s late..."'
    [kept] = tmp_path.iterdir()
    kept.write_text('["no mark", "…"]')  # of another version
    assert measured_typography(EMBEDDED, TOKENIZER, fail, tmp_path).plain("“It’s late…”") == "“It’s late...”"
