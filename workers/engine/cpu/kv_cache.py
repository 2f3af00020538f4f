"""The CPU's KV cache: prompts in prefix-cache entries, each sequence's own tokens in a KV suffix.

Knows memory; the scheduler knows which tokens are where.

A prompt is stored once, however many sequences continue it; each sequence appends to its own suffix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.cpu.layouts import VECTOR
from workers.engine.scheduler_output import SUFFIX_TOKENS, Copy, EntryCopy, SuffixCopy, SuffixMove


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The dimensions of a KV cache, and the memory that it will take."""

    num_layers: int
    num_heads: int
    head_size: int
    n_ctx: int
    dtype: torch.dtype = torch.float32

    @property
    def entry_positions(self) -> int:
        return -(-self.n_ctx // VECTOR) * VECTOR

    @property
    def suffix_positions(self) -> int:
        return -(-SUFFIX_TOKENS // VECTOR) * VECTOR

    @property
    def value_width(self) -> int:
        return -(-self.head_size // VECTOR) * VECTOR

    @property
    def position_bytes(self) -> int:
        return self.num_layers * self.num_heads * (self.head_size + self.value_width) * self.dtype.itemsize

    def num_entries(self, memory_bytes: int, max_sequences: int) -> int:
        """How many prefix-cache entries fit next to `max_sequences` suffixes: 1 to `max_sequences`.

        Raises:
            MemoryError: if the suffixes and one entry do not fit.
        """
        left = memory_bytes - max_sequences * self.suffix_positions * self.position_bytes
        fitting = left // (self.entry_positions * self.position_bytes)
        if fitting < 1:
            raise MemoryError(
                f"{memory_bytes >> 20} MiB are too few for {max_sequences} sequences of this model; set a smaller batch"
            )
        return min(max_sequences, fitting)


class KVStore:
    """Keys and values of `number` places of equally many positions, in all layers.

    `keys` [layers, places, heads, blocks, head_size, VECTOR]: blocks of VECTOR positions, so that a vector instruction
    computes VECTOR scores. `values` [layers, places, heads, positions, value_width]. The system provides zeroed pages
    when they are first touched.
    """

    def __init__(self, shape: CacheShape, number: int, num_positions: int) -> None:
        first = (shape.num_layers, number, shape.num_heads)
        self.keys = torch.zeros(*first, num_positions // VECTOR, shape.head_size, VECTOR, dtype=shape.dtype)
        self.values = torch.zeros(*first, num_positions, shape.value_width, dtype=shape.dtype)

    @property
    def num_bytes(self) -> int:
        return self.keys.itemsize * (self.keys.numel() + self.values.numel())

    def read(self, place: int, length: int) -> tuple[Tensor, Tensor]:
        """The first `length` positions: keys [layers, heads, head_size, positions] and values."""
        keys = self.keys[:, place, :, : -(-length // VECTOR)].transpose(2, 3).flatten(3)
        return keys[..., :length], self.values[:, place, :, :length]

    def write(self, place: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values in the shapes that `read` returns, from position `start` on."""
        positions = torch.arange(start, start + keys.shape[3])
        # Advanced indices that are not adjacent put their dimension first.
        self.keys[:, place, :, positions // VECTOR, :, positions % VECTOR] = keys.permute(3, 0, 1, 2)
        self.values[:, place, :, start : start + values.shape[2]] = values


class KVCache:
    """Preallocated storage: prefix-cache entries and KV suffixes."""

    def __init__(self, shape: CacheShape, num_entries: int, max_sequences: int) -> None:
        self.entries = KVStore(shape, num_entries, shape.entry_positions)
        self.suffixes = KVStore(shape, max_sequences, shape.suffix_positions)
        self.num_bytes = self.entries.num_bytes + self.suffixes.num_bytes

    def copy(self, copy: Copy) -> None:
        """Copies the keys and values of some positions, in all layers."""
        match copy:
            case EntryCopy(source, target, length):
                # Whole blocks: positions past the length are written before they are read.
                blocks = slice(-(-length // VECTOR))
                self.entries.keys[:, target, :, blocks] = self.entries.keys[:, source, :, blocks]
                self.entries.values[:, target, :, :length] = self.entries.values[:, source, :, :length]
            case SuffixCopy(suffix, entry, start, length):
                self.entries.write(entry, start, *self.suffixes.read(suffix, length))
            case SuffixMove(source, target, length):
                self.suffixes.write(target, 0, *self.suffixes.read(source, length))
