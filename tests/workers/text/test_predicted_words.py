"""Predicted words: whole words only, their probabilities, where they end, and how predictions are ranked."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest

from workers.text.predicted_words import PredictedWords, predict_words, rank_predictions


def predict(
    tokens: list[str], logprobs: list[float] | None = None, *, is_complete: bool = False, temperature: float = 1.0
) -> PredictedWords | None:
    logprobs = logprobs or [-0.1] * len(tokens)
    ends = list(accumulate(map(len, tokens)))
    return predict_words("".join(tokens), ends, logprobs, is_complete=is_complete, temperature=temperature)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([" old", " man", " s"], " old man"),
        (["d", " to", " the"], "d to"),
        ([" sa", "iled", " a"], " sailed"),
        ([" don", "'t", " go"], " don't"),
        ([", and", " then", ","], ", and then"),
        ([" home", ".", " He"], " home"),
        ([' home."', " He", " was"], " home"),
        ([" a", "\n\n", "It"], " a"),
        ([" said", " Mr", ".", " Bell"], " said Mr"),
        ([" well", "-", "known", " man"], " well-known"),
        ([" the", " s\ufffd", "a"], " the"),
        ([" the", " sea", "\0", " and"], " the"),
    ],
)
def test_a_prediction_ends_at_a_whole_word_of_its_sentence(tokens: list[str], text: str) -> None:
    words = predict(tokens)
    assert words is not None
    assert words.text == text


@pytest.mark.parametrize(
    "tokens",
    [[" sail"], ["."], ["\n\n", "He", " was"], [" ", "..."], ["\ufffd", "ab", " c"], [" Stra\ufffde", " a"], []],
)
def test_without_a_whole_word_there_is_no_prediction(tokens: list[str]) -> None:
    assert predict(tokens) is None


def test_at_the_end_of_a_text_the_last_word_is_whole() -> None:
    words = predict([" the", " end"], is_complete=True)
    assert words is not None
    assert words.text == " the end"


def test_a_words_probability_is_that_of_all_tokens_up_to_its_end() -> None:
    words = predict([" sa", "iled", " to", " se"], [-1.0, -0.5, -2.0, -9.0])
    assert words is not None
    assert words.logprobs == pytest.approx((-1.5, -3.5))
    expected = math.exp(-1.5) * 7 - math.exp(-1.5) + math.exp(-3.5) * 3
    assert words.usefulness == pytest.approx(expected)


def test_the_temperature_divides_the_log_probabilities() -> None:
    words = predict([" sa", "iled", " to", " se"], [-1.0, -0.5, -2.0, -9.0], temperature=2.0)
    assert words is not None
    assert words.logprobs == pytest.approx((-0.75, -1.75))


def test_a_word_that_would_save_next_to_nothing_is_left_out() -> None:
    words = predict([" old", " man", " and", " s"], [-0.1, -9.0, -0.1, -0.1])
    assert words is not None
    assert words.text == " old"


def test_predictions_have_distinct_first_words_the_likeliest_first() -> None:
    predictions = [
        predict([" old", " man", " s"], [-2.0, -0.1, -0.1]),
        predict([" sea"]),
        predict([" sail", " on", " a"], [-1.0, -0.1, -0.1]),
        predict([" sa", "il", " to", " a"], [-0.4, -0.4, -0.1, -0.1]),
    ]
    assert rank_predictions(predictions) == [3, 0]
