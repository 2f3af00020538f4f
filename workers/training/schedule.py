"""The course of a training run: what every step reads, and how fast it learns, as functions of its number alone.

Nothing here has a state, so a run that was interrupted goes on exactly as it would have gone. Knows numbers; refuses to
know models, devices and time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shared.errors import StartError
from workers.training.corpus import Tokens

# The decode window of the product's largest requests must have been seen in training.
MIN_N_CTX = 640
WARM_UP = 0.01  # of the tokens
HOLD = 0.3  # of the tokens, the warm-up included
FINAL = 0.02  # of the learning rate
# Keys that keep draws apart which share a seed.
_EPOCH, _STEP = 1, 2

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All that decides what a run computes, besides its corpus. A step reads `batch` × `window` tokens.

    Raises:
        StartError: the numbers do not fit together.
    """

    seed: int
    tokens: int  # the run's whole budget, however many calls it takes
    window: int
    batch: int
    long_share: float  # of the steps, read as fewer and longer windows
    long_window: int
    random_starts: float  # share of the windows that begin at a random position instead of 0
    learning_rate: float
    weight_decay: float  # of the blocks' matrices
    dropout: float
    n_ctx: int
    layers: int
    width: int
    heads: int
    vocab_size: int
    continue_from: str | None

    def __post_init__(self) -> None:
        if self.n_ctx < MIN_N_CTX:
            raise StartError(f"--n-ctx must be at least {MIN_N_CTX}.")
        if min(self.window, self.batch, self.tokens, self.layers, self.width, self.heads) < 1:
            raise StartError("Sizes must be at least 1.")
        if self.width % self.heads:
            raise StartError("--width must be a multiple of --heads.")
        if not 0 <= self.dropout < 1 or not self.learning_rate > 0 or self.weight_decay < 0:
            raise StartError("--dropout must be in [0, 1), --learning-rate above 0, --weight-decay at least 0.")
        if not 0 <= self.long_share <= 1 or not 0 <= self.random_starts <= 1:
            raise StartError("--long-share and --random-starts are shares from 0 to 1.")
        if self.chunk % self.window or self.tokens_per_step % self.chunk or self.chunk > self.n_ctx:
            raise StartError("--long-window must be a multiple of --window, divide a step, and be at most --n-ctx.")

    @property
    def tokens_per_step(self) -> int:
        return self.window * self.batch

    @property
    def num_steps(self) -> int:
        return -(-self.tokens // self.tokens_per_step)

    @property
    def chunk(self) -> int:
        """Tokens that are read from one place: they are one long window or several short ones."""
        return self.long_window if self.long_share else self.window

    def learning_rate_at(self, step: int) -> float:
        """A short way up, held, then down in a line; by the tokens seen before `step`."""
        seen, after = step * self.tokens_per_step, (step + 1) * self.tokens_per_step
        up = min(1.0, after / max(1.0, WARM_UP * self.tokens))
        down = max(0.0, seen / self.tokens - HOLD) / (1 - HOLD)
        return self.learning_rate * up * (1 - (1 - FINAL) * min(1.0, down))


@dataclass(frozen=True, slots=True)
class Batch:
    """Each `[rows, length]`: ids, the ids that follow them, and the positions they are read at."""

    ids: Ids
    targets: Ids
    positions: Ids


def batch_at(settings: Settings, tokens: Tokens, step: int) -> Batch:
    """What `step` reads. In one pass over the stream every chunk comes once, in an order of its own."""
    chunk = settings.chunk
    per_step = settings.tokens_per_step // chunk
    # A pass begins at a random phase, so that windows are cut elsewhere each time.
    num_chunks = (len(tokens) - 1) // chunk - 1
    steps_per_pass = num_chunks // per_step
    if steps_per_pass < 1:
        raise StartError(f"The corpus has {len(tokens)} tokens, which is not enough for one step.")
    number, place = divmod(step, steps_per_pass)
    phase, order = _pass(settings.seed, number, chunk, num_chunks)
    starts = phase + chunk * order[place * per_step : (place + 1) * per_step]
    read = np.stack([tokens[start : start + chunk + 1] for start in starts]).astype(np.int64)
    rng = np.random.default_rng((settings.seed, _STEP, step))
    length = chunk if rng.random() < settings.long_share else settings.window
    rows = settings.tokens_per_step // length
    # Cut off at the last place where a window fits, so that the last positions are read as often as others.
    offsets = np.minimum(rng.integers(settings.n_ctx, size=rows), settings.n_ctx - length)
    offsets *= rng.random(rows) < settings.random_starts
    return Batch(
        read[:, :-1].reshape(rows, length),
        read[:, 1:].reshape(rows, length),
        offsets[:, None] + np.arange(length),
    )


@lru_cache(maxsize=2)
def _pass(seed: int, number: int, chunk: int, num_chunks: int) -> tuple[int, Ids]:
    rng = np.random.default_rng((seed, _EPOCH, number))
    return int(rng.integers(chunk)), rng.permutation(num_chunks)
