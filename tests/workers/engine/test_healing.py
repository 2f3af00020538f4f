"""A text that begins with what was typed of its first word: any text, any place, any vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.engine.helpers import CHECKPOINT, running_engine
from workers.engine.engine import Engine
from workers.engine.model.loader import LoadedModel
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput
from workers.text.detokenizer import Detokenizer
from workers.text.tokenizer import MAX_TYPED_BYTES, Tokenizer

SENTENCE = "The old man looked at the sea, and said: “They are late; the wind—it's rising.”\n\n  In 1851 it rained. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(CHECKPOINT, 8192)


@pytest.fixture(scope="module")
def engine(embedded: LoadedModel) -> object:
    with running_engine(embedded) as engine:
        yield engine


def generate(
    engine: Engine, tokenizer: Tokenizer, text: str, seed: int = 0, *, is_drafted: bool = True, **params: object
) -> SequenceOutput:
    head, typed = tokenizer.split_typed(text)
    sampling = SamplingParams(**{"max_new_tokens": 4, **params})  # type: ignore[arg-type]
    draft = tuple(tokenizer.encode(typed.decode())) if is_drafted else ()
    request = EngineRequest(tuple(tokenizer.encode(head)), sampling, seed, typed, draft)
    finished = engine.submit(request).result()
    assert finished.error is None
    return finished


def new_text(tokenizer: Tokenizer, typed: bytes, finished: SequenceOutput) -> str:
    detokenizer = Detokenizer(tokenizer, num_forced_bytes=len(typed))
    return "".join([*map(detokenizer.feed, finished.token_ids), detokenizer.finish()])


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("", ""),
        ("The", ""),
        ("Onc", "c"),
        ("the se", " se"),
        ("the sea ", " "),
        ("the sea  ", "  "),
        ("the sea.\n\n", "\n\n"),
        ("the sea,", ","),
        ("“Oh", "Oh"),
        ("it's", "'s"),
        ("in 18", " 18"),
    ],
)
def test_the_last_word_is_taken_up_again(tokenizer: Tokenizer, text: str, typed: str) -> None:
    assert tokenizer.split_typed(text) == (text.removesuffix(typed), typed.encode())


def test_of_a_very_long_word_only_the_end_is(tokenizer: Tokenizer) -> None:
    for word in ("x" * 1000, "я" * 1000, "海" * 1000):
        head, typed = tokenizer.split_typed(f"see {word}")
        assert head + typed.decode() == f"see {word}"
        assert 0 < len(typed) <= MAX_TYPED_BYTES


def test_choices_are_all_that_say_more_and_the_usual_parts(tokenizer: Tokenizer) -> None:
    choices = tokenizer.constraint(b" sea")
    texts = {tokenizer.text_of(token) for token in choices.allowed}
    assert {" sea", " season"} <= texts
    assert all(text.startswith(" sea") for text in texts)
    assert {tokenizer.text_of(token) for token in choices.if_likeliest} >= {" ", " s", " se"}
    assert choices.longer == {token for token in choices.allowed if tokenizer.text_of(token) != " sea"}
    rare = b" zymurg"
    parts = tokenizer.constraint(rare)
    assert tokenizer.encode(" zymurg")[0] in parts.allowed


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=30), st.integers(0, 2**63 - 1), st.sampled_from([0.0, 1.0]), st.integers(0, 3))
def test_any_text_is_gone_on_with(
    engine: Engine, tokenizer: Tokenizer, text: str, seed: int, temperature: float, rank: int
) -> None:
    finished = generate(engine, tokenizer, SENTENCE[:20] + text, seed, temperature=temperature, first_rank=rank)
    _, typed = tokenizer.split_typed(SENTENCE[:20] + text)
    data = b"".join(map(tokenizer.token_bytes, finished.token_ids))
    assert data.startswith(typed)
    sizes = [len(b"".join(map(tokenizer.token_bytes, finished.token_ids[: n + 1]))) for n in range(4)]
    assert finished.num_forced == sum(size <= len(typed) for size in sizes) or finished.num_forced > 4
    num_new = len(finished.token_ids) - finished.num_forced
    assert num_new == 4 or finished.finish_reason == "eos"
    # What is computed with the prompt is a matter of time alone.
    undrafted = generate(
        engine, tokenizer, SENTENCE[:20] + text, seed, temperature=temperature, first_rank=rank, is_drafted=False
    )
    assert (undrafted.token_ids, undrafted.logprobs) == (finished.token_ids, finished.logprobs)


def test_greedy_text_is_that_from_before_the_word_where_it_begins_with_what_was_typed(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    num_compared = 0
    for split in range(1, len(SENTENCE) + 1):
        text = SENTENCE[:split]
        head, typed = tokenizer.split_typed(text)
        free = engine.submit(
            EngineRequest(tuple(tokenizer.encode(head)), SamplingParams(max_new_tokens=12, temperature=0), 0)
        ).result()
        data = b"".join(map(tokenizer.token_bytes, free.token_ids))
        if data.startswith(typed):
            held = generate(engine, tokenizer, text, max_new_tokens=12, temperature=0)
            assert held.token_ids[:12] == free.token_ids
            num_compared += 1
    assert num_compared > 10


def test_siblings_of_a_greedy_text_go_on_in_other_words(engine: Engine, tokenizer: Tokenizer) -> None:
    for text in ("The old man looked at the sea and", "The old man looked at the se", "The old man looked at the "):
        _, typed = tokenizer.split_typed(text)
        texts = [
            new_text(tokenizer, typed, generate(engine, tokenizer, text, temperature=0, first_rank=rank))
            for rank in range(3)
        ]
        assert len(set(texts)) == 3, texts


def test_stops_are_looked_for_in_what_is_new(engine: Engine, tokenizer: Tokenizer) -> None:
    text = "The old man looked at the sea and"
    plain = generate(engine, tokenizer, text, temperature=0, max_new_tokens=8)
    words = new_text(tokenizer, b" and", plain).split()
    stopped = generate(engine, tokenizer, text, temperature=0, max_new_tokens=8, stop=(" and", words[2]))
    assert stopped.finish_reason == "stop"
    detokenizer = Detokenizer(tokenizer, (" and", words[2]), num_forced_bytes=4)
    kept = "".join([*map(detokenizer.feed, stopped.token_ids), detokenizer.finish()])
    assert kept.split() == words[:2]
    assert stopped.num_kept > stopped.num_forced
