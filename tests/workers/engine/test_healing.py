"""Token healing: the output begins with what was typed of the last word, wherever the context ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.engine.helpers import running_engine
from tests.workers.helpers import healing_of
from workers.engine.draw import draw_of
from workers.engine.engine import Engine
from workers.engine.loader import LoadedModel
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams, SequenceOutput
from workers.engine.sequence import ResultStream, Sequence
from workers.text.detokenizer import Detokenizer
from workers.text.token_healing import MAX_FORCED_BYTES, ForcedPrefix
from workers.text.tokenizer import Tokenizer

SENTENCE = "The old man looked at the sea, and said: “They are late; the wind—it's rising.”\n\n  In 1851 it rained. "


@pytest.fixture(scope="module")
def engine(embedded: LoadedModel) -> object:
    with running_engine(embedded) as engine:
        yield engine


def generate(
    engine: Engine, tokenizer: Tokenizer, text: str, seed: int = 0, *, has_forced_ids: bool = True, **params: object
) -> SequenceOutput:
    head, typed = healing_of(tokenizer).split(text)
    sampling = SamplingParams(**{"max_new_tokens": 4, **params})  # type: ignore[arg-type]
    forced_ids = tuple(tokenizer.encode(typed.decode())) if has_forced_ids else ()
    request = EngineRequest(tuple(tokenizer.encode(head)), sampling, seed, typed, forced_ids)
    finished = engine.submit(request).result()
    assert finished.failure is None
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
def test_the_last_word_becomes_the_forced_prefix(tokenizer: Tokenizer, text: str, typed: str) -> None:
    assert healing_of(tokenizer).split(text) == (text.removesuffix(typed), typed.encode())


def test_of_a_very_long_word_only_the_last_tokens_are_forced(tokenizer: Tokenizer) -> None:
    for word in ("x" * 1000, "я" * 1000, "海" * 1000):
        head, typed = healing_of(tokenizer).split(f"see {word}")
        assert head + typed.decode() == f"see {word}"
        assert 0 < len(typed) <= MAX_FORCED_BYTES


def test_allowed_are_longer_tokens_and_the_parts_that_a_tokenizer_would_choose(tokenizer: Tokenizer) -> None:
    after_sea = healing_of(tokenizer).allowed_tokens(b" sea")
    texts = {tokenizer.text_of(token) for token in after_sea.allowed}
    assert {" sea", " season"} <= texts
    assert all(text.startswith(" sea") for text in texts)
    assert {tokenizer.text_of(token) for token in after_sea.if_likeliest} >= {" ", " s", " se"}
    assert after_sea.longer == {token for token in after_sea.allowed if tokenizer.text_of(token) != " sea"}
    assert after_sea.table.tolist() == [*after_sea.allowed, *after_sea.if_likeliest]
    rare = healing_of(tokenizer).allowed_tokens(b" zymurg")
    assert tokenizer.encode(" zymurg")[0] in rare.allowed


def test_a_forced_prefix_allows_what_is_left_of_it_and_then_any_token(tokenizer: Tokenizer) -> None:
    healing = healing_of(tokenizer)
    parts = tokenizer.encode(" zymurg")
    sizes = [len(tokenizer.token_bytes(part)) for part in parts]
    constraint = ForcedPrefix(healing, b" zymurg")
    for number, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        rest = b" zymurg"[sum(sizes[:number]) :]
        assert constraint.num_forced == number
        assert constraint.allowed_next() == healing.allowed_tokens(rest)
        assert constraint.allowed_next(parts[number:]) is None
        assert constraint.accept(part) == size
    assert constraint.allowed_next() is None
    (new,) = tokenizer.encode(" sea")
    assert constraint.accept(new) == 0
    assert constraint.num_forced == len(parts)


def test_a_token_that_reaches_past_the_forced_prefix_is_new_text(tokenizer: Tokenizer) -> None:
    constraint = ForcedPrefix(healing_of(tokenizer), b" se")
    (sea,) = tokenizer.encode(" sea")
    assert constraint.accept(sea) == len(" se")
    assert constraint.num_forced == 0
    assert constraint.allowed_next() is None


@given(st.text(max_size=30), st.integers(0, 2**63 - 1), st.sampled_from([0.0, 1.0]), st.integers(0, 3))
def test_any_context_is_continued_from_what_was_typed(
    engine: Engine, tokenizer: Tokenizer, text: str, seed: int, temperature: float, rank: int
) -> None:
    finished = generate(engine, tokenizer, SENTENCE[:20] + text, seed, temperature=temperature, first_rank=rank)
    _, typed = healing_of(tokenizer).split(SENTENCE[:20] + text)
    data = b"".join(map(tokenizer.token_bytes, finished.token_ids))
    assert data.startswith(typed)
    sizes = [len(b"".join(map(tokenizer.token_bytes, finished.token_ids[: n + 1]))) for n in range(4)]
    assert finished.num_forced == sum(size <= len(typed) for size in sizes) or finished.num_forced > 4
    num_new = len(finished.token_ids) - finished.num_forced
    assert num_new == 4 or finished.finish_reason == "eos"
    # Prefilling the forced ids saves time and changes nothing else.
    one_by_one = generate(
        engine, tokenizer, SENTENCE[:20] + text, seed, temperature=temperature, first_rank=rank, has_forced_ids=False
    )
    assert (one_by_one.token_ids, one_by_one.logprobs) == (finished.token_ids, finished.logprobs)


def test_greedy_text_that_begins_with_the_forced_prefix_anyway_is_not_changed(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    num_compared = 0
    for split in range(1, len(SENTENCE) + 1, 2):
        text = SENTENCE[:split]
        head, typed = healing_of(tokenizer).split(text)
        free = engine.submit(
            EngineRequest(tuple(tokenizer.encode(head)), SamplingParams(max_new_tokens=12, temperature=0), 0)
        ).result()
        data = b"".join(map(tokenizer.token_bytes, free.token_ids))
        if data.startswith(typed):
            healed = generate(engine, tokenizer, text, max_new_tokens=12, temperature=0)
            assert healed.token_ids[:12] == free.token_ids
            num_compared += 1
    assert num_compared > 10


def test_greedy_siblings_of_different_ranks_differ(engine: Engine, tokenizer: Tokenizer) -> None:
    for text in ("The old man looked at the sea and", "The old man looked at the se", "The old man looked at the "):
        _, typed = healing_of(tokenizer).split(text)
        texts = [
            new_text(tokenizer, typed, generate(engine, tokenizer, text, temperature=0, first_rank=rank))
            for rank in range(3)
        ]
        assert len(set(texts)) == 3, texts


def test_stop_strings_are_looked_for_in_new_text_only(engine: Engine, tokenizer: Tokenizer) -> None:
    text = "The old man looked at the sea and"
    plain = generate(engine, tokenizer, text, temperature=0, max_new_tokens=8)
    words = new_text(tokenizer, b" and", plain).split()
    stopped = generate(engine, tokenizer, text, temperature=0, max_new_tokens=8, stop=(" and", words[2]))
    assert stopped.finish_reason == "stop"
    detokenizer = Detokenizer(tokenizer, (" and", words[2]), num_forced_bytes=4)
    kept = "".join([*map(detokenizer.feed, stopped.token_ids), detokenizer.finish()])
    assert kept.split() == words[:2]
    assert stopped.num_kept > stopped.num_forced


def test_penalties_count_neither_the_prompt_nor_what_was_typed(tokenizer: Tokenizer) -> None:
    """Of these only the repetition penalty sees the prompt, too."""
    params = SamplingParams(9, repetition_penalty=1.2, frequency_penalty=0.5)
    forced_ids = tuple(tokenizer.encode(" sea"))
    request = EngineRequest((5, 6), params, 0, b" sea", forced_ids)
    sequence = Sequence(request, ResultStream(), start_id=0, healing=healing_of(tokenizer))
    for token_id in (*forced_ids, 40, 41):
        sequence.append(GeneratedToken(token_id, -1.0), (), 0.0)
    draw = draw_of(sequence)
    assert (draw.seen, draw.generated) == ((5, 6, *forced_ids, 40, 41), (40, 41))
