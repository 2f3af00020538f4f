"""Keys and values of what has been computed: prompts in entries, and branches' own tokens in suffixes.

Knows memory. Refuses to know which tokens are where: the scheduler does.

A prompt is kept once, however many branches continue it. A branch adds to a suffix of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.scheduler_output import SUFFIX_TOKENS, Copy, EntryCopy, SuffixCopy, SuffixMove

# Floats that are computed at once. Keys lie in blocks of so many positions, side by side: a vector instruction
# computes a score of each. A value's width is rounded up to it.
VECTOR = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The measures of a cache; tells what it takes before it is made."""

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
        """Prompts that fit beside `max_sequences` suffixes: at least one, and no more than suffixes.

        Raises:
            MemoryError: if not even the suffixes and one prompt fit.
        """
        left = memory_bytes - max_sequences * self.suffix_positions * self.position_bytes
        fitting = left // (self.entry_positions * self.position_bytes)
        if fitting < 1:
            raise MemoryError(
                f"{memory_bytes >> 20} MiB are too few for {max_sequences} sequences of this model; set a smaller batch"
            )
        return min(max_sequences, fitting)


class Places:
    """Keys and values of equal stretches of positions, in all layers.

    `keys` [layers, places, heads, blocks, head_size, VECTOR] and `values` [layers, places, heads, positions,
    value_width]. The system gives zeroed memory where it is first touched, and only there.
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
        """Stores what `read` gave, from position `start` on."""
        positions = torch.arange(start, start + keys.shape[3])
        # Indices that are apart put their dimension first.
        self.keys[:, place, :, positions // VECTOR, :, positions % VECTOR] = keys.permute(3, 0, 1, 2)
        self.values[:, place, :, start : start + values.shape[2]] = values


class KVCache:
    """Static storage: entries for prompts, and suffixes."""

    def __init__(self, shape: CacheShape, num_entries: int, max_sequences: int) -> None:
        self.entries = Places(shape, num_entries, shape.entry_positions)
        self.suffixes = Places(shape, max_sequences, shape.suffix_positions)
        self.num_bytes = self.entries.num_bytes + self.suffixes.num_bytes

    def copy(self, one: Copy) -> None:
        """Copies tokens from place to place, in all layers."""
        match one:
            case EntryCopy(source, target, length):
                # Whole blocks: what lies past the length is written before it is seen.
                blocks = slice(-(-length // VECTOR))
                self.entries.keys[:, target, :, blocks] = self.entries.keys[:, source, :, blocks]
                self.entries.values[:, target, :, :length] = self.entries.values[:, source, :, :length]
            case SuffixCopy(suffix, entry, start, length):
                self.entries.write(entry, start, *self.suffixes.read(suffix, length))
            case SuffixMove(source, target, length):
                self.suffixes.write(target, 0, *self.suffixes.read(source, length))
