"""Sampling: the right distribution, which depends on the row's code and logits only."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.workers.engine.test_logits_processors import transformers_probabilities
from workers.engine import sampling
from workers.engine.arithmetic_code import MIN_WIDTH, Code, first_code
from workers.engine.cpu.sampler import CpuSampler
from workers.engine.cpu.team import ThreadTeam
from workers.engine.cpu_kernels import load_kernels
from workers.engine.draw import Draw
from workers.engine.logits_processors import process
from workers.engine.request import GeneratedToken, SamplingParams
from workers.text.token_healing import AllowedTokens

VOCAB = 1000
NUM_POINTS = 2000
SampleFn = Callable[[torch.Tensor, list[Draw]], list[GeneratedToken]]


def by_kernel(logits: torch.Tensor, draws: list[Draw]) -> list[GeneratedToken]:
    kernels = load_kernels()
    sampler = CpuSampler(kernels, ThreadTeam(kernels, num_threads=2), logits.shape[1])
    return sampler.sample(logits, range(len(draws)), draws)


@pytest.fixture(params=[sampling.sample, by_kernel], ids=["torch", "kernel"], scope="module")
def sample(request: pytest.FixtureRequest) -> SampleFn:
    """Both implementations: torch, which also serves a GPU, and the CPU's kernel."""
    way: SampleFn = request.param
    return way


def logits_for(seed: int, spread: float = 2.0) -> torch.Tensor:
    return spread * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=50, top_p=0.95),
        SamplingParams(temperature=0.6, top_k=20, top_p=0),
        SamplingParams(temperature=1.2, top_k=0, top_p=0, min_p=0.08),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.95, min_p=0.1),
        SamplingParams(temperature=1.1, top_k=0, top_p=0, typical_p=0.6),
        SamplingParams(temperature=1.4, top_k=64, top_p=0.5),
        SamplingParams(temperature=1.0, top_k=1, top_p=0.9),
        SamplingParams(temperature=0.9, top_k=300, top_p=0.8),
        SamplingParams(temperature=0.8, top_k=0, top_p=0.7),
        SamplingParams(temperature=0.7, top_k=0, top_p=1),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.9, repetition_penalty=1.5),
    ],
    ids=str,
)
def test_a_code_point_draws_the_token_at_its_place_in_transformers_distribution(
    sample: SampleFn, params: SamplingParams
) -> None:
    """The tokens stand one after the other, the likeliest first unless all are candidates."""
    logits = logits_for(1)
    seen = logits.topk(5).indices.tolist()
    expected = transformers_probabilities(logits.double(), params, seen)
    has_order = params.top_k or 0 < params.top_p < 1
    ids = expected.sort(descending=True, stable=True).indices if has_order else torch.arange(VOCAB)
    points = torch.arange(0.5, NUM_POINTS, dtype=torch.float64) / NUM_POINTS
    draws = [Draw(params, 0, 3, Code(point, 1.0), seen) for point in points.tolist()]
    drawn = sample(logits.expand(NUM_POINTS, -1), draws)
    at = torch.searchsorted(expected[ids].cumsum(0), points, right=True)
    assert [step.token_id for step in drawn] == ids[at].tolist()


params_strategy = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 5e-324, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 7, 50, 64, 65, 400]),
    top_p=st.sampled_from([0, 0.3, 0.9, 1]),
    typical_p=st.sampled_from([0, 0.2, 0.95, 1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (7, -100.0))]),
    first_rank=st.sampled_from([0, 2, 100]),
    top_logprobs=st.sampled_from([0, 3]),
)


ALLOWED = AllowedTokens(allowed=(3, 5, 70, 200, 201), if_likeliest=(9,), longer=frozenset({70, 200, 201}))


def some_draw(params: SamplingParams, seed: int) -> Draw:
    constraint = ALLOWED if seed % 3 == 0 else None
    code = first_code(seed)._replace(width=1.0 if seed % 4 else 2 * MIN_WIDTH)
    return Draw(params, seed, seed % 2, code, [1, 2, 3], constraint, is_first=seed % 2 == 0, generated=[2, 3, 3])


@given(st.lists(st.tuples(params_strategy, st.integers(0, 99)), min_size=2, max_size=9))
def test_other_rows_change_no_draw(sample: SampleFn, rows: list[tuple[SamplingParams, int]]) -> None:
    logits = torch.stack([logits_for(seed) for _, seed in rows])
    draws = [some_draw(params, seed) for params, seed in rows]
    together = sample(logits, draws)
    alone = [sample(row[None], [draw])[0] for row, draw in zip(logits, draws, strict=True)]
    assert together == alone


@given(
    params_strategy, st.sampled_from([5e-324, 1e-320, 2.0**-1022, 1e-200, 1e-45]), st.floats(0, 1), st.integers(0, 99)
)
def test_a_vanishing_temperature_draws_the_likeliest_token(
    sample: SampleFn, params: SamplingParams, temperature: float, small: float, seed: int
) -> None:
    """With probability 1, so the code stays as it is; with every other parameter, at the edges of its type too."""
    penalty = max(0.01, 100 * small)
    params = structs.replace(
        params, temperature=temperature, top_p=small, min_p=5e-324 * small, repetition_penalty=penalty
    )
    draw = some_draw(params, seed)
    logits = logits_for(seed)[None]
    (step,) = sample(logits, [draw])
    assert step.token_id == int(process(logits, [draw]).argmax())
    assert step.code == pytest.approx(draw.code, abs=1e-15)
    assert math.isfinite(step.logprob)


def test_equally_likely_tokens_share_a_vanishing_temperature(sample: SampleFn) -> None:
    """As at every temperature above 0."""
    logits = torch.zeros(200, VOCAB)
    logits[:, [17, 400]] = 5.0
    for top_k in (0, 50):
        params = SamplingParams(temperature=5e-324, top_k=top_k)
        drawn = [step.token_id for step in sample(logits, [Draw(params, n, 1, first_code(n)) for n in range(200)])]
        assert set(drawn) == {17, 400}
        assert 90 < drawn.count(17) < 110


def test_score_is_under_the_unmodified_distribution(sample: SampleFn) -> None:
    logits = logits_for(5)
    params = SamplingParams(temperature=0.3, top_k=5, repetition_penalty=2.0, top_logprobs=2)
    (step,) = sample(logits[None], [Draw(params, 1, 0, first_code(1), [3, 4])])
    reference = logits.log_softmax(-1)
    assert step.logprob == pytest.approx(float(reference[step.token_id]), abs=1e-5)
    best = reference.topk(2)
    assert [id_ for id_, _ in step.top] == best.indices.tolist()
    assert [value for _, value in step.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_greedy_takes_the_first_of_equals(sample: SampleFn) -> None:
    """As argmax does; `topk` gives no order to equal values."""
    logits = torch.zeros(2, VOCAB)
    logits[:, [17, 400, 900]] = 5.0
    steps = sample(logits, [Draw(SamplingParams(temperature=0), 0, 0, first_code(0))] * 2)
    assert [step.token_id for step in steps] == [17, 17]


def test_a_conditional_token_is_drawn_only_if_it_is_the_likeliest(sample: SampleFn) -> None:
    greedy = SamplingParams(temperature=0)
    logits = logits_for(12)
    logits[9] = logits.max() + 1
    assert sample(logits[None], [Draw(greedy, 0, 0, first_code(0), constraint=ALLOWED)])[0].token_id == 9
    logits[100] = logits.max() + 1
    allowed = list(ALLOWED.allowed)
    best = allowed[int(logits[allowed].argmax())]
    assert sample(logits[None], [Draw(greedy, 0, 0, first_code(0), constraint=ALLOWED)])[0].token_id == best


def test_a_rank_counts_tokens_with_new_text(sample: SampleFn) -> None:
    logits = torch.zeros(VOCAB)
    logits[[5, 70, 200]] = torch.tensor([3.0, 2.0, 1.0])
    params = [SamplingParams(temperature=0, first_rank=rank) for rank in range(3)]
    # The likeliest carries no new text: all siblings begin with it, and differ after it.
    draws = [Draw(one, 0, 0, first_code(0), constraint=ALLOWED, is_first=True) for one in params]
    assert [step.token_id for step in sample(logits.expand(3, -1), draws)] == [5, 5, 5]
    logits[5] = 0.5
    assert [step.token_id for step in sample(logits.expand(3, -1), draws)] == [70, 200, 5]


@given(st.lists(st.tuples(params_strategy, st.integers(0, 10**6)), min_size=1, max_size=9))
def test_kernel_and_torch_draw_the_same(rows: list[tuple[SamplingParams, int]]) -> None:
    logits = torch.stack([logits_for(seed) for _, seed in rows])
    draws = [some_draw(params, seed) for params, seed in rows]
    ours, theirs = by_kernel(logits, draws), sampling.sample(logits, draws)
    assert [step.token_id for step in ours] == [step.token_id for step in theirs]
    assert [step.logprob for step in ours] == pytest.approx([step.logprob for step in theirs], abs=1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.code == pytest.approx(other.code, abs=1e-6)


@pytest.mark.parametrize("point", [0.0, 1.0])
def test_a_code_at_the_ends_of_its_range_stays_within_the_candidates(sample: SampleFn, point: float) -> None:
    """The last candidate's probability is 0 in float64: not even 1 draws it."""
    params = SamplingParams(temperature=1, top_k=50, top_p=1)
    (step,) = sample(torch.tensor([[1.0, 0.0, -2000.0]]), [Draw(params, 0, 0, Code(point, 1.0))])
    assert step.code is not None
    assert (step.token_id, step.code.point) == (int(point), point)


@pytest.mark.parametrize("vocab", [3, 64, 1000, 1024, 1025, 50257])
def test_equal_logits_are_drawn_alike_for_any_vocabulary_size(vocab: int) -> None:
    params = SamplingParams(temperature=1, top_k=2, top_p=1)
    drawn = by_kernel(torch.zeros(200, vocab), [Draw(params, seed, 1, first_code(seed)) for seed in range(200)])
    assert {step.token_id for step in drawn} == {0, 1}
    assert drawn[0].logprob == pytest.approx(-torch.tensor(float(vocab)).log().item(), abs=1e-4)
