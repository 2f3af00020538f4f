"""Draws tokens from logits: each row is drawn with its own parameters and arithmetic code, and nothing else.

Knows logits and draws. Does not know models, sequences and time; keeps no random state.

What a row gives does not depend on the other rows of its batch: draws that need few candidates share one `topk` of a
fixed width, the others are drawn one by one. Top-k precedes top-p, so a vocabulary (50,257 tokens) is sorted only for
top-p without top-k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.engine.arithmetic_code import MIN_WIDTH, Code
from workers.engine.draw import NUM_CANDIDATES, Draw, num_needed, rank
from workers.engine.logits_processors import process, warp
from workers.engine.request import GeneratedToken, PromptLogprobs, TopLogprobs

# Token ids [rows], and the points and widths of their codes after the draw, [2, rows] float64.
_Drawn = tuple[Tensor, Tensor]


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[GeneratedToken]:
    """Draws one token for each row.

    Args:
        logits: [rows, vocab] float32; not changed.
        draws: one for each row.
    """
    log_totals = torch.logsumexp(logits, -1)
    token_ids, code_table = _draw(process(logits, draws), draws)
    rows = torch.arange(len(draws), device=logits.device)
    chosen = logits[rows, token_ids] - log_totals
    ids: list[int] = token_ids.tolist()
    logprobs: list[float] = chosen.tolist()
    tops = [
        _top_logprobs(row, total, draw.params.top_logprobs)
        for row, total, draw in zip(logits, log_totals, draws, strict=True)
    ]
    codes = [Code(*code) for code in code_table.T.tolist()]
    return [GeneratedToken(*token) for token in zip(ids, logprobs, tops, codes, strict=True)]


def _top_logprobs(row: Tensor, log_total: Tensor, number: int) -> TopLogprobs:
    """The `number` likeliest tokens of `row` [vocab], with their log-probabilities."""
    if number == 0:
        return ()
    values, ids = row.topk(min(number, len(row)))
    return tuple(zip(ids.tolist(), (values - log_total).tolist(), strict=True))


def score(logits: Tensor, token_ids: Sequence[int], num_tops: int) -> PromptLogprobs:
    """The log-probability of each row's token by its row of `logits` [rows, vocab], and the row's `num_tops` likeliest.

    The rows may be half a prompt's, so there is one `topk` for all.
    """
    index = torch.tensor(token_ids, device=logits.device)
    log_totals = torch.logsumexp(logits, -1)
    logprobs: list[float] = (logits.gather(1, index[:, None])[:, 0] - log_totals).tolist()
    if num_tops == 0:
        return PromptLogprobs(logprobs, [()] * len(logprobs))
    values, ids = logits.topk(min(num_tops, logits.shape[1]))
    top_logprobs = (values - log_totals[:, None]).tolist()
    tops = [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), top_logprobs, strict=True)]
    return PromptLogprobs(logprobs, tops)


def _draw(logits: Tensor, draws: Sequence[Draw]) -> _Drawn:
    """Draws from processed logits [rows, vocab]."""
    singles = [row for row, draw in enumerate(draws) if num_needed(draw) > NUM_CANDIDATES]
    if not singles:
        return _draw_batch(logits, draws)
    token_ids = torch.empty(len(draws), dtype=torch.long, device=logits.device)
    codes = torch.empty(2, len(draws), dtype=torch.float64, device=logits.device)
    for row in singles:
        token_ids[row : row + 1], codes[:, row : row + 1] = _draw_single(logits[row : row + 1], draws[row])
    batch = [row for row in range(len(draws)) if row not in set(singles)]
    if batch:
        token_ids[batch], codes[:, batch] = _draw_batch(logits[batch], [draws[row] for row in batch])
    return token_ids, codes


def _draw_batch(logits: Tensor, draws: Sequence[Draw]) -> _Drawn:
    """Draws for rows that need at most NUM_CANDIDATES candidates each."""
    values, ids = likeliest(logits, min(NUM_CANDIDATES, logits.shape[1]))
    greedy = [draw.params.temperature == 0 for draw in draws]
    if all(greedy):
        return _pick_rank(ids, draws)
    sampled = _pick_sampled(values, ids, draws)
    if not any(greedy):
        return sampled
    mask = torch.tensor(greedy, device=logits.device)
    token_ids, codes = (torch.where(mask, *pair) for pair in zip(_pick_rank(ids, draws), sampled, strict=True))
    return token_ids, codes


def likeliest(logits: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The `number` likeliest tokens of each row, [rows, number] logits and ids; of equal logits the smaller id first.

    `topk` leaves open which of equal logits it takes, and their order.
    """
    values, found = logits.topk(number)
    last, found = values[:, -1:], found.sort(1).values
    ordered = logits.gather(1, found).sort(dim=1, descending=True, stable=True)
    ids = found.gather(1, ordered.indices)
    has_others = ((logits >= last).sum(1) > number) & (last[:, 0] > float("-inf"))
    for row in has_others.nonzero()[:, 0].tolist():
        reaching = (logits[row] >= last[row]).nonzero()[:, 0]
        order = logits[row, reaching].sort(descending=True, stable=True).indices
        ids[row] = reaching[order[:number]]
    return logits.gather(1, ids), ids


def _draw_single(logits: Tensor, draw: Draw) -> _Drawn:
    """Draws for a row [1, vocab] that needs more candidates."""
    params, vocab = draw.params, logits.shape[1]
    number = min(num_needed(draw), vocab)
    if number < vocab or params.temperature == 0:
        values, ids = likeliest(logits, int(number))
    elif 0 < params.top_p < 1:
        values, ids = logits.sort(descending=True)
    else:
        values, ids = logits, torch.arange(vocab, device=logits.device)[None]
    return _pick_rank(ids, [draw]) if params.temperature == 0 else _pick_sampled(values, ids, [draw])


def _pick_rank(ids: Tensor, draws: Sequence[Draw]) -> _Drawn:
    """Greedy: the candidate of the draw's rank. The codes stay as they are.

    A constrained draw has its rank applied by `apply_constraint`.
    """
    ranks = torch.tensor([rank(draw) if draw.constraint is None else 0 for draw in draws], device=ids.device)[:, None]
    codes = torch.tensor([draw.code for draw in draws], dtype=torch.float64, device=ids.device).T
    return ids.gather(1, ranks)[:, 0], codes


def _pick_sampled(values: Tensor, ids: Tensor, draws: Sequence[Draw]) -> _Drawn:
    columns = [(*draw.params.limits, *draw.code, draw.next_point) for draw in draws]
    table = torch.tensor(columns, dtype=torch.float64, device=values.device)
    return pick(values, ids, table.T)


def pick(values: Tensor, ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Samples by inverting the cumulative distribution: the first candidate at which it exceeds the code point.

    With the candidate's interval [low, high) of the distribution, width becomes width · (high - low), and point
    (point - low) / (high - low), or the next point where the new width is below MIN_WIDTH.

    Args:
        values: [rows, candidates] float32 logits, as `warp` takes them.
        ids: [rows, candidates] token ids.
        table: [limits + 3, rows] float64: the limits of the first warpers, then each row's code point, its width, and
            the next point.

    Returns:
        Token ids [rows], and the points and widths after the draw, [2, rows] float64.
    """
    *warper_limits, point, width, next_point = table[:, :, None]
    probs = warp(values, warper_limits)
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    target = point * total
    choice = (cumulative <= target).sum(-1, keepdim=True)
    last = (cumulative < total).sum(-1, keepdim=True)  # rounding must not step past the end
    choice = torch.minimum(choice, last)
    interval = probs.gather(1, choice)
    inside = (target - (cumulative.gather(1, choice) - interval)) / interval
    width = width * interval / total
    point = torch.where(width < MIN_WIDTH, next_point, inside.clamp(0, 1))
    return ids.gather(1, choice)[:, 0], torch.cat((point, width), 1).T
