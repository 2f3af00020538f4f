"""The schedule of a training run: the data and the learning rate of each step, as functions of the step's number.

There is no state, so a run that is resumed continues exactly as an uninterrupted run would. Does not know models,
devices or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shared.errors import StartError

# The largest requests use this many positions, so training must cover them.
MIN_POSITIONS = 640
# Learning-rate schedule: linear warm-up, constant, linear decay.
WARM_UP = 0.01  # fraction of the tokens
HOLD = 0.3  # fraction of the tokens at which the decay begins
FINAL = 0.02  # last learning rate, as a fraction of the highest
# Separate the random streams that are derived from one seed.
_EPOCH, _STEP = 1, 2

Tokens = NDArray[np.uint16]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that determines what a run computes. A step reads `batch` × `window` tokens.

    Raises:
        StartError: the numbers do not fit together.
    """

    seed: int
    tokens: int  # the budget of the whole run, over all calls
    window: int
    batch: int
    long_share: float  # fraction of the steps that use fewer, longer windows
    long_window: int
    random_starts: float  # fraction of the windows whose positions start at random instead of 0
    learning_rate: float
    weight_decay: float  # of the blocks' matrices
    dropout: float
    n_positions: int  # this and what follows as in GPT2Config
    n_layer: int
    n_embd: int
    n_head: int
    vocab_size: int
    continue_from: str | None
    corpus_sha256: str

    def __post_init__(self) -> None:
        if self.n_positions < MIN_POSITIONS:
            raise StartError(f"--n-positions must be at least {MIN_POSITIONS}.")
        if self.vocab_size > 1 << 16:
            raise StartError("--vocab-size is at most 65,536.")
        if min(self.window, self.batch, self.tokens, self.n_layer, self.n_embd, self.n_head) < 1:
            raise StartError("Sizes must be at least 1.")
        if self.n_embd % self.n_head:
            raise StartError("--n-embd must be a multiple of --n-head.")
        if not 0 <= self.dropout < 1 or not self.learning_rate > 0 or self.weight_decay < 0:
            raise StartError("--dropout must be in [0, 1), --learning-rate above 0, --weight-decay at least 0.")
        if not 0 <= self.long_share <= 1 or not 0 <= self.random_starts <= 1:
            raise StartError("--long-share and --random-starts are shares from 0 to 1.")
        if self.chunk % self.window or self.tokens_per_step % self.chunk or self.chunk > self.n_positions:
            raise StartError(
                "--long-window must be a multiple of --window, divide a step, and be at most --n-positions."
            )

    @property
    def tokens_per_step(self) -> int:
        return self.window * self.batch

    @property
    def num_steps(self) -> int:
        return -(-self.tokens // self.tokens_per_step)

    @property
    def chunk(self) -> int:
        """Consecutive tokens of the corpus per read: one long window or several short windows."""
        return self.long_window if self.long_share else self.window

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, constant, linear decay (trapezoidal), by the number of tokens before `step`."""
        seen, after = step * self.tokens_per_step, (step + 1) * self.tokens_per_step
        up = min(1.0, after / max(1.0, WARM_UP * self.tokens))
        down = max(0.0, seen / self.tokens - HOLD) / (1 - HOLD)
        return self.learning_rate * up * (1 - (1 - FINAL) * min(1.0, down))


@dataclass(frozen=True, slots=True)
class Batch:
    """Input ids, target ids (the next token of each) and position ids, `[rows, length]` each."""

    ids: Ids
    targets: Ids
    positions: Ids


def batch_at(settings: Settings, tokens: Tokens, step: int) -> Batch:
    """The batch of `step`. Each pass over the corpus reads every chunk once, in a new random order.

    Raises:
        StartError: the corpus has too few tokens for one step.
    """
    chunk = settings.chunk
    per_step = settings.tokens_per_step // chunk
    # Each pass has a random phase, so that windows are cut at other tokens.
    num_chunks = (len(tokens) - 1) // chunk - 1
    steps_per_pass = num_chunks // per_step
    if steps_per_pass < 1:
        raise StartError(f"The corpus has {len(tokens)} tokens, which is not enough for one step.")
    pass_index, step_in_pass = divmod(step, steps_per_pass)
    phase, order = _pass(settings.seed, pass_index, chunk, num_chunks)
    starts = phase + chunk * order[step_in_pass * per_step : (step_in_pass + 1) * per_step]
    read = np.stack([tokens[start : start + chunk + 1] for start in starts]).astype(np.int64)
    rng = np.random.default_rng((settings.seed, _STEP, step))
    length = chunk if rng.random() < settings.long_share else settings.window
    rows = settings.tokens_per_step // length
    # Clamped, not redrawn, to where a window fits: else the last positions would be trained less than others.
    offsets = np.minimum(rng.integers(settings.n_positions, size=rows), settings.n_positions - length)
    offsets *= rng.random(rows) < settings.random_starts
    return Batch(
        read[:, :-1].reshape(rows, length),
        read[:, 1:].reshape(rows, length),
        offsets[:, None] + np.arange(length),
    )


@lru_cache(maxsize=2)
def _pass(seed: int, pass_index: int, chunk: int, num_chunks: int) -> tuple[int, Ids]:
    """(phase in tokens, order of the chunks) of one pass over the corpus."""
    rng = np.random.default_rng((seed, _EPOCH, pass_index))
    return int(rng.integers(chunk)), rng.permutation(num_chunks)
