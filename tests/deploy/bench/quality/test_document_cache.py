"""`tercet bench cache` without its command: how passages are cut and scored, and what the rows say."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from deploy.bench.quality.document_cache import (
    BASE_WINDOW,
    HISTORIES,
    MIXTURES,
    NO_CACHE,
    IndexCost,
    PassageScores,
    cache_rows,
    count_history,
    passage_words,
    score_passage,
    window_runs,
)
from deploy.bench.quality.ngram_cache import NgramIndex
from deploy.bench.quality.prompt_scorer import PromptScorer
from deploy.bench.quality.replay import PROSE
from deploy.load.options import Options
from deploy.load.passages import Passage, choose_passages, trim_context
from shared.errors import StartError
from shared.protocol import GenerateRequest
from workers.codec import Codec

ALL, MIXTURE = "all of the book", "caps 2, 5, 15, 30 %"
BASE = (BASE_WINDOW, NO_CACHE, NO_CACHE)


@pytest.fixture(scope="module")
def prose() -> str:
    return PROSE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def scorer() -> PromptScorer:
    return PromptScorer(Options(models="embedded"))


def passages_of(text: str, num_words: int) -> list[Passage]:
    return choose_passages({"f": text}, 5, num_words, random.Random(0))


def test_words_are_encoded_as_in_the_whole_text(prose: str, scorer: PromptScorer) -> None:
    tokenizer = scorer.tokenizer
    for passage in passages_of(prose.replace(". ", ".\n\n"), 50):
        words = passage_words(passage)
        assert len(words) == 50
        assert "".join(words) == passage.text[passage.start - 1 : passage.end - 1]
        before, after = passage.text[: passage.start - 1], passage.text[passage.end - 1 :]
        parts = [
            *tokenizer.encode(before),
            *chain.from_iterable(map(tokenizer.encode, words)),
            *tokenizer.encode(after),
        ]
        assert parts == tokenizer.encode(passage.text)


def test_each_word_follows_the_prompt_of_a_request_at_its_start(prose: str, scorer: PromptScorer) -> None:
    """In one paragraph: at a line break, a request's prompt holds it, while the benchmark scores it with the word."""
    tokenizer = scorer.tokenizer
    codec = Codec(tokenizer, 1024)
    for passage in passages_of(prose.replace("\n\n", " "), 100):
        runs = window_runs(passage, 128, tokenizer)
        assert 1 < len(runs) < 10
        scored = [
            ((*prompt_ids, *token_ids[:at]), token_ids[at])
            for prompt_ids, token_ids in runs
            for at in range(len(token_ids))
        ]
        expected = []
        for start, word in zip(passage.positions, passage_words(passage), strict=True):
            request = GenerateRequest(prompt=trim_context(passage.text[:start]), max_prompt_tokens=128, heal=True)
            prompt_ids = codec.request(request, 0.0).prompt_ids
            for token_id in tokenizer.encode(word):
                expected.append((prompt_ids, token_id))
                prompt_ids = (*prompt_ids, token_id)
        assert scored == expected


def test_log_probabilities_do_not_depend_on_where_the_context_ends(prose: str, scorer: PromptScorer) -> None:
    ids = scorer.tokenizer.encode(prose[:1000])
    whole = scorer.logprobs(ids[:50], ids[50:100])
    assert len(whole) == 50
    assert max(whole) < 0
    parts = scorer.logprobs(ids[:50], ids[50:80]) + scorer.logprobs(ids[:80], ids[80:100])
    assert parts == pytest.approx(whole)


def test_a_window_beyond_the_models_context_is_refused(scorer: PromptScorer) -> None:
    with pytest.raises(StartError, match="have 1024 tokens; this model takes 1023"):
        scorer.logprobs([1] * 1000, [1] * 24)


def test_frequencies_are_those_before_each_token() -> None:
    def encode(text: str) -> list[int]:
        return [ord(character) for character in text]

    history, words = "abcabdab", ["ca", "b"]
    frequencies, cost = count_history(history, words, encode)
    expected = []
    for before, character in (("abcabdab", "c"), ("abcabdabc", "a"), ("abcabdabca", "b")):
        index = NgramIndex()
        index.extend(encode(before))
        expected.append(index.frequencies(ord(character)))
    assert frequencies == expected
    assert min(cost.encode_ms, cost.count_ms, cost.bytes_per_token, cost.key_us) > 0


def test_a_repeated_text_is_predicted_from_the_cache_that_holds_it(prose: str, scorer: PromptScorer) -> None:
    [first, *_] = passages_of(prose, 20)
    start, end, *positions = (each + len(prose) for each in (first.start, first.end, *first.positions))
    passage = Passage("f", prose * 2, start, end, tuple(positions))
    scores = score_passage(passage, scorer)
    assert scores.num_characters == passage.end - passage.start
    assert scores.bits[BASE_WINDOW, ALL, MIXTURE] < 0.9 * scores.bits[BASE]
    assert set(scores.index) == set(HISTORIES)
    assert len(scores.bits) == 4 + len(HISTORIES) * len(MIXTURES)


def test_rows_weigh_passages_by_their_bits_and_characters() -> None:
    """40 bits of 80 characters with the base, 33 with the cache; one passage alone: −10 or −20 %."""

    def scores(base_bits: float, bits: float, key_us: float) -> PassageScores:
        index = IndexCost(encode_ms=1, count_ms=2, bytes_per_token=3, key_us=key_us)
        return PassageScores(40, {BASE: base_bits, (256, ALL, MIXTURE): bits}, {256: 5.0}, {ALL: index})

    base, row = cache_rows([scores(10, 9, 1.0), scores(30, 24, 2.0)])
    assert (base.bits_per_character, base.change, base.low, base.high) == (0.5, 0.0, 0.0, 0.0)
    assert (base.prefill_ms, base.index) == (5.0, None)
    assert (row.bits_per_character, row.change, row.low, row.high) == (0.4125, -0.175, -0.2, -0.1)
    assert row.prefill_ms is None
    assert row.index is not None
    assert row.index.key_us == 1.5
