"""Predicted words are compared with the text that follows as whole words, and moments are those of a real engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from deploy.calibrate.predictions import Continuation, judge, read_moments
from deploy.load.passages import Passage
from shared.settings import ModelSpec
from workers.text.predicted_words import rank_predictions

PROSE = Path(__file__).parents[3] / "workers/checkpoints/page.txt"


@pytest.mark.parametrize(
    ("text", "following", "expected"),
    [
        (" the sea was", " the sea was calm", [True, True, True]),
        (" the sea was", " the sea is", [True, True, False]),
        (" the sea was", " these seas", [False, False, False]),
        (" the sea", " the sea's", [True, False]),
        ("n't do, “that", "n't do, “that’ is", [True, True, True]),
        ("n't do", "not do", [False, False]),
        ("e", "e", [True]),
    ],
)
def test_words_are_right_as_a_whole_and_with_all_before_them(text: str, following: str, expected: list[bool]) -> None:
    words = Continuation(text, (len(text),), (-0.001,), is_complete=True).words(1.0)
    assert words is not None
    judged = judge(words, following)
    assert [word.is_right for word in judged] == expected
    assert judged[-1].end == len(words.text) == len(text)


def test_moments_are_predictions_at_each_character() -> None:
    text = PROSE.read_text(encoding="utf-8")
    start = text.index(" ", 700) + 1
    passages = [Passage("page", text, start, start + 4), Passage("page", text, 10, 12)]
    moments = read_moments(ModelSpec("embedded"), passages, 3, Console(quiet=True))
    assert [moment.following[:4] for moment in moments] == [
        text[at : at + 4] for at in (*range(start, start + 4), 10, 11)
    ]
    for moment in moments:
        assert 1 <= len(moment.continuations) <= 3
        assert all(len(one.ends) == len(one.logprobs) for one in moment.continuations)
        assert all(logprob <= 1e-5 for one in moment.continuations for logprob in one.logprobs)
        words = [one.words(1.0) for one in moment.continuations]
        assert rank_predictions(words) == [rank for rank, one in enumerate(words) if one is not None]
