"""Keys and values on a device: one row of cells, in which prompts and suffixes have their stretches.

Knows memory. Refuses to know which tokens are where: the scheduler does.

A cell holds a token's key and value of all heads, side by side, so that a token is stored with one
copy. A text is read through a list of its cells, so that one that begins in a entry and goes on in
a suffix is read like any other, and as far as it goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.memory import cache_budget_bytes
from workers.engine.model.gpt2 import GPT2Config
from workers.engine.scheduler_output import SUFFIX_TOKENS, Copy, EntryCopy, SuffixCopy, SuffixMove

# Of the free memory; other workers of the device want some too, and so do graphs.
MEMORY_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class CellPlan:
    """Which stretch of the cells is whose: entries first, then suffixes, then one cell for scrap."""

    num_entries: int
    max_sequences: int
    n_ctx: int

    @property
    def num_cells(self) -> int:
        return self.scrap + 1

    @property
    def scrap(self) -> int:
        """A cell that may be written by whoever has nothing to say; it is never believed."""
        return self.suffix(self.max_sequences)

    def entry(self, index: int) -> int:
        """The first cell of a entry."""
        return index * self.n_ctx

    def suffix(self, index: int) -> int:
        """The first cell of a suffix."""
        return self.num_entries * self.n_ctx + index * SUFFIX_TOKENS

    def stretches(self, copy: Copy) -> tuple[int, int, int]:
        """A copy's first cell to read, its first cell to write, and its number of cells."""
        match copy:
            case EntryCopy(source, target, length):
                return self.entry(source), self.entry(target), length
            case SuffixCopy(suffix, entry, start, length):
                return self.suffix(suffix), self.entry(entry) + start, length
            case SuffixMove(source, target, length):
                return self.suffix(source), self.suffix(target), length


class CellCache:
    """Static storage, `layers` [layers, cells, 2, heads, head_size], zeroed."""

    def __init__(self, config: GPT2Config, max_sequences: int, dtype: torch.dtype, device: torch.device) -> None:
        """
        Raises:
            MemoryError: if the suffixes and one prompt do not fit in a share of the free memory.
        """
        cell = (2, config.n_head, config.head_size)
        cell_bytes = config.n_layer * 2 * config.n_embd * dtype.itemsize
        memory_bytes = _budget_bytes(device)
        left = memory_bytes - (max_sequences * SUFFIX_TOKENS + 1) * cell_bytes
        num_entries = min(max_sequences, left // (config.n_positions * cell_bytes))
        if num_entries < 1:
            raise MemoryError(
                f"{memory_bytes >> 20} MiB are too few for {max_sequences} sequences of this model; set a smaller batch"
            )
        self.plan = CellPlan(num_entries, max_sequences, config.n_positions)
        self.num_bytes = self.plan.num_cells * cell_bytes
        # What is masked is multiplied by 0, and must be a number.
        self.layers = torch.zeros(config.n_layer, self.plan.num_cells, *cell, dtype=dtype, device=device)

    def write(self, layer: int, cells: Tensor, keys_values: Tensor) -> None:
        """Stores [rows, 2, heads, head_size] in the `cells` [rows]."""
        self.layers[layer].index_copy_(0, cells, keys_values)

    def read(self, layer: int, cells: Tensor) -> tuple[Tensor, Tensor]:
        """`cells` [texts, length] → keys and values, each [texts, heads, length, head_size]."""
        held = self.layers[layer].index_select(0, cells.flatten())
        keys, values = held.view(*cells.shape, *held.shape[1:]).permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def copy(self, one: Copy) -> None:
        """Copies tokens from place to place, in all layers."""
        source, target, length = self.plan.stretches(one)
        self.layers[:, target : target + length] = self.layers[:, source : source + length]


def _budget_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return cache_budget_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return int(MEMORY_SHARE * free)
