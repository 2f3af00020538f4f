"""Samples tokens on a CPU: usual draws by the compiled kernel on all threads, the others by `sampling.sample`.

Knows rows of logits and draws; knows no models and no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from workers.engine.arithmetic_code import Code
from workers.engine.cpu.layouts import DRAW, SAMPLER
from workers.engine.cpu.team import KernelCall, ThreadTeam
from workers.engine.cpu_kernels import Kernels
from workers.engine.draw import NUM_CANDIDATES, Draw, num_needed, rank
from workers.engine.request import GeneratedToken, PromptLogprobs
from workers.engine.sampling import sample, score

# A kernel over fewer logits takes less time than waking a second thread, and than getting the interpreter lock back.
MAX_LOGITS_WITH_GIL = 1 << 18


class CpuSampler:
    """Draws tokens as `sampling.sample` does; which implementation draws depends on the draw's parameters alone.

    Attributes:
        address: address of the SAMPLER record.
    """

    def __init__(self, kernels: Kernels, team: ThreadTeam, vocab_size: int) -> None:
        self._kernels, self._team = kernels, team
        self._parameters = np.zeros(1, SAMPLER)
        self._parameters["vocab_size"] = vocab_size
        self.address = self._parameters.ctypes.data

    def describe(self, draw: Draw, row: int) -> tuple[float, ...]:
        """The DRAW record of a draw from row `row` of the logits; `can_draw` holds for it."""
        temperature, top_k, top_p = draw.params.limits[:3]
        is_greedy = draw.params.temperature == 0
        return (
            *(row, rank(draw) if is_greedy else 0, -1, *_allowed(draw)),
            *(0.0 if is_greedy else temperature, top_k, top_p, *draw.code, draw.next_point, 0.0),
        )

    def use(self, draws: Any) -> None:
        """Makes `draws` [draws] DRAW the kernel's next ones; they must stay alive until it has run."""
        self._parameters["num_draws"], self._parameters["draws_at"] = len(draws), draws.ctypes.data

    def sample(self, logits: Tensor, sources: Sequence[int], draws: Sequence[Draw]) -> list[GeneratedToken]:
        """A token for each draw, from row `sources[i]` of `logits` [rows, vocab] float32."""
        tokens: list[GeneratedToken | None] = [None] * len(draws)
        usual = [number for number, draw in enumerate(draws) if can_draw(draw)]
        if usual:
            table = np.array([self.describe(draws[number], sources[number]) for number in usual], DRAW)
            self._run(table, logits)
            for number, token in zip(usual, drawn_tokens(table), strict=True):
                tokens[number] = token
        others = [number for number, token in enumerate(tokens) if token is None]
        if others:
            rows = logits[[sources[number] for number in others]]
            for number, token in zip(others, sample(rows, [draws[number] for number in others]), strict=True):
                tokens[number] = token
        return [token for token in tokens if token is not None]

    def score(self, logits: Tensor, first: int, token_ids: Sequence[int], num_tops: int) -> PromptLogprobs:
        """What `sampling.score` gives for the rows of `logits` [rows, vocab] from `first` on, one for each token."""
        if num_tops:
            return score(logits[first : first + len(token_ids)], token_ids, num_tops)
        table = np.zeros(len(token_ids), DRAW)
        table["row"], table["token_id"] = range(first, first + len(token_ids)), token_ids
        self._run(table, logits)
        return PromptLogprobs(table["logprob"].tolist(), [()] * len(token_ids))

    def _run(self, draws: Any, logits: Tensor) -> None:
        logits = logits.contiguous()
        self.use(draws)
        holds_gil = len(draws) * logits.shape[1] <= MAX_LOGITS_WITH_GIL
        call = KernelCall(self._kernels.sample, self.address, 0, logits.data_ptr())
        self._team.run(call, len(draws) > 1 and not holds_gil, holds_gil=holds_gil)


def drawn_tokens(table: Any) -> list[GeneratedToken]:
    """The tokens of `table` [draws] DRAW after the kernel has run."""
    codes = map(Code, table["point"].tolist(), table["width"].tolist())
    columns = zip(table["token_id"].tolist(), table["logprob"].tolist(), codes, strict=True)
    return [GeneratedToken(token_id, logprob, code=code) for token_id, logprob, code in columns]


def can_draw(draw: Draw) -> bool:
    """Whether the kernel can draw it; if not, `sampling.sample` does."""
    is_ranked = draw.constraint is not None and rank(draw) > 0
    return draw.params.is_plain and not is_ranked and num_needed(draw) <= NUM_CANDIDATES


def _allowed(draw: Draw) -> tuple[int, int, int]:
    """DRAW's `allowed_at`, `num_allowed` and `num_if_likeliest`; zeros without a constraint."""
    constraint = draw.constraint
    if constraint is None:
        return 0, 0, 0
    return constraint.table.ctypes.data, len(constraint.allowed), len(constraint.if_likeliest)
