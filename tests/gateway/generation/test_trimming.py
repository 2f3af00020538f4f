"""Where a completion may end, in one piece and in many, and which are not worth showing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.trimming import Trimmer, clean, fault, is_alike


def pieces_of(text: str) -> list[str]:
    """Like GPT-2's tokens: a word with the space before it, marks by themselves."""
    return re.findall(r" ?\w+| ?[^\w\s]+|\s", text)


def cleaned(text: str, length: int = 0, reason: str = "length") -> str:
    pieces = pieces_of(text)
    ends = [len("".join(pieces[: number + 1])) for number in range(len(pieces))]
    return clean(text, ends, length or len(pieces), reason)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" the sea and the sk", " the sea and the"),
        (" the sea, and the sky,", " the sea, and the sky,"),  # a comma shows that the word has ended
        (" he said it. The man went", " he said it. The man"),  # the sentence ended too early to end there
        (" the old man looked at the sea. The", " the old man looked at the sea."),
        (" the old man looked at the sea.", " the old man looked at the sea."),
        (' the old man said, "Here we are." The', ' the old man said, "Here we are."'),
        (" the old man went to see Mr. Smith and", " the old man went to see Mr. Smith"),
        (" the old man went to see J. Smith and", " the old man went to see J. Smith"),
        (' the old man said, "Is it you?" he', ' the old man said, "Is it you?"'),
        (" the sea—and the sky—an", " the sea—and the sky"),
        (" the sea -- and", " the sea"),
        (" they don'", " they"),
        (" a well-", " a"),
        (" the sea \n\n", " the sea"),
        ("unbeliev", ""),
        ("http://www.example", "http://www"),
        (" 我喜欢看海", " 我喜欢看海"),
        (" x = 3.", " x = 3."),
        (" he paid 3,", " he paid"),  # perhaps 3,000
    ],
)
def test_ends_at_a_word_or_at_a_late_sentence(text: str, expected: str) -> None:
    assert cleaned(text) == expected


@pytest.mark.parametrize("reason", ["eos", "stop"])
def test_what_ended_by_itself_stays(reason: str) -> None:
    assert cleaned(" the sea. And the sk", reason=reason) == " the sea. And the sk"
    assert cleaned(" the sea\n", reason=reason) == " the sea"


def test_tokens_past_the_length_only_finish_a_word() -> None:
    assert clean("vable story it is", [4, 5, 11, 14, 17], 1, "length") == "vable"
    assert clean(" a story it is", [2, 8, 11, 14], 2, "length") == " a story"


MARKS = st.sampled_from([*"abCD .,!-'3é海—", '"', "  ", "\n", "Mr."])
WORDS = st.lists(MARKS, max_size=5).map("".join)


@given(st.lists(WORDS, max_size=12), st.integers(1, 14), st.sampled_from(["length", "deadline", "eos", "stop"]))
def test_nothing_that_was_let_go_is_taken_back(pieces: list[str], length: int, reason: str) -> None:
    cleaner = Trimmer(length)
    released = [cleaner.feed(piece) for piece in pieces]
    released.append(cleaner.finish(reason))
    text = "".join(pieces)
    ends = [len("".join(pieces[: number + 1])) for number in range(len(pieces))]
    assert "".join(released) == cleaner.text == clean(text, ends, length, reason)
    assert text.startswith(cleaner.text)
    assert cleaner.text == cleaner.text.rstrip()


@pytest.mark.parametrize(
    ("text", "context", "expected"),
    [
        (" the the the sea", "He saw", "loop"),
        (" and so it was, and so it was", "He knew", "loop"),
        (" on and on and on and on", "It went", "loop"),
        (" a b a b a b c", "x", "loop"),
        (" ------------", "x", "loop"),
        (" * * * * * * *", "x", "loop"),
        (" the sea and the sky and the", "He looked at the sea and the sky and", "loop"),
        (" and it was", "He saw the sea and", "repeats_context"),
        (" at the sea again", "He looked at the sea", "repeats_context"),
        (" looked at the sea, and went", "He looked at the sea", "loop"),
        (" at the sky", "He looked at the sea", None),
        (' "No, no, no," he said', "He laughed.", None),
        (" on and on and on", "It went", None),
        (" it was. It rained.", "So it was. It", "repeats_context"),
        (" end of it.", "the s", None),
        ("", "the the the the", None),
    ],
)
def test_faults(text: str, context: str, expected: str | None) -> None:
    assert fault(text, context) == expected


def test_alike() -> None:
    assert is_alike(" the sea was calm.", " The sea was calm", 100)
    assert is_alike(" the sea", " the sea was calm and blue", 100)
    assert not is_alike(" the sea", " the seal was calm and blue", 95)
    assert is_alike(" the sea was calm and blue", " the sea was calm and grey", 80)
    assert not is_alike(" the sea was calm and blue", " the sea was calm and grey", 95)
    assert not is_alike(" the sea was calm", " there was no wind", 80)
