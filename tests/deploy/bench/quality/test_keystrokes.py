"""The simulated writer and the savings."""

from __future__ import annotations

import math

import pytest

from deploy.bench.quality.keystrokes import Passage, count_keys, keystroke_savings, matching_length


def passage(text: str, suggestions: dict[int, list[str]]) -> Passage:
    positions = [0, *(at + 1 for at, letter in enumerate(text) if letter == " ")]
    return Passage(
        "f", text, 0, len(text), positions, {position: suggestions.get(position, []) for position in positions},
        {position: 40.0 if position == 0 else 90.0 for position in positions},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("suggestion", "text", "length"),
    [
        ("the sea and", "the sea was", 8),
        ("the sea", "the season", 4),
        ("the season", "the sea", 4),
        ("the sea", "the sea", 7),
        ("them", "the", 0),
        ("", "the", 0),
        ("the sea.", "the sea, and", 7),
    ],
)
def test_a_suggestion_matches_up_to_the_end_of_a_word(suggestion: str, text: str, length: int) -> None:
    assert matching_length(suggestion, text) == length


def test_a_writer_accepts_what_takes_the_fewest_keys() -> None:
    text = "the old man looked"
    assert count_keys(passage(text, {}), 3, math.inf) == len(text)
    suggestions = {0: ["thus", "the old man sat"], 12: ["looked"]}
    assert count_keys(passage(text, suggestions), 1, math.inf) == 12 + 1
    # The second suggestion gives "the old man " for two keys.
    assert count_keys(passage(text, suggestions), 2, math.inf) == 2 + 1
    assert count_keys(passage(text, suggestions), 2, 50) == 2 + 6  # the last word's suggestion came too late
    assert count_keys(passage("a b", {0: ["a b"], 2: ["b"]}), 3, math.inf) == 1


def test_savings_are_a_share_of_the_characters_of_all_passages() -> None:
    saving, other = passage("the old man", {0: ["the old man"]}), passage("the old man", {})
    found = keystroke_savings([saving, other], "f", 3, math.inf)
    assert (found.share, found.num_characters) == (round(10 / 22, 4), 22)
    assert found.low <= found.share <= found.high
    assert (found.low, found.high) == (0.0, round(10 / 11, 4))
