"""Where a continuation is cut so that it stands before the text after a gap. `|` is the gap."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.text.gap import MAX_FILLS, NOTHING_MISSING, OTHERS_EVIDENCE, FillScore, fill_probabilities, gap_fills
from workers.text.predicted_words import fill_words


def fills(place: str, text: str, *, is_complete: bool = False) -> list[str]:
    before, _, after = place.partition("|")
    return gap_fills(text, before, after, is_complete=is_complete)


@pytest.mark.parametrize(
    ("place", "text", "expected"),
    [
        # At the ends of words and of the punctuation after them, where a space or a mark follows.
        ("He opened the| and left.", " old door, then", [" old", " old door", " old door,"]),
        ("He opened the |. Then", "old door and left", ["old", "old door", "old door and"]),
        # With the space that is missing before a word, and none before a mark.
        ("He opened the |door.", "old red one", ["old ", "old red "]),
        ("He said |“no”.", "the word twice", ["the ", "the word "]),
        ("He said| 'tis so", " that it", [" that"]),
        # What runs into the text after the gap is cut there, whatever it begins with.
        ("He opened the| and left.", " door and left the room", [" door"]),
        ("He opened the| door. Then", " old door. Then he", [" old"]),
        ("the|. Then he went", " door. Then he came", [" door"]),
        ("the|, and left", " door, and he", [" door"]),
        ("the| door and", " door and left", []),
        ("the |door.", "old door. He", ["old "]),
        # A word may be in both, but not on both sides of the seam; nor a mark.
        ("the| of Spain", " king of France and", [" king", " king of France"]),
        ("the|, then", " end, of it", [" end", " end, of"]),
        # Inside a word, only what makes a word of its parts.
        ("wond|ful day", "erful day in", ["er"]),
        ("wond|ful day", "ered at", []),
        ("wond|ful day", " ful of", []),  # it would only divide the word
        ("He op|door.", "ened the door, and", []),
        # Not past what is no text, nor into the word that it is in.
        ("He| and left", " opened the d\ufffdor and", [" opened", " opened the"]),
        ("He| and left", "\x1b opened", []),
        # Contractions are words.
        ("I| know", " don't care", [" don't"]),
        # Without spaces between words, every letter may be the last.
        ("私の|好き。", "猫はとても", ["猫", "猫は", "猫はと", "猫はとて", "猫はとても"]),
    ],
)
def test_fills(place: str, text: str, expected: list[str]) -> None:
    assert fills(place, text) == expected


def test_the_last_word_of_a_text_that_was_cut_off_is_left_out() -> None:
    assert fills("He| and left", " opened the do") == [" opened", " opened the"]
    assert fills("He| and left", " opened the do", is_complete=True)[-1] == " opened the do"


def test_there_are_few_of_a_long_text() -> None:
    assert len(fills("He| end", " and so on" * 40)) == MAX_FILLS


@given(
    st.text("ab, .\n'猫é", max_size=40), st.text("ab .", max_size=5), st.text("ab, .\n'猫é", min_size=1, max_size=20)
)
def test_a_fill_is_a_beginning_that_does_not_repeat_what_follows(text: str, before: str, after: str) -> None:
    if not after.strip():
        return
    found = gap_fills(text, before, after, is_complete=False)
    assert len(found) == len(set(found))
    for fill in found:
        assert fill.strip()
        assert text.startswith((fill, fill.removesuffix(" ")))
        assert not (len(after.split()) > 1 and fill.endswith(after.strip()))


def test_fills_compete_with_each_other_with_none_and_with_those_that_were_not_found() -> None:
    scores = {
        "": FillScore(NOTHING_MISSING, -20.0),
        "the": FillScore(math.log(0.4), -9.0),
        "the sea": FillScore(math.log(0.1), -6.0),
        "him": FillScore(math.log(0.2), -9.0),
    }
    found = fill_probabilities(scores)
    assert sum(found.values()) < 1
    assert found["the sea"] > found["the"] == pytest.approx(2 * found["him"])
    # 0.4 of first words were not found. After them, the text is less likely than after the best.
    assert found["the sea"] == pytest.approx(
        0.1 / (0.1 + 0.4 * math.exp(OTHERS_EVIDENCE) + (0.4 + 0.2) * math.exp(-3) + 0.3 * math.exp(-14))
    )
    complete = fill_probabilities(scores | {"": FillScore(NOTHING_MISSING, -3.0)})
    assert complete[""] > 0.5
    assert fill_probabilities({}) == {}


def test_a_word_of_a_fill_is_as_probable_as_all_fills_that_begin_with_it() -> None:
    words = fill_words("the sea ", {"": 0.1, "the sea ": 0.3, "the ": 0.2, "there ": 0.1, "the sea and ": 0.1})
    assert [round(math.exp(logprob), 3) for logprob in words.logprobs] == [0.6, 0.4]
    assert words.ends == (3, 7)
    assert words.usefulness == pytest.approx(0.6 * 3 + 0.4 * 4 - 0.6)
    assert fill_words(", ", {", ": 0.5}).ends == (1,)
