"""The table of a batch as the host makes it: what a decode step has to know of each sequence.

Knows rows of the batch, KV slots and the layout of the table. Does not know the device and when steps are launched.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.arithmetic_code import uniform
from workers.engine.batch import BatchRow
from workers.engine.cuda.kv_cache import SlotLayout
from workers.engine.cuda.step_kernels import AT, MAX_STEPS, NEXT_POINTS, TABLE_ROWS
from workers.engine.sequence import Sequence

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class StepTable:
    """The table of the steps launched last. What does not change while the same rows run is kept."""

    def __init__(self, layout: SlotLayout) -> None:
        self._layout = layout
        self._numbers = np.zeros((TABLE_ROWS, 0))
        self._seeds = np.zeros(0, np.uint64)
        self._next_draws = np.zeros(0, np.uint64)  # positions of the draws after those whose NEXT_POINTS are set

    def start(self, rows: Items[BatchRow], padding: tuple[float, ...], size: int, num_steps: int) -> Tensor:
        """[TABLE_ROWS, size] float64: the table for the next `num_steps` steps of `rows`.

        Args:
            padding: the column of each sequence that the batch lacks.
        """
        self._numbers = np.empty((TABLE_ROWS, size))
        self._numbers[:, len(rows) :] = np.array(padding)[:, None]
        self._numbers[:NEXT_POINTS, : len(rows)] = np.array([self._column(row) for row in rows]).T
        self._seeds = np.array([row.sequence.request.seed & (2**64 - 1) for row in rows], np.uint64)
        self._next_draws = np.array([1 + len(row.sequence.token_ids) for row in rows], np.uint64)
        self._set_next_points(num_steps)
        return torch.from_numpy(self._numbers)

    def extend(self, num_steps: int) -> Tensor:
        """[TABLE_ROWS - AT, size] float64: the table from row AT on, for the steps after those launched last.

        The rows above are as the device has left them.
        """
        self._set_next_points(num_steps)
        return torch.from_numpy(self._numbers[AT:])

    def _set_next_points(self, num_steps: int) -> None:
        """Sets what may replace the code points of the next steps."""
        positions = self._next_draws + np.arange(num_steps, dtype=np.uint64)[:, None]
        self._numbers[NEXT_POINTS : NEXT_POINTS + num_steps, : len(self._seeds)] = uniforms(self._seeds, positions)
        self._next_draws = self._next_draws + np.uint64(num_steps)

    def _column(self, row: BatchRow) -> tuple[float, ...]:
        """The rows of a column before NEXT_POINTS."""
        entry, suffix = self._layout.first_of_entry(row.entry.index), self._layout.first_of_suffix(row.suffix)
        newest, code = row.sequence.token_ids[-1], row.sequence.code
        return (newest, row.start, entry, suffix - row.start, 1, row.position, *draw_limits(row.sequence), *code, 0)


def draw_limits(sequence: Sequence) -> tuple[float, float, float]:
    """As `SamplingParams.limits` has those that kernels implement, but with a temperature of 0 for greedy draws."""
    params = sequence.request.sampling
    return (params.temperature, *params.limits[1:3])


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """`arithmetic_code.uniform` of each seed and position.

    Args:
        seeds: [sequences].
        positions: [..., sequences].
    """
    bits = _mix(_mix(seeds) + (positions + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _FACTORS[0]
    z = (z ^ (z >> np.uint64(27))) * _FACTORS[1]
    return z ^ (z >> np.uint64(31))


def first_column(sequence: Sequence) -> tuple[float, ...]:
    """A column of the table that draws the first token of a sequence. It reads no KV slots."""
    next_points = (uniform(sequence.request.seed, 1), *[0.5] * (MAX_STEPS - 1))
    return (0, 0, 0, 0, 0, 0, *draw_limits(sequence), *sequence.code, 0, *next_points)
