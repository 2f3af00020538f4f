"""The sticky prompt window: at most `max_tokens`, and its start stays where it is while the document grows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.generation.request import window_text
from shared.text import MAX_CHARS_PER_TOKEN
from tests.workers.helpers import EMBEDDED, decode, with_pre_tokenizer
from workers.checkpoints.gguf_tokenizer import PRE_TOKENIZERS
from workers.text.tokenizer import Tokenizer
from workers.text.window import encode_window

TOKENIZER = Tokenizer.from_directory(EMBEDDED, 8192)
PROSE = (
    "It was a bright morning in the early spring, and the road ran white between the hedges. Nobody had passed "
    "that way since dawn except the postman, who whistled as he went, and an old dog with nothing to do.\n\n"
) * 60


def window(text: str, max_tokens: int) -> list[int]:
    return encode_window(text, max_tokens, TOKENIZER.encode_with_starts)


@given(st.text(max_size=600), st.integers(1, 64))
def test_the_window_is_a_suffix_of_at_most_max_tokens(text: str, max_tokens: int) -> None:
    text = text.encode("utf-8", "replace").decode()
    ids = window(text, max_tokens)
    data = b"".join(map(TOKENIZER.token_bytes, ids))
    assert len(ids) <= max_tokens
    assert text.encode().endswith(data)
    if len(whole := TOKENIZER.encode(text)) <= max_tokens:
        assert ids == whole
    else:
        assert len(ids) >= max_tokens // 2


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(st.text(alphabet="aé1. \n\t'", min_size=60, max_size=600), st.integers(8, 32))
def test_the_window_has_the_tokens_of_the_text_in_it(name: str, text: str, max_tokens: int) -> None:
    tokenizer = Tokenizer(with_pre_tokenizer(name), 8192)
    ids = encode_window(text, max_tokens, tokenizer.encode_with_starts)
    inside = text[len(text) - len(decode(tokenizer, ids)) :]
    if inside[:1].isspace() and not inside[1:2].isspace():  # else it may begin inside a word
        assert ids == tokenizer.encode(inside)


def test_the_start_rarely_moves_while_the_document_grows() -> None:
    max_tokens = 128
    num_moved = 0
    before: list[int] = []
    lengths = []
    ends = [index for index in range(6000) if PROSE[index] == " "]
    for end in ends:
        ids = window(PROSE[:end], max_tokens)
        lengths.append(len(ids))
        num_moved += ids[: len(before)] != before and ids[:8] != before[:8]
        before = ids
    assert num_moved <= len(ends) / 15
    full = lengths[lengths.index(max(lengths)) :]
    assert min(full) >= 0.6 * max_tokens


@pytest.mark.parametrize("text", ["", " ", "a" * 5000, " " * 5000, "漢字" * 2000, "🙂" * 2000, "\n" * 5000])
def test_texts_without_words(text: str) -> None:
    ids = window(text, 100)
    assert len(ids) <= 100
    assert text.encode().endswith(b"".join(map(TOKENIZER.token_bytes, ids)))
    assert ids or not text


@given(st.text(alphabet="ab c\n—é海", max_size=400), st.integers(1, 12))
def test_the_end_that_a_gateway_sends_has_the_same_window(text: str, max_tokens: int) -> None:
    end = window_text(text, max_tokens)
    assert text.endswith(end)
    assert len(end) <= (MAX_CHARS_PER_TOKEN + 2) * max_tokens
    assert window(end, max_tokens) == window(text, max_tokens)


def test_only_the_end_of_a_megabyte_is_encoded() -> None:
    lengths = []

    def encode(text: str) -> tuple[list[int], list[int]]:
        lengths.append(len(text))
        return TOKENIZER.encode_with_starts(text)

    assert len(encode_window(PROSE * 90, 256, encode)) > 128
    assert max(lengths) < 5000
