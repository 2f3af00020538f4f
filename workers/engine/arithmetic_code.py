"""Arithmetic sampling: the code point by which the first tokens of a sequence are drawn.

A token is the one whose interval of the cumulative distribution holds the code point; the point's place within that
interval is the code point of the next token. So one number determines a text, and numbers that are spread out give
texts that are: consecutive seeds, which the branches of a request have, start from points of the golden-ratio sequence.
Each text alone is distributed as with independent uniform numbers, because each point is uniform where its seed is.

Source: Vilnis et al., "Arithmetic sampling: parallel diverse decoding for large language models", ICML 2023,
arXiv:2210.15458. Their points are (b + i/n) mod 1, which a sequence cannot compute from its own seed.

A point serves until the tokens drawn by it are together less likely than MIN_WIDTH; each token after them has a uniform
number of its own. By then the texts of up to 33 consecutive seeds differ, so their points have nothing more to spread;
and each token magnifies the rounding of the logits before it in the place within its interval, which on a GPU, where
logits depend on the other rows in their last bits, would make a seed's text depend on them.

Plain numbers: does not know logits, tokens and tensors; `sampling.pick` computes the intervals.
"""

from __future__ import annotations

from typing import NamedTuple

# Two of n consecutive points of the golden-ratio sequence are at least 1 / (2 n) apart, and points in the same interval
# less than its width.
MIN_WIDTH = 2.0**-6
_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 ÷ golden ratio, made odd


class Code(NamedTuple):
    """The state of a sequence's arithmetic sampling between two draws."""

    point: float  # from 0 to 1: where in the cumulative distribution the next token is
    width: float  # product of the probabilities with which the tokens so far were drawn


def first_code(seed: int) -> Code:
    """The code of a sequence's first draw: the golden-ratio sequence at `seed`, a point in (0, 1).

    The sequence is (seed + 1) · GOLDEN mod 2^64 ÷ 2^64, reduced to 52 bits. It begins at 1, because at 0 it is 0: the
    likeliest token at each draw as long as the point serves.
    """
    return Code(_fraction((seed + 1) * _GOLDEN & _MASK_64), 1.0)


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) that depends on nothing but `seed` and `position`.

    The code point of token `position` where the width is below MIN_WIDTH before it. It is output `position` of
    SplitMix64 started from the mixed seed, reduced to 52 bits. Source: Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014.
    """
    return _fraction(_mix(_mix(seed & _MASK_64) + (position + 1) * _GOLDEN & _MASK_64))


def _fraction(bits: int) -> float:
    """64 random bits as a number in (0, 1)."""
    return ((bits >> 12) + 0.5) * 2.0**-52


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK_64
    return z ^ (z >> 31)
