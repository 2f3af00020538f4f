"""The CPU's KV cache: prompts in prefix-cache entries, each sequence's own tokens in a KV suffix.

Knows memory; the scheduler knows which tokens are where.

A prompt is stored once, however many sequences continue it; each sequence appends to its own suffix. Addresses are
reserved for all of them; a page takes memory once it is written to, until its entry is released.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from shared.memory_plan import SUFFIX_TOKENS
from workers.engine.batch import Copy, EntryCopy, EntryRelease, SuffixCopy, SuffixMove
from workers.engine.cpu.layouts import VECTOR

_MADV_NOHUGEPAGE = getattr(mmap, "MADV_NOHUGEPAGE", None)  # absent where the system has no huge pages


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The dimensions of a KV cache, and the memory that it will take."""

    num_layers: int
    num_heads: int  # of keys and values
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

    @property
    def suffix_bytes(self) -> int:
        return self.suffix_positions * self.position_bytes

    def max_entry_tokens(self, memory_bytes: int, max_sequences: int) -> int:
        """How many tokens in prefix-cache entries fit next to `max_sequences` suffixes.

        Raises:
            MemoryError: if the suffixes and one entry do not fit.
        """
        fitting = (memory_bytes - max_sequences * self.suffix_bytes) // self.position_bytes
        if fitting < self.entry_positions:
            raise MemoryError(
                f"{memory_bytes >> 20} MiB are too few for {max_sequences} sequences of this model; set a smaller batch"
            )
        return fitting


class KVStore:
    """Keys and values of `number` places of equally many positions, in all layers.

    `keys` [layers, places, heads, blocks, head_size, VECTOR]: blocks of VECTOR positions, so that a vector instruction
    computes VECTOR scores. `values` [layers, places, heads, positions, value_width].
    """

    def __init__(self, shape: CacheShape, number: int, num_positions: int) -> None:
        first = (shape.num_layers, number, shape.num_heads)
        self.keys, self._key_pages = _reserve((*first, num_positions // VECTOR, shape.head_size, VECTOR), shape.dtype)
        self.values, self._value_pages = _reserve((*first, num_positions, shape.value_width), shape.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of addresses; as many of memory once every position has been written."""
        return self.keys.itemsize * (self.keys.numel() + self.values.numel())

    def release(self, place: int) -> None:
        """Returns the memory of a place to the system. Its numbers become zeros, except where they share a
        page with another place."""
        for pages, numbers in ((self._key_pages, self.keys), (self._value_pages, self.values)):
            num_bytes = numbers.stride(1) * numbers.itemsize
            for layer in range(numbers.shape[0]):
                first = (layer * numbers.shape[1] + place) * num_bytes
                start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
                length = (first + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
                if length > 0:
                    pages.madvise(mmap.MADV_DONTNEED, start, length)

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
    """Storage: prefix-cache entries and KV suffixes."""

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
            case EntryRelease(entry):
                self.entries.release(entry)
            case SuffixCopy(suffix, entry, start, length):
                self.entries.write(entry, start, *self.suffixes.read(suffix, length))
            case SuffixMove(source, target, length):
                self.suffixes.write(target, 0, *self.suffixes.read(source, length))


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, mmap.mmap]:
    """Zeros that take memory page by page as they are written, and the pages."""
    pages = mmap.mmap(-1, prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if _MADV_NOHUGEPAGE is not None:  # the first token of a head would take 2 MiB
        pages.madvise(_MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape), pages
