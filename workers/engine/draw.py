"""A draw: all that the choice of one token depends on besides the logits. Plain values; no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.arithmetic_code import Code, uniform
from workers.engine.request import SamplingParams
from workers.text.token_healing import AllowedTokens

# Draws that need no more of the likeliest tokens than this share one `topk`, and kernels can take them. The width is
# fixed: if it were the batch's largest top_k, the order of equal logits could depend on the other rows of the batch.
NUM_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Draw:
    """How the next token of one row of logits is chosen.

    Attributes:
        position: the token's position among the generated ones, from 0.
        code: the sequence's code before the draw.
        seen: token ids of the prompt and the generated text; empty unless repetition is penalised.
        constraint: the tokens allowed next; None if any is.
        is_first: no generated token carries new text yet.
        generated: token ids of the generated text only, without its forced prefix; empty unless the number of their
            occurrences is penalised.
    """

    params: SamplingParams
    seed: int
    position: int
    code: Code
    seen: Sequence[int] = ()
    constraint: AllowedTokens | None = None
    is_first: bool = False
    generated: Sequence[int] = ()

    @property
    def next_point(self) -> float:
        """The code point after the draw if the width is below MIN_WIDTH then."""
        return uniform(self.seed, self.position + 1)


def rank(draw: Draw) -> int:
    """Which of the likeliest tokens a greedy draw takes, from 0."""
    is_ranked = draw.params.temperature == 0 and draw.is_first
    return draw.params.first_rank if is_ranked else 0


def num_needed(draw: Draw) -> float:
    """How many of the likeliest tokens the draw has to choose from; infinity if all."""
    if draw.params.temperature == 0:
        return rank(draw) + 1
    return draw.params.top_k or float("inf")
