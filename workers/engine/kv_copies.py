"""Copies of keys and values from one place of the KV cache to another, as plain values, and the size of a KV suffix.

The prefix cache plans the copies, the KV cache of a device makes them. Does not know tensors and devices.
"""

from __future__ import annotations

from dataclasses import dataclass

# Positions of a KV suffix: with the last position of the prompt, a whole number of the attention kernel's blocks.
SUFFIX_TOKENS = 255


@dataclass(frozen=True, slots=True)
class EntryCopy:
    """Copies the first `length` tokens of the prefix-cache entry `source` to the entry `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class SuffixCopy:
    """Copies the first `length` tokens of the KV suffix `suffix` to `entry`, from position `start` on."""

    suffix: int
    entry: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SuffixMove:
    """Copies the first `length` tokens of the KV suffix `source` to the KV suffix `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class EntryRelease:
    """Returns the memory of a prefix-cache entry to the system."""

    entry: int


Copy = EntryCopy | SuffixCopy | SuffixMove | EntryRelease
