"""Trimming, whole and token by token; reasons for rejection; similarity."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.trimming import Trimmer, is_alike, rejection_reason
from tests.gateway.generation.stubs import token_texts


def token_ends(texts: list[str]) -> list[int]:
    return list(accumulate(map(len, texts)))


def trimmed(
    text: str, length: int = 0, reason: str = "length", prompt: str = "", *, keeps_partial_word: bool = False
) -> str:
    ends = token_ends(token_texts(text))
    trimmer = Trimmer(length or len(ends), prompt, keeps_partial_word=keeps_partial_word)
    return trimmer.trim(text, ends, reason)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" the sea and the sk", " the sea"),
        (" the sea and the sk went", " the sea and the sk"),
        (" that she was going to th", " that she was going"),
        (" of the sk", " of the"),  # it has no other end
        (" of the, which was", " of the,"),
        (" he told me that it wa", " he told me"),
        (" he told me about it wa", " he told me about it"),
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
def test_a_completion_ends_at_a_word_or_at_a_late_sentence_end(text: str, expected: str) -> None:
    assert trimmed(text) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("He left.", ' She stayed." "Well,"', " She stayed."),
        ('"He left.', ' She stayed." "Well,"', ' She stayed." "Well,"'),
        ('"Come," he said. "It is', ' late." "Late?', ' late." "Late?'),
        ('He said, "Come', '," and left it', '," and left'),
        ("He went", '," she said', ""),
        ("“Come,” he said", " and left.” She", " and left."),
        ("“Come", ",” he said, “with me.”", ",” he said, “with me.”"),
        ('"He left.\n\nIt was late', ' and dark." He', " and dark."),
        ('"He left.\nIt was late', ' and dark." He', ' and dark."'),
        ("He saw", ' —"Oh," she said', ' —"Oh,"'),
        ("He was 6'", ' 2" tall', " 2"),  # inches are not told from a quotation
    ],
)
def test_a_completion_ends_before_a_quotation_mark_that_closes_nothing(prompt: str, text: str, expected: str) -> None:
    assert trimmed(text, prompt=prompt) == expected


def test_a_completion_that_ended_by_itself_ends_before_such_a_mark_too() -> None:
    assert trimmed(' She stayed." He left', reason="eos", prompt="He left.") == " She stayed."


def test_greedy_text_keeps_its_marks_and_its_last_word() -> None:
    assert trimmed(' stayed." It was', prompt="She", keeps_partial_word=True) == ' stayed." It'


@pytest.mark.parametrize(
    ("text", "length", "expected"),
    [
        (" the sea. She said that it was", 6, " the sea."),
        (" the sea was calm. She said that it was late. He", 7, " the sea was calm."),  # the second would be long
        (" it was late, and so we went to the sea and the", 8, " it was late"),
        (" it was late in the day and we went to the", 6, " it was late in the day"),  # as others are cut
        (' "It is late," he said and went to the sea', 8, ' "It is late,"'),
        ("\n\nIt was late\n\nThe", 6, "\n\nIt was late"),
    ],
)
def test_an_idea_ends_with_a_sentence_or_a_clause(text: str, length: int, expected: str) -> None:
    assert Trimmer(length, is_idea=True).trim(text, token_ends(token_texts(text)), "length") == expected


@pytest.mark.parametrize("reason", ["eos", "stop"])
def test_a_completion_that_ended_by_itself_keeps_its_end(reason: str) -> None:
    assert trimmed(" the sea. And the sk", reason=reason) == " the sea. And the sk"
    assert trimmed(" the sea\n", reason=reason) == " the sea"


def test_a_completion_without_a_whole_word_is_kept_on_request() -> None:
    assert trimmed(" unbeliev") == ""
    assert trimmed(" unbeliev", keeps_partial_word=True) == " unbeliev"
    assert trimmed(" the sk", keeps_partial_word=True) == " the"


def test_tokens_past_the_length_only_complete_a_word() -> None:
    assert Trimmer(1).trim("vable story it is", [4, 5, 11, 14, 17], "length") == "vable"
    assert Trimmer(2).trim(" a story it is", [2, 8, 11, 14], "length") == " a story"


TOKENS = st.lists(st.sampled_from([*"abCD .,!-'3é海—“”", '"', "  ", "\n", "Mr.", " the"]), max_size=5).map("".join)


@given(
    st.lists(TOKENS, max_size=12),
    st.integers(1, 14),
    st.sampled_from(["length", "deadline", "eos", "stop"]),
    TOKENS,
    st.booleans(),
)
def test_streamed_text_is_never_taken_back_and_ends_as_the_whole_text_does(
    texts: list[str], length: int, reason: str, prompt: str, is_idea: bool
) -> None:
    trimmer = Trimmer(length, prompt, is_idea=is_idea)
    released = []
    for text in texts:
        released.append(trimmer.feed(text))
        assert "".join(released) == trimmer.text
    released.append(trimmer.finish(reason))
    whole = "".join(texts)
    trimmed_at_once = Trimmer(length, prompt, is_idea=is_idea).trim(whole, token_ends(texts), reason)
    assert "".join(released) == trimmer.text == trimmed_at_once
    assert whole.startswith(trimmer.text)
    assert trimmer.text == trimmer.text.rstrip()


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
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
        (" the old man with a stick", "The old man looked at", "repeats_context"),
        (" the old man's wife", "The old man looked at", None),
        (" the old woman", "The old man looked at", None),
        (" the dog, which barked", "They saw a dog and", "repeats_context"),
        (" the dog", "They saw a dog when they had come all the way from the town to", None),
        (" end of it.", "the s", None),
        ("", "the the the the", None),
        (" no, no! No; no.", "He said:", "loop"),
        (" at – – the sea", "He looked", None),  # only four marks that stand alone are a loop of words
        ("at the sea", "He looked at t", None),  # the first word goes on in the completion
        ("the old man", "He saw the old man s", None),
        (" the dog in a house", "They saw a dog house and", "repeats_context"),  # all of one side's content words
        (" the dog house in a town", "They saw a dog and", "repeats_context"),
        (" the dog in a house", "They saw old dog and", None),
        ("s the sea", "It i", None),
        ("old man with a stick", "The old man looked at the ", None),
    ],
)
def test_rejection_reasons(text: str, prompt: str, expected: str | None) -> None:
    assert rejection_reason(text, prompt) == expected


@pytest.mark.parametrize(
    ("unit", "is_loop"), [("+", True), ("+-", True), ("+-=", True), ("+-=%", True), ("+-=%#", False)]
)
def test_six_times_the_same_few_characters_are_a_loop(unit: str, *, is_loop: bool) -> None:
    assert rejection_reason(unit * 6, "x") == ("loop" if is_loop else None)
    assert rejection_reason(unit * 5, "x") is None


@pytest.mark.parametrize("size", range(1, 14))
def test_a_phrase_that_comes_again_is_a_loop_unless_the_prompt_alone_repeats_it(size: int) -> None:
    phrase = "".join(f" w{index}" for index in range(size))
    num_times = 3 if size < 4 else 2
    for num_in_prompt in range(num_times + 1):
        reason = rejection_reason(phrase * (num_times - num_in_prompt) + " amber", "It was" + phrase * num_in_prompt)
        assert reason == ("loop" if num_in_prompt < num_times and size <= 12 else None)
    assert rejection_reason(phrase * (num_times - 1) + " amber", "It was") is None


def test_only_the_end_of_a_long_prompt_is_searched() -> None:
    filler = "Of all that he had ever known there was but little left for him to tell us. " * 3
    assert rejection_reason(" we saw the sea", f"We saw the sea. {filler}") is None


@pytest.mark.parametrize(
    ("first", "second", "similarity", "expected"),
    [
        (" the sea was calm.", " The sea was calm", 100, True),
        (" the sea", " the sea was calm and blue", 100, True),
        (" the sea", " the seal was calm and blue", 95, False),
        (" the sea was calm and blue", " the sea was calm and grey", 80, True),
        (" the sea was calm and blue", " the sea was calm and grey", 95, False),
        (" the sea was calm", " there was no wind", 80, False),
        (" the calm sea", " the sea calm", 90, False),  # the order of words counts
        (" abcd", " abce", 75, True),  # 200 × the 3 characters they share / their 8
        (" abcd", " abce", 75.1, False),
        (" …", " the sea", 30, False),  # a text without words begins no other
        (" …", " —", 100, True),
    ],
)
def test_similarity(first: str, second: str, similarity: float, *, expected: bool) -> None:
    assert is_alike(first, second, similarity) == is_alike(second, first, similarity) == expected
