"""From logits to tokens: every row drawn by its own parameters, seed and position, nothing else.

Knows logits and `SamplingParams`. Refuses to know models, caches and time; keeps no random state.

The order is transformers': repetition penalty, temperature, top-k, top-p. Top-k comes first and
top-p works inside it, so the vocabulary (50,257 tokens) is never sorted unless top-p is asked for
without top-k. What a row gives does not depend on the rows beside it: the usual rows share one
`topk` of a fixed width, the others are drawn one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.request import GeneratedToken, SamplingParams, TopLogprobs
from workers.text.token_healing import AllowedTokens

# Rows that need no more candidates than this are drawn together. Fixed: were it the batch's largest
# top_k, equal logits could be ordered differently in different company.
NUM_CANDIDATES = 64
_MASK_64 = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row of logits is drawn with."""

    params: SamplingParams
    seed: int
    position: int  # 0 for the first generated token
    seen: Sequence[int] = ()  # prompt and text; read only where repetitions are penalised
    constraint: AllowedTokens | None = None  # None: any token
    is_first: bool = False  # nothing new has been said yet


def uniform(seed: int, position: int) -> float:
    """A number in (0, 1) that depends on nothing but `seed` and `position`.

    It is output `position` of SplitMix64 started from the mixed seed (Steele, Lea, Flood: "Fast
    splittable pseudorandom number generators", OOPSLA 2014), as 52 bits.
    """
    bits = _mix(_mix(seed & _MASK_64) + (position + 1) * _GOLDEN & _MASK_64)
    return ((bits >> 12) + 0.5) * 2.0**-52


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK_64
    return z ^ (z >> 31)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[GeneratedToken]:
    """One token for each row.

    Args:
        logits: [rows, vocab], float32.
        draws: one for each row.
    """
    log_totals = torch.logsumexp(logits, -1)
    shaped = _restrict(_penalise(logits, draws), draws)
    token_ids = _draw(shaped, draws)
    rows = torch.arange(len(draws), device=logits.device)
    chosen = logits[rows, token_ids] - log_totals
    ids: list[int] = token_ids.tolist()
    logprobs: list[float] = chosen.tolist()
    tops = [
        top_logprobs(row, total, draw.params.top_logprobs)
        for row, total, draw in zip(logits, log_totals, draws, strict=True)
    ]
    return [GeneratedToken(*step) for step in zip(ids, logprobs, tops, strict=True)]


def top_logprobs(row: Tensor, log_total: Tensor, number: int) -> TopLogprobs:
    """The `number` likeliest tokens of `row` [vocab] and their log-probabilities."""
    if number == 0:
        return ()
    values, ids = row.topk(min(number, len(row)))
    return tuple(zip(ids.tolist(), (values - log_total).tolist(), strict=True))


def token_logprobs(logits: Tensor, token_ids: Sequence[int]) -> list[float]:
    """The log-probability of each row's token by its row of `logits` [rows, vocab]."""
    index = torch.tensor(token_ids, device=logits.device)
    logprobs: list[float] = (logits.gather(1, index[:, None])[:, 0] - torch.logsumexp(logits, -1)).tolist()
    return logprobs


def _penalise(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits with each row's repetition penalty; `logits` itself where no row has one.

    Source of the rule: CTRL (Keskar et al. 2019), as transformers' RepetitionPenaltyLogitsProcessor
    has it: positive logits of seen tokens are divided by the penalty, negative ones multiplied.
    """
    if all(draw.params.repetition_penalty == 1 for draw in draws):
        return logits
    shaped = logits.clone()
    for row, draw in zip(shaped, draws, strict=True):
        penalty = draw.params.repetition_penalty
        if penalty != 1:
            seen = torch.tensor(sorted(set(draw.seen)), device=logits.device)
            values = row[seen]
            row[seen] = torch.where(values < 0, values * penalty, values / penalty)
    return shaped


def _restrict(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits with those of tokens that a draw cannot choose at minus infinity; `logits` itself where all can."""
    if all(draw.constraint is None for draw in draws):
        return logits
    shaped = torch.full_like(logits, float("-inf"))
    for row, source, draw in zip(shaped, logits, draws, strict=True):
        if draw.constraint is None:
            row.copy_(source)
            continue
        likeliest = int(source.argmax())
        ids = torch.tensor(draw.constraint.allowed, device=logits.device)
        if likeliest in draw.constraint.if_likeliest:
            ids = torch.cat([ids, ids.new_tensor([likeliest])])
        row[ids] = source[ids]
        if rank(draw) > 0:
            # The ranks are of ways to go on: there are none yet where the likeliest only says what was typed.
            best = int(row.argmax())
            number = min(rank(draw), len(ids) - 1) if best in draw.constraint.longer else 0
            chosen = int(row.topk(number + 1).indices[number])
            row.fill_(float("-inf"))
            row[chosen] = 0.0
    return shaped


def _draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [rows]."""
    alone = [row for row, draw in enumerate(draws) if num_needed(draw) > NUM_CANDIDATES]
    if not alone:
        return _draw_together(logits, draws)
    token_ids = torch.empty(len(draws), dtype=torch.long, device=logits.device)
    for row in alone:
        token_ids[row] = _draw_alone(logits[row], draws[row])
    together = [row for row in range(len(draws)) if row not in set(alone)]
    if together:
        token_ids[together] = _draw_together(logits[together], [draws[row] for row in together])
    return token_ids


def num_needed(draw: Draw) -> float:
    """How many of the likeliest tokens decide this draw."""
    if draw.params.temperature == 0:
        return rank(draw) + 1
    return draw.params.top_k or float("inf")


def rank(draw: Draw) -> int:
    """Which of the likeliest tokens a greedy draw takes."""
    is_ranked = draw.params.temperature == 0 and draw.is_first
    return draw.params.first_rank if is_ranked else 0


def _draw_together(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Token ids [rows] of rows that need at most NUM_CANDIDATES candidates each."""
    values, ids = logits.topk(min(NUM_CANDIDATES, logits.shape[1]))
    greedy = [draw.params.temperature == 0 for draw in draws]
    if all(greedy):
        return _pick_rank(values, ids, draws)
    sampled = _pick(values, ids, draws)
    if not any(greedy):
        return sampled
    mask = torch.tensor(greedy, device=logits.device)
    return torch.where(mask, _pick_rank(values, ids, draws), sampled)


def _draw_alone(logits: Tensor, draw: Draw) -> Tensor:
    """The token id [] of a row [vocab] that needs many candidates."""
    params = draw.params
    number = min(num_needed(draw), len(logits))
    if number < len(logits) or params.temperature == 0:
        values, ids = logits.topk(int(number))
    elif 0 < params.top_p < 1:
        values, ids = logits.sort(descending=True)
    else:
        values, ids = logits, torch.arange(len(logits), device=logits.device)
    if params.temperature == 0:
        return _pick_rank(values[None], ids[None], [draw])[0]
    return _pick(values[None], ids[None], [draw])[0]


def _pick_rank(values: Tensor, ids: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Greedy: the first id of the likeliest (argmax's), or the one of the rank asked for."""
    ranks = torch.tensor([rank(draw) if draw.constraint is None else 0 for draw in draws], device=ids.device)[:, None]
    ranked = ids.gather(1, ranks)[:, 0]
    return torch.where(ranks[:, 0] == 0, first_of_equals(values, ids), ranked)


def first_of_equals(values: Tensor, ids: Tensor) -> Tensor:
    """Of each row the smallest of `ids` among the likeliest; `values` has the likeliest first."""
    return ids.masked_fill(values < values[:, :1], torch.iinfo(ids.dtype).max).amin(1)


def _pick(values: Tensor, ids: Tensor, draws: Sequence[Draw]) -> Tensor:
    columns = [(*limits(draw.params), uniform(draw.seed, draw.position)) for draw in draws]
    table = torch.tensor(columns, dtype=torch.float64, device=values.device)
    return pick(values, ids, table.T)


def limits(params: SamplingParams) -> tuple[float, float, float]:
    """Temperature, top-k and top-p as numbers that need no exceptions, for `pick`."""
    top_p = params.top_p if 0 < params.top_p < 1 else 2.0
    return params.temperature or 1.0, params.top_k or float("inf"), top_p


def pick(values: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """Samples by inverting the cumulative distribution.

    Args:
        values: [rows, candidates] float32 logits, likeliest first (any order where neither top-k
            nor top-p cuts).
        ids: [rows, candidates] their token ids.
        table: [4, rows] float64: the three `limits` and the uniform number of each row.

    Returns:
        Token ids [rows].
    """
    temperature, top_k, top_p, u = table[:, :, None]
    rank = torch.arange(values.shape[1], device=values.device)
    scaled = (values.double() / temperature).masked_fill(rank >= top_k, float("-inf"))
    probs = torch.softmax(scaled, -1)
    after = probs.cumsum(-1)
    # Top-p keeps a token if those before it have less than top_p: the first is always kept.
    kept = torch.where(after - probs < top_p, probs, 0.0)
    after = kept.cumsum(-1)
    choice = (after <= u * after[:, -1:]).sum(-1, keepdim=True)
    last = (after < after[:, -1:]).sum(-1, keepdim=True)  # rounding must not step past the end
    return ids.gather(1, torch.minimum(choice, last))[:, 0]
