"""Keys and values of what has been computed: prompts in slots, and branches' own tokens in tails.

Knows memory. Refuses to know which tokens are where: the scheduler does.

A prompt is kept once, however many branches continue it. A branch adds to a tail of its own, whose
first position belongs to the attention: it is where the prompt hands over (see `attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from workers.engine.attention import COLUMNS, padded_columns, value_width
from workers.engine.plan import TAIL_TOKENS, Copy, SlotCopy, TailCopy, TailMove

# Rows a power of two apart would all fall into a few sets of the CPU's caches.
SKEW = COLUMNS
# Of the free memory; other slots of the machine, and the rest of this process, want some too.
MEMORY_SHARE = 0.3

TailPlace = tuple[Tensor, Tensor, Tensor]  # tails [rows, 1], heads [1, heads], positions [rows, 1]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The measures of a cache; tells what it takes before it is made."""

    num_layers: int
    num_heads: int
    head_size: int
    n_ctx: int

    @property
    def slot_positions(self) -> int:
        return padded_columns(self.n_ctx) + SKEW

    @property
    def tail_positions(self) -> int:
        return padded_columns(1 + TAIL_TOKENS) + SKEW

    @property
    def position_bytes(self) -> int:
        width = self.head_size + value_width(self.head_size)
        return self.num_layers * self.num_heads * width * torch.float32.itemsize

    def num_slots(self, memory_bytes: int, num_tails: int) -> int:
        """Prompts that fit beside `num_tails` tails: at least one, and no more than tails.

        Raises:
            MemoryError: if not even the tails and one prompt fit.
        """
        left = memory_bytes - num_tails * self.tail_positions * self.position_bytes
        fitting = left // (self.slot_positions * self.position_bytes)
        if fitting < 1:
            raise MemoryError(
                f"{memory_bytes >> 20} MiB are too few for {num_tails} sequences of this model; set a smaller batch"
            )
        return min(num_tails, fitting)


class KVCache:
    """Static storage. The system gives zeroed memory where it is first touched, and only there."""

    def __init__(self, shape: CacheShape, num_slots: int, num_tails: int) -> None:
        self.num_heads, self.head_size = shape.num_heads, shape.head_size
        width = value_width(shape.head_size)
        slots = (shape.num_layers, num_slots, shape.num_heads)
        tails = (shape.num_layers, num_tails, shape.num_heads)
        # A prompt's keys lie with positions side by side: that makes their product a third faster.
        self.prompt_keys = torch.zeros(*slots, shape.head_size, shape.slot_positions)
        self.prompt_values = torch.zeros(*slots, shape.slot_positions, width)
        self.tail_keys = torch.zeros(*tails, shape.tail_positions, shape.head_size)
        self.tail_values = torch.zeros(*tails, shape.tail_positions, width)
        self._heads = torch.arange(shape.num_heads)[None]
        self.num_bytes = sum(
            tensor.numel() * tensor.itemsize
            for tensor in (
                self.prompt_keys,
                self.prompt_values,
                self.tail_keys,
                self.tail_values,
            )
        )

    def write_prompt(self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values, each [rows, heads, head_size], from position `start` on."""
        place = slice(start, start + len(keys))
        self.prompt_keys[layer, slot, :, :, place] = keys.permute(1, 2, 0)
        cell = self.prompt_values[layer, slot, :, place]
        cell[..., : self.head_size] = values.transpose(0, 1)
        cell[..., self.head_size] = 1

    def tail_place(self, tails: Sequence[int], tokens: Sequence[int]) -> TailPlace:
        """Where each row's token goes: token number `tokens[row]` of tail `tails[row]`."""
        positions = torch.tensor(tokens).add_(1)
        return torch.tensor(tails)[:, None], self._heads, positions[:, None]

    def write_tails(self, layer: int, place: TailPlace, keys: Tensor, values: Tensor) -> None:
        """Stores keys [rows, heads, head_size] and values [rows, heads, value_width]."""
        self.tail_keys[layer].index_put_(place, keys)
        self.tail_values[layer].index_put_(place, values)

    def copy(self, one: Copy) -> None:
        """Copies tokens from place to place, in all layers."""
        match one:
            case SlotCopy(source, target, length):
                keys, values = self.prompt_keys, self.prompt_values
                keys[:, target, :, :, :length] = keys[:, source, :, :, :length]
                values[:, target, :, :length] = values[:, source, :, :length]
            case TailCopy(tail, slot, start, length):
                place, own = slice(start, start + length), slice(1, 1 + length)
                self.prompt_keys[:, slot, :, :, place] = self.tail_keys[:, tail, :, own].mT
                self.prompt_values[:, slot, :, place] = self.tail_values[:, tail, :, own]
            case TailMove(source, target, length):
                own = slice(1, 1 + length)
                for tails in (self.tail_keys, self.tail_values):
                    tails[:, target, :, own] = tails[:, source, :, own]


def cache_budget_bytes() -> int:
    """A share of the memory that is free: on the machine, and in this process's cgroup."""
    free = [_meminfo_available()]
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        free.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # no such file, or "max": no limit
        pass
    return int(MEMORY_SHARE * max(0, min(free)))


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")
