"""A draw: all that the choice of one token depends on besides the logits; and which draws a sequence takes.

Plain Python: does not know tensors and devices; a runner samples from its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from workers.engine.arithmetic_code import Code, uniform
from workers.engine.request import GeneratedToken, SamplingParams
from workers.engine.sequence import Sequence
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
    seen: Items[int] = ()
    constraint: AllowedTokens | None = None
    is_first: bool = False
    generated: Items[int] = ()

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


def draw_of(sequence: Sequence, num_forced_ids: int = 0, code: Code | None = None) -> Draw:
    """The draw of the next token of `sequence`, or of the token after the first `num_forced_ids` forced ids.

    Args:
        code: after the draw of the last of these ids; None for the sequence's.
    """
    params = sequence.request.sampling
    ahead = sequence.forced_ids[:num_forced_ids]
    seen = (*sequence.tokens(0, sequence.num_tokens), *ahead) if params.repetition_penalty != 1 else ()
    # Without those of the forced prefix, and `ahead` are such: the user typed them.
    generated = tuple(sequence.token_ids[sequence.num_forced :]) if params.has_count_penalty else ()
    return Draw(
        params,
        sequence.request.seed,
        len(sequence.token_ids) + num_forced_ids,
        code or sequence.code,
        seen,
        sequence.allowed_next(num_forced_ids),
        is_first=sequence.num_new == 0,
        generated=generated,
    )


def draw_all(
    sequences: Items[Sequence],
    sources: Items[int],
    sample: Callable[[list[int], list[Draw]], list[GeneratedToken]],
    path: Callable[[Sequence, int], list[GeneratedToken]],
) -> list[tuple[Sequence, GeneratedToken]]:
    """Draws a token for each sequence, and further tokens as long as they are the prefilled forced ids.

    Args:
        sources: row of the logits for each sequence's next token; the rows for the tokens after its forced ids follow.
        sample: draws from the given rows of the logits.
        path: the tokens of a sequence that starts with a ranked path, and the row after its prompt.
    """
    pairs = list(zip(sequences, sources, strict=True))
    drawn = [
        (sequence, token) for sequence, source in pairs if sequence.starts_with_path for token in path(sequence, source)
    ]
    pending = [(sequence, source, 0, sequence.code) for sequence, source in pairs if not sequence.starts_with_path]
    while pending:
        draws = [draw_of(sequence, number, code) for sequence, _, number, code in pending]
        tokens = sample([source + number for _, source, number, _ in pending], draws)
        matching = []
        for (sequence, source, number, code), token in zip(pending, tokens, strict=True):
            drawn.append((sequence, token))
            if number < len(sequence.forced_ids) and token.token_id == sequence.forced_ids[number]:
                matching.append((sequence, source, number + 1, token.code or code))
        pending = matching
    return drawn
