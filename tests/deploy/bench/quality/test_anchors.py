"""The anchors of keystroke savings."""

from __future__ import annotations

from deploy.bench.quality.anchors import (
    Ngrams,
    cached_trigram_suggestions,
    trigram_suggestions,
    word_suggestions,
)
from deploy.bench.quality.writers import write_by_literature
from deploy.load.passages import Passage

CORPUS = ["the old man sat. the old man slept. the old mat lay. the young man sat.", "an old map. the sea"]


def passage(text: str, start: int = 0) -> Passage:
    return Passage("f", text, start, len(text), ())


def test_scores_back_off_to_shorter_contexts() -> None:
    """ "man" follows "the old" 2 times of 3, and "old" 2 times of 4. It does not follow "young old": 2 of 4 times 0.4.
    "so" is unknown, so the longest known context after it is "old". "sea" follows no "old", and is 1 of 26 tokens."""
    ngrams = Ngrams(CORPUS)
    assert ngrams.score(["the", "old"], "man") == 2 / 3
    assert ngrams.score(["so", "old"], "man") == 2 / 4
    assert ngrams.score(["young", "old"], "man") == 0.4 * 2 / 4
    assert ngrams.score(["so", "old"], "sea") == 0.4 / 26
    assert ngrams.score(["the", "old"], "whale") == 0.0


def test_suggestions_are_the_likeliest_words_that_begin_with_what_is_typed() -> None:
    suggest = trigram_suggestions(Ngrams(CORPUS), 3)(passage("the old ma"))
    assert suggest(len("the old ")).suggestions[:2] == ("man", "mat")
    assert suggest(len("the old ma")).suggestions == ("n", "t", "p")
    # A word is not its own completion.
    assert suggest(len("the")).suggestions == ()


def test_n_grams_do_not_cross_texts() -> None:
    assert Ngrams(["a b", "c d"]).score(["b"], "c") == 0.4 / 4


def test_the_cache_adds_words_of_the_document_before_the_position_only() -> None:
    text = "Queequeg sat. Queequeg slept."
    ngrams = Ngrams(CORPUS)
    suggest = cached_trigram_suggestions(ngrams, 3)(passage(text))
    assert suggest(text.rindex("Q") + 1).suggestions == ("ueequeg",)
    assert suggest(1).suggestions == ()
    assert suggest(text.rindex("Q") + 1).suggestions == ("ueequeg",)
    assert trigram_suggestions(ngrams, 3)(passage(text))(1).suggestions == ()


def test_one_key_per_word_is_the_cap_of_single_words() -> None:
    """ "the sea, and": "the " one key, "sea" one, "," and " " one each, "and" one: 5."""
    text = "the sea, and"
    assert write_by_literature(passage(text), word_suggestions(passage(text)), 1).num_keys == 5
