"""Tokenizer, detokenizer and stop strings: whole characters only, and no emitted text is removed later."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import processors

from tests.workers.engine.helpers import CHECKPOINT
from tests.workers.helpers import decode
from workers.text import tokenizer as tokenizer_module
from workers.text.detokenizer import Detokenizer
from workers.text.stop_strings import StopMatcher
from workers.text.tokenizer import END_OF_TEXT, Tokenizer

TOKENIZER = Tokenizer.from_directory(CHECKPOINT, 8192)
SYNTHETIC = Tokenizer.from_directory(CHECKPOINT, 50257)

# Spaces of every kind, contractions, digits, scripts, surrogates, the special token and parts of it.
texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [
                " ",
                "  ",
                "\n",
                "\n\n ",
                "\t",
                "\u00a0",
                "\u2003",
                "'s",
                "'ll",
                "don't",
                " 12,5",
                "x1y",
            ]
        ),
        st.sampled_from(["<|endoftext|>", "<|endof", "text|>", "日本語", "🦉", "é", "\x1f", "\ud83d"]),
        st.sampled_from(["the old man", " sea", " looked", ".", "—", "“"]),
    ),
    max_size=60,
).map("".join)


@given(texts)
def test_decoding_inverts_encoding(text: str) -> None:
    valid = text.encode("utf-8", "replace").decode()
    expected = valid.replace("<|endoftext|>", "")
    assert decode(TOKENIZER, TOKENIZER.encode(text)) == expected


@given(texts, st.integers(0, 2**31))
def test_a_text_encoded_in_parts_has_the_ids_and_starts_of_the_whole(text: str, seed: int) -> None:
    pieces = [piece + " " * (seed % 2) for piece in (text, text[::-1], " x\n") * 9]
    random.Random(seed).shuffle(pieces)
    whole = BpeTokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    whole.post_processor = processors.ByteLevel(trim_offsets=False)
    valid = "".join(pieces).encode("utf-8", "replace").decode()
    expected = whole.encode(valid, add_special_tokens=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PART_CHARS", 1 + seed % 50)
        ids, starts = TOKENIZER.encode_with_starts(valid)
    assert (ids, starts) == (expected.ids, [start for start, _ in expected.offsets])


def test_no_token_stands_for_more_bytes_than_the_longest() -> None:
    assert TOKENIZER.max_token_bytes == max(len(END_OF_TEXT), *(len(TOKENIZER.token_bytes(id_)) for id_ in range(8192)))


def test_special_and_missing_ids() -> None:
    assert SYNTHETIC.eos_id == 0
    assert SYNTHETIC.token_bytes(0) == b""
    assert decode(SYNTHETIC, [9000, 0, 50256]) == " ⟨9000⟩ ⟨50256⟩"
    with pytest.raises(IndexError):
        SYNTHETIC.token_bytes(50257)
    with pytest.raises(ValueError, match="8192"):
        Tokenizer.from_directory(CHECKPOINT, 100)


def test_vocab_and_merges_give_the_same_tokenizer(tmp_path: Path) -> None:
    """Older GPT-2 checkpoints have no tokenizer.json."""
    model = json.loads((CHECKPOINT / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    old = Tokenizer.from_directory(tmp_path, 8192)
    for text in ("The old man's  sea,\n and 日本 <|endoftext|> again", "", " x"):
        assert old.encode(text) == TOKENIZER.encode(text)
    assert old.eos_id == 0


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="merges"):
        Tokenizer.from_directory(tmp_path, 8192)


@given(texts)
def test_text_deltas_are_whole_characters_and_join_to_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER)
    deltas = [*map(detokenizer.feed, ids), detokenizer.finish()]
    assert "".join(deltas) == decode(TOKENIZER, ids)
    assert not any("\ufffd" in delta for delta in deltas) or "\ufffd" in text


def test_an_incomplete_character_is_dropped_at_the_end() -> None:
    ids = [id_ for id_ in range(8192) if TOKENIZER.token_bytes(id_) == b"\xf0"]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.feed(TOKENIZER.encode("a")[0]) == "a"
    assert detokenizer.feed(ids[0]) == ""
    assert detokenizer.finish() == ""


stops = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3)


@given(st.lists(st.text(alphabet="ab\n", max_size=3)), stops, st.booleans())
@example(["ba", "a"], ["a", "baa"], False)  # "a" is complete before "baa" is
def test_the_stream_ends_before_the_first_stop_string(pieces: list[str], stop: list[str], single_line: bool) -> None:
    wanted = [*stop, "\n"] if single_line else stop
    matcher = StopMatcher(stop, single_line=single_line)
    sent = ""
    text = ""  # up to the piece that completes a stop string
    for piece in pieces:
        if not any(stop_string in text for stop_string in wanted):
            text += piece
        sent += matcher.feed(piece.encode()).decode()
        assert matcher.has_stopped == any(stop_string in text for stop_string in wanted)
    sent += matcher.finish().decode()
    starts = [text.find(stop_string) for stop_string in wanted if stop_string in text]
    assert sent == (text[: min(starts)] if starts else text)


def test_a_stop_string_may_begin_inside_a_token_and_a_character() -> None:
    matcher = StopMatcher(["é!"])
    assert matcher.feed(b"caf\xc3") == b"caf"
    assert matcher.feed(b"\xa9") == b""
    assert matcher.feed(b"!x") == b""
    assert matcher.has_stopped
    assert matcher.finish() == b""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher([""])
