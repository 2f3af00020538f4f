"""Passages, and savings with their confidence intervals."""

from __future__ import annotations

from deploy.bench.quality.keystrokes import Usage, savings_row


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
