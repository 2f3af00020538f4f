"""Tokenizer, detokenizer and stop strings: whole characters only, and no emitted text is removed later."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers import Tokenizer as BpeTokenizer

from tests.workers.engine.helpers import CHECKPOINT
from tests.workers.helpers import decode, with_pre_tokenizer, write_slow_tokenizer
from workers.checkpoints.gguf_tokenizer import PRE_TOKENIZERS
from workers.text import tokenizer as tokenizer_module
from workers.text.detokenizer import CharacterIndex, Detokenizer, StopMatcher
from workers.text.token_healing import TokenHealing
from workers.text.tokenizer import END_OF_TEXT, Tokenizer

TOKENIZER = Tokenizer.from_directory(CHECKPOINT, 8192)
BYTE_4 = "\u0104"  # what byte-level BPE writes for the byte 0x04
SYNTHETIC = Tokenizer.from_directory(CHECKPOINT, 50257)

# Spaces of every kind, contractions, digits, scripts, surrogates, the special token and parts of it.
texts = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from([" ", "  ", "\n", "\n\n ", "\t", "\u00a0", "\u2003", "'s", "'ll", "don't", " 12,5", "x1y"]),
        st.sampled_from(["<|endoftext|>", "<|endof", "text|>", "日本語", "🦉", "é", "\x1f", "\ud83d"]),
        st.sampled_from(["the old man", " sea", " looked", ".", "—", "“"]),
    ),
    max_size=60,
).map("".join)


@given(texts)
def test_decoding_inverts_encoding(text: str) -> None:
    valid = text.encode("utf-8", "replace").decode()
    assert decode(TOKENIZER, TOKENIZER.encode(text)) == valid.replace("<|endoftext|>", "")
    assert decode(TOKENIZER, TOKENIZER.encode(text, special_as_text=True)) == valid


# Of SmolLM2, with a token of text among them.
ADDED = ["<|im_start|>", "<|im_end|>", "<repo_name>", "<think>", "<|▁é|>"]


def with_added_tokens(name: str = "gpt-2") -> BpeTokenizer:
    bpe = with_pre_tokenizer(name)
    for content in ADDED:
        bpe.add_tokens([AddedToken(content, special=content != "<think>", normalized=False)])
    return bpe


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@pytest.mark.parametrize(
    ("text", "rest"),
    {
        "a<|endoftext|>b": "b",
        "<|im_start|>user\nHi <|im_end|>": "",
        "the <repo_name> <think>": " <think>",
        "<|▁é|>": "",
        "<|im_st art|>": "<|im_st art|>",
    }.items(),
)
def test_what_spells_a_special_token_is_that_token_or_text(name: str, text: str, rest: str) -> None:
    bpe = with_added_tokens(name)
    parsed = bpe.encode(text, add_special_tokens=False).ids
    bpe.encode_special_tokens = True
    as_text = bpe.encode(text, add_special_tokens=False).ids
    tokenizer = Tokenizer(with_added_tokens(name), 8200)
    assert tokenizer.encode(text) == parsed
    assert tokenizer.encode(text, special_as_text=True) == as_text
    assert decode(tokenizer, as_text) == text
    assert (parsed == as_text) == (rest == text)
    assert text[tokenizer.special_end(text) :] == rest


def test_generated_special_tokens_are_no_text() -> None:
    tokenizer = Tokenizer(with_added_tokens(), 8200)
    assert decode(tokenizer, [8192, *TOKENIZER.encode(" sea"), 8194, 8195, 8196, 0]) == " sea<think>"


def test_healing_takes_what_spells_a_special_token_for_text() -> None:
    healing = TokenHealing(Tokenizer(with_added_tokens(), 8200))
    for text in ("the <|endoftext|>", "a<|im_start|>", "<repo_name>"):
        start, typed = healing.split(text)
        assert start + typed.decode() == text
        allowed = healing.allowed_tokens(typed)
        assert not {0, *range(8192, 8200)} & {*allowed.allowed, *allowed.if_likeliest}


def test_no_two_tokens_have_the_same_name() -> None:
    values = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    texts = {9: "bytes:\\xc3", 11: "token_id:7", 13: "bytes:", 15: "�"}
    names = {id_: token for token, id_ in vocab.items()}
    for id_, text in texts.items():
        del vocab[names[id_]]
        vocab[as_byte_characters(text)] = id_
    values["model"]["merges"] = []
    bpe = BpeTokenizer.from_str(json.dumps(values))
    # Runs of spaces, as GPT-NeoX has them; a special token whose name is the text of an ordinary one.
    bpe.add_tokens([AddedToken("  ", normalized=False), AddedToken("é", special=True, normalized=False)])
    vocab_size = 8300  # and ids without a token
    tokenizer = Tokenizer(bpe, vocab_size)
    named = tokenizer.names_of(range(vocab_size))
    all_names = [named.get(id_, tokenizer.text_of(id_)) for id_ in range(vocab_size)]
    assert len(set(all_names)) == vocab_size
    assert {named[id_] for id_ in (9, 11)} == {"token_id:9", "token_id:11"}
    assert not {13, 15, 0} & named.keys()
    assert [all_names[0], all_names[13], all_names[15]] == ["<|endoftext|>", "bytes:", "�"]
    for id_, name in named.items():
        data = tokenizer.token_bytes(id_)
        if name.startswith("bytes:"):
            assert "�" in tokenizer.text_of(id_)
            assert bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) == data


def as_byte_characters(text: str) -> str:
    [(token, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return token


@pytest.mark.parametrize(
    ("parts", "begins"),
    [
        ([b"a", b"\xc3", b"\xa9", b"b"], [0, 1, 1, 2]),
        ([b"\xf0\x9f", b"\xa6", b"\x89 a", b"!"], [0, 0, 0, 3]),
        ([b"a\xe2\x80", b"\x9c\xc3", b"\xa9"], [0, 1, 2]),
        ([b"\xc3", b"a", b"\xa9", b"b"], [0, 1, 2, 3]),  # U+FFFD, a, U+FFFD, b
        ([b"\xc3", b"\xc3", b"\xa9"], [0, 1, 1]),
        ([b"", b"\xc3", b"", b"\xa9", b""], [0, 0, 0, 0, 1]),
    ],
)
def test_a_part_of_a_character_begins_where_the_character_does(parts: list[bytes], begins: list[int]) -> None:
    index = CharacterIndex()
    assert [index.feed(part) for part in parts] == begins
    assert index.num_chars == len(b"".join(parts).decode("utf-8", "replace"))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(texts, st.integers(0, 2**31))
@example("a  1", 0)
@example("so.\n1", 1)
@example("e\u0301 e\u0301", 0)
@example("a_\n\x1cb\x1c\n1\n", 0)
def test_a_text_encoded_in_parts_has_the_ids_and_starts_of_the_whole(name: str, text: str, seed: int) -> None:
    pieces = [piece + " " * (seed % 2) for piece in (text, text[::-1], " x\n", ".\n", "  7 ") * 5]
    random.Random(seed).shuffle(pieces)
    whole = with_pre_tokenizer(name)
    whole.post_processor = processors.ByteLevel(trim_offsets=False)
    valid = "".join(pieces).encode("utf-8", "replace").decode()
    expected = whole.encode(valid, add_special_tokens=False)
    tokenizer = Tokenizer(with_pre_tokenizer(name), 8192)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PART_CHARS", 1 + seed % 50)
        ids, starts = tokenizer.encode_with_starts(valid)
    assert (ids, starts) == (expected.ids, [start for start, _ in expected.offsets])


@pytest.mark.parametrize(
    ("name", "ends"),
    {
        "gpt-2": {"in 2024": " 2024", "The sea.\n": "\n", "a  ": "  ", "don't": "'t"},
        "smollm": {"in 2024": "4", "in 2": "2", "in ": " ", "The sea.\n": "\n", "a wor": " wor"},
        "llama-bpe": {"in 2024": "4", "in 202": "202", "The sea.\n": ".\n", "a wor": " wor"},
        "qwen2": {"in 2024": "4", "The sea.\n": ".\n", "a(wor": "(wor"},
    }.items(),
)
def test_healing_backs_up_to_the_last_word_of_each_pre_tokenizer(name: str, ends: dict[str, str]) -> None:
    tokenizer = Tokenizer(with_pre_tokenizer(name), 8192)
    healing = TokenHealing(tokenizer)
    for text, end in ends.items():
        assert text[tokenizer.last_word_start(text) :] == end
        assert healing.split(f"So {text}") == (f"So {text[: len(text) - len(end)]}", end.encode())
        # The text can be completed: the tokens that the tokenizer itself would choose are allowed.
        assert tokenizer.encode(end)[0] in healing.allowed_tokens(end.encode()).allowed


def test_a_byte_that_the_vocabulary_lacks_keeps_only_its_own_words_from_healing() -> None:
    """SmolLM2 lacks 21 bytes: the check for all 256 turned healing off for every text."""
    values = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    vocab["no text"] = vocab.pop(BYTE_4)
    healing = TokenHealing(Tokenizer(BpeTokenizer.from_str(json.dumps(values)), 8192))
    assert healing.split("The old m") == ("The old", b" m")
    assert healing.split("The old m\x04") == ("The old m\x04", b"")
    assert TokenHealing(TOKENIZER).split("The old m\x04") != ("The old m\x04", b"")


def test_truncation_and_padding_of_a_tokenizer_json_are_ignored(tmp_path: Path) -> None:
    """Scripts set them for training, and transformers saves them."""
    values = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    values["truncation"] = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    values["padding"] = {
        "strategy": {"Fixed": 32},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = Tokenizer.from_directory(tmp_path, 8192)
    for text in ("The old man", "The old man looked at the sea. " * 1000):
        assert tokenizer.encode(text) == TOKENIZER.encode(text)


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": [7, 0]}, None, (7, 0)),
        ({"eos_token_id": 7}, {"eos_token_id": [7, 9]}, (7, 9, 0)),
        ({"eos_token_id": None}, {}, (0,)),
        ({"eos_token_id": 50256}, None, (0,)),  # GPT-2's, with another vocabulary
        (None, None, (0,)),
    ],
)
def test_the_tokens_that_end_a_text(
    config: dict[str, Any] | None, generation: dict[str, Any] | None, ends: tuple[int, ...], tmp_path: Path
) -> None:
    shutil.copy(CHECKPOINT / "tokenizer.json", tmp_path)
    for name, values in (("config.json", config), ("generation_config.json", generation)):
        if values is not None:
            (tmp_path / name).write_text(json.dumps(values))
    tokenizer = Tokenizer.from_directory(tmp_path, 8192)
    assert (tokenizer.end_ids, tokenizer.eos_id) == (ends, 0)


def test_a_tokenizer_without_end_of_text_has_the_checkpoints_end(tmp_path: Path) -> None:
    text = (CHECKPOINT / "tokenizer.json").read_text().replace("<|endoftext|>", "<|im_end|>")
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "config.json").write_text('{"eos_token_id": [0, 5]}')
    tokenizer = Tokenizer.from_directory(tmp_path, 8192)
    assert (tokenizer.end_ids, tokenizer.eos_id, tokenizer.text_of(0)) == ((0, 5), 0, "<|im_end|>")
    assert tokenizer.encode("<|endoftext|>") != [0]
    assert decode(tokenizer, tokenizer.encode("<|endoftext|>")) == "<|endoftext|>"


def test_no_token_stands_for_more_bytes_than_the_longest() -> None:
    assert TOKENIZER.max_token_bytes == max(len(END_OF_TEXT), *(len(TOKENIZER.token_bytes(id_)) for id_ in range(8192)))


def test_special_and_missing_ids() -> None:
    assert SYNTHETIC.eos_id == 0
    assert SYNTHETIC.token_bytes(0) == b""
    assert decode(SYNTHETIC, [9000, 0, 50256]) == " ⟨9000⟩ ⟨50256⟩"
    with pytest.raises(IndexError):
        SYNTHETIC.token_bytes(50257)
    larger = Tokenizer.from_directory(CHECKPOINT, 100)  # than its model
    assert larger.token_bytes(8191) == TOKENIZER.token_bytes(8191)
    assert (larger.unused_ids, SYNTHETIC.unused_ids) == ((), tuple(range(8192, 50257)))


def test_vocab_and_merges_give_the_same_tokenizer(tmp_path: Path) -> None:
    """Older GPT-2 checkpoints have no tokenizer.json."""
    write_slow_tokenizer(tmp_path)
    old = Tokenizer.from_directory(tmp_path, 8192)
    for text in ("The old man's  sea,\n and 日本 <|endoftext|> again", "", " x"):
        assert old.encode(text) == TOKENIZER.encode(text)
    assert old.eos_id == 0


def test_added_tokens_of_a_slow_tokenizer(tmp_path: Path) -> None:
    write_slow_tokenizer(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<speaker>": 8193, "<pad>": 8192}')
    (tmp_path / "special_tokens_map.json").write_text(
        '{"eos_token": "<|endoftext|>", "pad_token": {"content": "<pad>"}}'
    )
    tokenizer = Tokenizer.from_directory(tmp_path, 8194)
    assert tokenizer.encode("<pad>a<speaker>b<|endoftext|>") == [
        8192,
        *TOKENIZER.encode("a"),
        8193,
        *TOKENIZER.encode("b"),
        0,
    ]
    assert (tokenizer.token_bytes(8192), tokenizer.token_bytes(8193)) == (b"", b"<speaker>")
    (tmp_path / "added_tokens.json").write_text('{"<speaker>": 9000}')
    with pytest.raises(ValueError, match="the id 9000, which does not follow the vocabulary"):
        Tokenizer.from_directory(tmp_path, 9001)


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


def test_threads_remember_a_bounded_number_of_words() -> None:
    """The library's own bound would be 10,000 words in each thread: 29 MB here."""
    process = psutil.Process()
    words = [f" {number}" for number in range(100_000, 110_000)]
    tokenizer = Tokenizer.from_directory(CHECKPOINT, 8192)
    with ThreadPoolExecutor(8) as pool:
        all_started = threading.Barrier(8)

        def encode(texts: Sequence[str]) -> None:
            all_started.wait()  # so that each thread gets one call
            for text in texts:
                tokenizer.encode(text)

        list(pool.map(encode, [words[:1]] * 8))
        before = process.memory_info().rss
        list(pool.map(encode, [words] * 8))
        assert process.memory_info().rss - before < 12_000_000
