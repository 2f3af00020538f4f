"""Marks that a model does not know: plain for the model, and in its output as the writer spells them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.text.typography import PLAIN, TYPOGRAPHIC, Speller, Spelling, Typography

ALL = Typography(PLAIN)
PIECES = st.lists(st.text(st.sampled_from(" abs'\"-.,\n9em"), max_size=6), max_size=8)


def spelled(output: str, before: str) -> str:
    speller = Speller(ALL.spelling(before), before)
    return speller.feed(output) + speller.finish()


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("She said, “I don’t", "She said, \"I don't"),
        ("„Ja“, sagte sie. ‚Nein‘", "\"Ja\", sagte sie. 'Nein'"),
        ("Well… he—no – 1914–18, well‑known", "Well... he--no -- 1914-18, well-known"),
        ("Dear\xa0Ann,\u2003no\u202fno\tno", "Dear Ann, no no no"),
        ("one\r\ntwo\rthree\u2028four", "one\ntwo\nthree\nfour"),
        ("soft\xadly\ufeff, un\u200bbroken", "softly, unbroken"),
        ("é ß 😀 日本 «oui»", 'é ß 😀 日本 "oui"'),
    ],
)
def test_plain_spelling(text: str, plain: str) -> None:
    assert ALL.plain(text) == plain
    assert Typography().plain(text) == text


def test_a_mark_that_the_model_knows_stays() -> None:
    some = Typography("…’")
    assert some.plain("“Well…” isn’t") == "“Well...” isn't"
    assert some.spelling("“Well…” isn’t").ellipsis == "…"


@pytest.mark.parametrize(
    ("before", "output", "expected"),
    [
        ("She said, “I don’t", ' know," and "why--isn\'t it?"', " know,” and “why—isn’t it?”"),
        ("‘I don’t", " know,' he said. 'It's late.'", " know,’ he said. ‘It’s late.’"),
        ("“", '\'Tis late," he said. "In the \'90s..."', "’Tis late,” he said. “In the ’90s…”"),
        ("He said, “I was—", '" she began--"well"--and "so"', "” she began—“well”—and “so”"),
        ("It’s late. ", '"Come," said Tom.\n\n"No.\n\n"And why"', "“Come,” said Tom.\n\n“No.\n\n“And why”"),
        ("„Ich weiß", ' nicht", sagte sie. "Komm."', " nicht“, sagte sie. „Komm.“"),
        ("«Oui», dit-il.", ' "Non."', " «Non.»"),
        ("It was late – he", " knew--it", " knew–it"),
        ("It's late—very", ' late. "No...--"', ' late. "No...—"'),
        ("one\r\ntwo\r\n", "three\n\nfour", "three\r\n\r\nfour"),
        ('“Old,” "new', '" and "newer"', '" and "newer"'),
        ("plain", ' "and" isn\'t -- ...', ' "and" isn\'t -- ...'),
    ],
)
def test_output_is_spelled_as_the_text_before_it(before: str, output: str, expected: str) -> None:
    assert spelled(output, before) == expected


@given(pieces=PIECES, before=st.sampled_from(["“It’s ", "", "‘", "a – b…\r\n"]))
def test_pieces_give_the_same_text_however_it_is_cut(pieces: list[str], before: str) -> None:
    speller = Speller(TYPOGRAPHIC, before)
    parts = [*map(speller.feed, pieces), speller.finish()]
    whole = Speller(TYPOGRAPHIC, before)
    assert "".join(parts) == whole.feed("".join(pieces)) + whole.finish()


@given(pieces=PIECES)
def test_spelling_changes_marks_only(pieces: list[str]) -> None:
    text = "".join(pieces)
    for spelling in (TYPOGRAPHIC, Spelling()):
        speller = Speller(spelling, "")
        assert ALL.plain(speller.feed(text) + speller.finish()) == text
