"""Draws on a CPU: the usual ones by a kernel, row by row on all threads, the others as everywhere.

Knows rows of logits and draws. Refuses to know models and sequences.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from workers.engine.request import GeneratedToken
from workers.engine.sampling import NUM_CANDIDATES, Draw, limits, num_needed, rank, sample, uniform

if TYPE_CHECKING:
    from workers.engine.cpu.kernels import Kernels

# Logits that are gone through in less time than it takes to win the interpreter back.
BRIEF = 1 << 18


class CpuSampler:
    """Draws tokens, as `sampling.sample` does; which way a draw goes depends on its own parameters alone."""

    def __init__(self, kernels: Kernels, vocab_size: int) -> None:
        from workers.engine.cpu import kernels as cpu_kernels  # compiles, where that has not been done

        self._k = k = cpu_kernels
        self._kernels = kernels
        self._scratch = np.zeros((kernels.num_threads, k.SAMPLE_SCRATCH_FLOATS), np.float32)
        self._parameters = np.zeros(k.SAMPLE_FIELDS, np.int64)
        self._parameters[k.SAMPLE_VOCAB] = vocab_size
        self._parameters[k.SAMPLE_SCRATCH] = self._scratch.ctypes.data
        self._parameters[k.SAMPLE_SCRATCH_STRIDE] = k.SAMPLE_SCRATCH_FLOATS
        self.address = self._parameters.ctypes.data

    def describe(self, draw: Draw, source: int) -> tuple[float, ...]:
        """A draw's row of the kernel's table; `source` is where its logits are."""
        temperature, top_k, top_p = limits(draw.params)
        is_greedy = draw.params.temperature == 0
        return (
            source, 0 if is_greedy else temperature, top_k, top_p,
            uniform(draw.seed, draw.position), rank(draw) if is_greedy else 0, -1, 0,
            *_choices(draw),
        )  # fmt: skip

    def use(self, table: Any) -> None:
        """The kernel's next draws are those of `table` [draws, DRAW_FIELDS] float64."""
        self._parameters[self._k.SAMPLE_ROWS], self._parameters[self._k.SAMPLE_TABLE] = len(table), table.ctypes.data

    def sample(self, logits: Tensor, sources: Items[int], draws: Items[Draw]) -> list[GeneratedToken]:
        """A token of each draw, from row `sources[draw]` of `logits` [rows, vocab]."""
        k = self._k
        steps: list[GeneratedToken | None] = [None] * len(draws)
        few = [number for number, draw in enumerate(draws) if is_usual(draw)]
        if few:
            table = np.zeros((len(few), k.DRAW_FIELDS))
            for row, number in zip(table, few, strict=True):
                row[:] = self.describe(draws[number], sources[number])
            for row, number in zip(self._fill(table, logits), few, strict=True):
                steps[number] = GeneratedToken(int(row[k.TOKEN]), row[k.LOGPROB])
        many = [number for number, step in enumerate(steps) if step is None]
        if many:
            rows = logits[[sources[number] for number in many]]
            for number, step in zip(many, sample(rows, [draws[number] for number in many]), strict=True):
                steps[number] = step
        return [step for step in steps if step is not None]

    def score(self, logits: Tensor, sources: Items[int], token_ids: Items[int]) -> list[float]:
        """The log-probability of each of `token_ids` by its row of `logits`."""
        k = self._k
        table = np.zeros((len(token_ids), k.DRAW_FIELDS))
        table[:, k.DRAW_ROW], table[:, k.TOKEN] = sources, token_ids
        return [row[k.LOGPROB] for row in self._fill(table, logits)]

    def _fill(self, table: Any, logits: Tensor) -> list[list[float]]:
        """The table of draws [draws, DRAW_FIELDS], with what came of them."""
        logits = logits.contiguous()
        self.use(table)
        is_brief = len(table) * logits.shape[1] <= BRIEF
        self._kernels.run(self._k.sample, self.address, 0, logits.data_ptr(), len(table) > 1, holds=is_brief)
        filled: list[list[float]] = table.tolist()
        return filled


def is_usual(draw: Draw) -> bool:
    """Whether a kernel can draw it."""
    params = draw.params
    is_plain = (
        params.repetition_penalty == 1 and params.top_logprobs == 0 and (draw.constraint is None or rank(draw) == 0)
    )
    return is_plain and num_needed(draw) <= NUM_CANDIDATES


def _choices(draw: Draw) -> tuple[int, int, int]:
    """Address and numbers of the tokens that a draw can choose; none where it can choose all."""
    choices = draw.constraint
    if choices is None:
        return 0, 0, 0
    return choices.table.ctypes.data, len(choices.allowed), len(choices.if_likeliest)
