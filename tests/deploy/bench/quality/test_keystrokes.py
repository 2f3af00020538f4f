"""Passages, and savings with their confidence intervals."""

from __future__ import annotations

import random

from deploy.bench.quality.keystrokes import Usage, choose_passages, savings_row, trim_context

TEXT = "the old man looked at the sea " * 100


def test_savings_are_a_share_of_the_characters_of_all_passages() -> None:
    usages = [Usage(num_keys=1, num_characters=11), Usage(num_keys=11, num_characters=11)]
    found = savings_row("f", "pause", "tercet", 3, usages)
    assert (found.share, found.num_characters, found.num_keys) == (round(10 / 22, 4), 22, 12)
    assert (found.low, found.high) == (0.0, round(10 / 11, 4))
    assert (found.ratio, found.shown, found.flicker) == (None, None, None)


def test_the_ratio_resamples_passages_in_pairs() -> None:
    """Each passage saves twice as much with more suggestions, so every resample has the ratio 2."""
    one = [Usage(num_keys=9, num_characters=10), Usage(num_keys=6, num_characters=10)]
    three = [Usage(num_keys=8, num_characters=10), Usage(num_keys=2, num_characters=10)]
    found = savings_row("f", "pause", "tercet", 3, three, one)
    assert (found.ratio, found.ratio_low, found.ratio_high) == (2.0, 2.0, 2.0)
    # Here the passages differ: 3 times and twice as much, so 2.2 for the two together.
    more = [Usage(num_keys=7, num_characters=10), Usage(num_keys=2, num_characters=10)]
    found = savings_row("f", "pause", "tercet", 3, more, one)
    assert (found.ratio, found.ratio_low, found.ratio_high) == (2.2, 2.0, 3.0)
    assert savings_row("f", "pause", "tercet", 3, three, [Usage(num_keys=9, num_characters=9)] * 2).ratio is None


def test_shares_of_use_have_their_own_denominators() -> None:
    usage = Usage(
        num_characters=100, num_keys=60, num_moments=50, num_moments_shown=40, num_accepted=10,
        num_accepted_characters=50, num_kept_characters=45, num_accepted_words=15, num_holding=20, num_replaced=5,
    )  # fmt: skip
    found = savings_row("f", "page", "tercet", 3, [usage])
    assert (found.shown, found.accepted, found.flicker, found.words_per_acceptance) == (0.8, 0.25, 0.25, 1.5)
    assert (found.accepted_characters, found.kept_characters) == (0.5, 0.45)


def test_passages_have_whole_words_of_the_length_wanted() -> None:
    by_words = choose_passages({"f": TEXT}, 5, 4, random.Random(0))
    assert {len(passage.positions) for passage in by_words} == {4}
    by_characters = choose_passages({"f": TEXT}, 5, 4, random.Random(0), num_characters=40)
    for passage in by_words + by_characters:
        typed = passage.text[passage.start : passage.end]
        assert typed.endswith(" ")
        assert not typed.startswith(" ")
        assert TEXT[passage.start - 1] == " "
    assert all(40 <= passage.end - passage.start < 40 + len("looked ") for passage in by_characters)


def test_a_context_is_trimmed_as_the_editor_does() -> None:
    """Its start is a multiple of 4,096 characters, so that consecutive requests share a prefix."""
    text = "".join(chr(ord("a") + at % 26) for at in range(20000))
    assert trim_context(text[:8192]) == text[:8192]
    assert trim_context(text[:12287]) == text[:12287]
    assert trim_context(text[:12288]) == text[4096:12288]
    assert trim_context(text) == text[8192:]
