"""Logits processors and warpers: what sampling parameters do to a distribution before a token is drawn from it.

`PROCESSORS` change the logits of a whole vocabulary, one row for each draw. `SCORE_WARPERS` and `PROBABILITY_WARPERS`
follow: they see only the candidates of a draw, likeliest first, before and after the softmax. The order is that of
transformers' `generate`: repetition penalty, constraint, temperature, top-k, top-p, min-p, typical-p; OpenAI's
penalties and biases come after the repetition penalty. To add a sampling parameter, append a processor or a warper
here, give the warper its limit in `SamplingParams.limits`, and exclude it from `is_plain` unless the kernels have it.

Knows logits and draws. Does not know models, sequences, and how tokens are drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workers.engine.draw import Draw, rank

# Smaller temperatures act as this one, which is their limit: divided by it, float32 logits that differ are so far apart
# that the likeliest token has all of the probability, and none overflows a float64.
MIN_TEMPERATURE = 1e-200

# [rows, vocab] float32 and the draw of each row → logits of the same shape; the argument is never changed.
LogitsProcessor = Callable[[Tensor, Sequence[Draw]], Tensor]


def penalize_repetition(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Divides positive logits of the tokens seen so far by the penalty, and multiplies negative ones with it.

    Source: CTRL (Keskar et al. 2019), as implemented by transformers' RepetitionPenaltyLogitsProcessor.

    Returns:
        `logits` itself if no row has a penalty.
    """
    if all(draw.params.repetition_penalty == 1 for draw in draws):
        return logits
    penalized = logits.clone()
    for row, draw in zip(penalized, draws, strict=True):
        penalty = draw.params.repetition_penalty
        if penalty != 1:
            seen = torch.tensor(sorted(set(draw.seen)), device=logits.device)
            values = row[seen]
            row[seen] = torch.where(values < 0, values * penalty, values / penalty)
    return penalized


def penalize_counts(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Subtracts count · frequency_penalty + presence_penalty from the logits of generated tokens; the prompt's tokens
    do not count.

    Source: https://platform.openai.com/docs/api-reference/parameter-details ("Frequency and presence penalties"):
    mu[j] → mu[j] - c[j] · alpha_frequency - float(c[j] > 0) · alpha_presence.

    Returns:
        `logits` itself if no row has a penalty.
    """
    if not any(draw.params.has_count_penalty and draw.generated for draw in draws):
        return logits
    penalized = logits.clone()
    for row, draw in zip(penalized, draws, strict=True):
        params = draw.params
        if params.has_count_penalty and draw.generated:
            counts = Counter(draw.generated)
            penalties = [count * params.frequency_penalty + params.presence_penalty for count in counts.values()]
            row[torch.tensor(list(counts), device=row.device)] -= torch.tensor(penalties, device=row.device)
    return penalized


def add_bias(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Adds each draw's biases to the logits of their tokens, as OpenAI's logit_bias.

    Source: https://platform.openai.com/docs/api-reference/completions/create ("logit_bias"): the bias is added to the
    logits prior to sampling; -100 and 100 ban and force a token.

    Returns:
        `logits` itself if no row has biases.
    """
    if not any(draw.params.logit_bias for draw in draws):
        return logits
    biased = logits.clone()
    for row, draw in zip(biased, draws, strict=True):
        if draw.params.logit_bias:
            ids, biases = zip(*draw.params.logit_bias, strict=True)
            row[torch.tensor(ids, device=row.device)] += torch.tensor(biases, device=row.device, dtype=row.dtype)
    return biased


def apply_constraint(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Sets the logits of tokens that a draw's constraint does not allow to minus infinity.

    If the draw is a ranked greedy one, only the token of that rank keeps a finite logit. Ranks count different
    continuations, so they apply only if the likeliest allowed token reaches past the forced prefix.

    Returns:
        `logits` itself if no draw has a constraint.
    """
    if all(draw.constraint is None for draw in draws):
        return logits
    constrained = torch.full_like(logits, float("-inf"))
    for row, source, draw in zip(constrained, logits, draws, strict=True):
        if draw.constraint is None:
            row.copy_(source)
            continue
        likeliest = int(source.argmax())
        ids = torch.tensor(draw.constraint.allowed, device=logits.device)
        if likeliest in draw.constraint.if_likeliest:
            ids = torch.cat([ids, ids.new_tensor([likeliest])])
        row[ids] = source[ids]
        if rank(draw) > 0:
            best = int(row.argmax())
            number = min(rank(draw), len(ids) - 1) if best in draw.constraint.longer else 0
            chosen = int(row.topk(number + 1).indices[number])
            row.fill_(float("-inf"))
            row[chosen] = 0.0
    return constrained


PROCESSORS: tuple[LogitsProcessor, ...] = (penalize_repetition, penalize_counts, add_bias, apply_constraint)


def scale_by_temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    """scores / temperature, as transformers' TemperatureLogitsWarper; finite for every temperature above 0."""
    return scores / temperature.clamp(min=MIN_TEMPERATURE)


def keep_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """Minus infinity for all but the first `top_k` scores of a row, as transformers' TopKLogitsWarper."""
    return scores.masked_fill(torch.arange(scores.shape[1], device=scores.device) >= top_k, float("-inf"))


def keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """0 for a probability if those before it add up to `top_p` or more, as transformers' TopPLogitsWarper.

    The first is always kept. Source: nucleus sampling (Holtzman et al. 2019).
    """
    return torch.where(probs.cumsum(-1) - probs < top_p, probs, 0.0)


def keep_min_p(probs: Tensor, min_p: Tensor) -> Tensor:
    """0 for a probability below `min_p` times the row's highest, as transformers' MinPLogitsWarper.

    Source: Nguyen et al. 2024, "Turning up the heat: min-p sampling", arXiv:2407.01082.
    """
    return torch.where(probs >= min_p * probs.amax(-1, keepdim=True), probs, 0.0)


def keep_typical(probs: Tensor, typical_p: Tensor) -> Tensor:
    """0 for a probability whose logarithm is farther from the mean one than those that add up to `typical_p`, as
    transformers' TypicalLogitsWarper. The nearest is always kept.

    Source: locally typical sampling (Meister et al. 2022, arXiv:2202.00666).
    """
    if not (typical_p < 1).any():
        return probs
    normalized = probs / probs.cumsum(-1)[:, -1:]  # not `sum`, whose rounding depends on the number of rows
    entropy = torch.special.entr(normalized).cumsum(-1)[:, -1:]
    distances = (-normalized.log() - entropy).abs()
    nearest, order = distances.sort()
    num_before = (normalized.gather(1, order).cumsum(-1) < typical_p).sum(-1, keepdim=True)
    farthest = nearest.gather(1, num_before.clamp(max=probs.shape[1] - 1))
    return torch.where(distances > farthest, 0.0, probs)


# ([rows, candidates] float64, [rows, 1] limits) → [rows, candidates]; in the order of `SamplingParams.limits`.
Warper = Callable[[Tensor, Tensor], Tensor]
SCORE_WARPERS: tuple[Warper, ...] = (scale_by_temperature, keep_top_k)
PROBABILITY_WARPERS: tuple[Warper, ...] = (keep_top_p, keep_min_p, keep_typical)


def process(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Logits [rows, vocab] after all processors."""
    for processor in PROCESSORS:
        logits = processor(logits, draws)
    return logits


def warp(logits: Tensor, limits: Sequence[Tensor]) -> Tensor:
    """Probabilities of candidates after the warpers; not normalised.

    Args:
        logits: [rows, candidates] float32, likeliest first (any order if neither top-k nor top-p is enabled).
        limits: [rows, 1] float64 for each of the first warpers, in their order; warpers without limits are skipped.

    Returns:
        [rows, candidates] float64.
    """
    scores = logits.double()
    for warper, limit in zip(SCORE_WARPERS, limits, strict=False):
        scores = warper(scores, limit)
    probs = torch.softmax(scores, -1)
    for warper, limit in zip(PROBABILITY_WARPERS, limits[len(SCORE_WARPERS) :], strict=False):
        probs = warper(probs, limit)
    return probs
