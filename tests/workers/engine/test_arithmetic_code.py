"""Arithmetic sampling: each seed's text has the distribution of independent draws, and consecutive seeds are spread."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from tests.workers.engine.test_sampling import by_kernel
from workers.engine import sampling
from workers.engine.arithmetic_code import MIN_WIDTH, Code, first_code, uniform
from workers.engine.draw import Draw
from workers.engine.request import SamplingParams

NUM_SEEDS = 20_000
VOCAB = 6
DEPTH = 4  # tokens: before the last, the points of most texts have been replaced
NUM_BRANCHES = 3
WARPED = SamplingParams(temperature=1, top_k=5, top_p=0.9)
FREE = SamplingParams(temperature=1, top_k=50, top_p=1)  # of six tokens
Text = tuple[int, ...]


def next_logits(texts: Sequence[Text]) -> torch.Tensor:
    """[texts, vocab]: logits that depend on all tokens before."""
    return torch.stack([_logits_after(text) for text in texts])


@cache
def _logits_after(text: Text) -> torch.Tensor:
    number = sum(token * VOCAB**place for place, token in enumerate((*text, 1)))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(number))


def draw_texts(seeds: Sequence[int], params: SamplingParams) -> list[Text]:
    """DEPTH tokens of each seed."""
    texts: list[Text] = [()] * len(seeds)
    codes: list[Code | None] = list(map(first_code, seeds))
    for position in range(DEPTH):
        draws = [Draw(params, seed, position, code) for seed, code in zip(seeds, codes, strict=True) if code]
        tokens = by_kernel(next_logits(texts), draws)
        texts = [(*text, token.token_id) for text, token in zip(texts, tokens, strict=True)]
        codes = [token.code for token in tokens]
    return texts


def probabilities(params: SamplingParams) -> dict[Text, float]:
    """Compute each text's probability, token by token in Python."""
    found: dict[Text, float] = {(): 1.0}
    for _ in range(DEPTH):
        longer: dict[Text, float] = {}
        for text, before in found.items():
            probs = next_logits([text])[0].double().softmax(-1).tolist()
            order = sorted(range(VOCAB), key=lambda token: -probs[token])[: params.top_k or VOCAB]
            total = sum(probs[token] for token in order)
            limit = params.top_p if params.top_p < 1 else 2
            kept = [token for n, token in enumerate(order) if sum(probs[other] for other in order[:n]) < limit * total]
            mass = sum(probs[token] for token in kept)
            longer |= {(*text, token): before * probs[token] / mass for token in kept}
        found = longer
    return found


def pvalue(texts: Sequence[Text], params: SamplingParams) -> float:
    """P-value of the texts having their right distribution. Texts below five expected ones share a bin."""
    counts, expected = Counter(texts), probabilities(params)
    assert counts.keys() <= expected.keys()
    common = [text for text, share in expected.items() if share * len(texts) >= 5]
    assert len(common) > 100
    rest = 1 - sum(expected[text] for text in common)
    observed = [*(counts[text] for text in common), len(texts) - sum(counts[text] for text in common)]
    wanted = [*(expected[text] * len(texts) for text in common), rest * len(texts)]
    bins = [(seen, want) for seen, want in zip(observed, wanted, strict=True) if want > 1]
    scale = sum(seen for seen, _ in bins) / sum(want for _, want in bins)
    return float(chisquare([seen for seen, _ in bins], [want * scale for _, want in bins]).pvalue)


@pytest.mark.parametrize("params", [WARPED, FREE], ids=["top-k and top-p", "neither"])
def test_each_branch_has_the_distribution_of_independent_draws(params: SamplingParams) -> None:
    """The requests' seeds are random, as the gateway draws them; the branches of one are consecutive."""
    rng = random.Random(8)
    first_seeds = [rng.randrange(2**53) for _ in range(NUM_SEEDS)]
    for branch in range(NUM_BRANCHES):
        texts = draw_texts([seed + branch for seed in first_seeds], params)
        assert pvalue(texts, params) > 1e-3


@pytest.mark.parametrize("params", [WARPED, FREE], ids=["top-k and top-p", "neither"])
def test_consecutive_seeds_have_it_together(params: SamplingParams) -> None:
    assert pvalue(draw_texts(range(NUM_SEEDS), params), params) > 1e-3


def num_duplicates(texts: Sequence[Text], num_tokens: int) -> int:
    """Requests of NUM_BRANCHES texts of which two begin with the same tokens."""
    starts = [text[:num_tokens] for text in texts]
    return sum(
        len(set(starts[first : first + NUM_BRANCHES])) < NUM_BRANCHES for first in range(0, len(starts), NUM_BRANCHES)
    )


def test_branches_are_equal_less_often_than_with_independent_numbers() -> None:
    """Seeds far apart have independent numbers."""
    rng = random.Random(9)
    spread = [seed + branch for seed in (rng.randrange(2**53) for _ in range(3000)) for branch in range(NUM_BRANCHES)]
    independent = [rng.randrange(2**53) for _ in spread]
    ours, theirs = draw_texts(spread, WARPED), draw_texts(independent, WARPED)
    assert max(probabilities(WARPED).values()) < 0.23  # less than the distance of any two of three points
    assert num_duplicates(ours, DEPTH) == 0 < 50 < num_duplicates(theirs, DEPTH)
    assert num_duplicates(ours, 1) < 0.75 * num_duplicates(theirs, 1)


@given(st.integers(-(2**63), 2**64), st.integers(0, 2000))
def test_points_are_inside_the_open_interval(seed: int, position: int) -> None:
    assert 0 < uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)
    assert 0 < first_code(seed).point < 1
    assert first_code(seed).width == 1


def test_points_of_small_seeds_are_not_near_the_ends() -> None:
    """People type small seeds; at 0 and 1 the likeliest and the rarest token would be drawn again and again."""
    assert all(0.01 < first_code(seed).point < 0.99 for seed in range(33))


@pytest.mark.parametrize("start", [0, 12345, 2**53 - 200])
def test_points_that_may_share_an_interval_are_further_apart_than_it_is_wide(start: int) -> None:
    points = sorted(first_code(start + number).point for number in range(33))
    assert min(after - before for before, after in itertools.pairwise(points)) > MIN_WIDTH


def test_uniform_numbers_of_neighbouring_seeds_and_positions_are_independent() -> None:
    """The three branches of a request have seeds one apart, and draw at the same positions."""
    grid = torch.tensor([[uniform(seed, at) for at in range(200)] for seed in range(200)])
    assert kstest(grid.flatten().numpy(), "uniform").pvalue > 1e-3
    centred = grid - 0.5
    for lagged in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(float(lagged.mean())) < 4 / 12 / lagged.numel() ** 0.5


def test_a_draw_goes_on_inside_its_interval() -> None:
    """Three tokens of probabilities 1/2, 1/3 and 1/6."""
    logits = torch.tensor([[3.0, 2.0, 1.0]]).log()
    params = SamplingParams(temperature=1, top_k=0, top_p=1)  # drawn one by one
    cases = [
        (Code(0.4, 1.0), 0, (0.8, 0.5)),
        (Code(0.75, 1.0), 1, (0.75, 1 / 3)),
        (Code(0.95, 0.5), 2, (0.7, 0.5 / 6)),
        (Code(0.95, 0.06), 2, (uniform(4, 8), 0.01)),
        (Code(0.4, 0.01), 0, (uniform(4, 8), 0.005)),
    ]
    for code, token_id, after in cases:
        (token,) = sampling.sample(logits, [Draw(params, 4, 7, code)])
        assert token.token_id == token_id
        assert token.code == pytest.approx(after, abs=1e-6)


def test_a_greedy_draw_leaves_the_code_as_it_is() -> None:
    greedy, code = SamplingParams(temperature=0), Code(0.3, 0.7)
    draws = [Draw(greedy, 1, 0, code), Draw(FREE, 1, 0, code)]
    for number in (1, 2):  # alone, and among sampled ones
        tokens = sampling.sample(torch.zeros(number, VOCAB), draws[:number])
        assert tokens[0].code == code
    assert tokens[1].code != code
