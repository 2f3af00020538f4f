"""The KV cache on a GPU: an array of KV slots, in which prefix-cache entries and KV suffixes are ranges.

A KV slot holds the key and value of one token for all heads, so a token is stored with one copy. A sequence is read by
the indices of its slots, so one that starts in an entry and continues in a suffix needs no special case. Knows memory.
Does not know which tokens are where: the scheduler does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared import free_memory
from shared.memory_plan import SUFFIX_TOKENS
from workers.engine.batch import Copy, EntryCopy, EntryRelease, SuffixCopy, SuffixMove
from workers.engine.failures import LoadFailure
from workers.engine.model.config import ModelConfig

# Share of the free memory for an engine without a memory plan: CUDA graphs and other processes need some, too.
MEMORY_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The ranges of the KV slots: `n_ctx` for each entry, SUFFIX_TOKENS for each suffix, then the dummy slot."""

    num_entries: int
    max_sequences: int
    n_ctx: int

    @property
    def num_slots(self) -> int:
        return self.dummy_slot + 1

    @property
    def dummy_slot(self) -> int:
        """KV slot written by padding rows; its contents are ignored."""
        return self.first_of_suffix(self.max_sequences)

    def first_of_entry(self, index: int) -> int:
        """The first slot of an entry."""
        return index * self.n_ctx

    def first_of_suffix(self, index: int) -> int:
        """The first slot of a suffix."""
        return self.num_entries * self.n_ctx + index * SUFFIX_TOKENS

    def ranges(self, copy: Copy) -> tuple[int, int, int]:
        """The first slot that a copy reads, the first that it writes, and the number of slots."""
        match copy:
            case EntryCopy(source, target, length):
                return self.first_of_entry(source), self.first_of_entry(target), length
            case SuffixCopy(suffix, entry, start, length):
                return self.first_of_suffix(suffix), self.first_of_entry(entry) + start, length
            case SuffixMove(source, target, length):
                return self.first_of_suffix(source), self.first_of_suffix(target), length
            case EntryRelease():
                raise AssertionError("on a GPU entries keep their memory")


class KVCache:
    """Memory that stays where it is: `layers` [layers, slots, 2, KV heads, head_size]."""

    def __init__(
        self,
        config: ModelConfig,
        max_sequences: int,
        dtype: torch.dtype,
        device: torch.device,
        memory_bytes: int | None = None,
    ) -> None:
        """
        Args:
            memory_bytes: what the cache may take; by default MEMORY_SHARE of the free memory.

        Raises:
            LoadFailure: if `memory_bytes` are not free.
            MemoryError: if the suffixes and one entry do not fit in `memory_bytes`.
        """
        slot_shape = (2, config.num_kv_heads, config.head_size)
        slot_bytes = config.n_layer * 2 * config.kv_width * dtype.itemsize
        if memory_bytes is None:
            memory_bytes = device_budget_bytes(device)
        else:
            _check_free(device, memory_bytes)
        left = memory_bytes - (max_sequences * SUFFIX_TOKENS + 1) * slot_bytes
        num_entries = min(max_sequences, left // (config.n_positions * slot_bytes))
        if num_entries < 1:
            raise MemoryError(
                f"{memory_bytes >> 20} MiB do not hold {max_sequences} sequences of this model; set a smaller batch"
            )
        self.layout = SlotLayout(num_entries, max_sequences, config.n_positions)
        self.num_bytes = self.layout.num_slots * slot_bytes
        # Zeroed, as masked values are multiplied by 0 and must not be NaN.
        self.layers = torch.zeros(config.n_layer, self.layout.num_slots, *slot_shape, dtype=dtype, device=device)

    def clear(self) -> None:
        """Zeroes all keys and values."""
        self.layers.zero_()

    def write(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Stores [rows, 2, heads, head_size] in `slots` [rows]."""
        self.layers[layer].index_copy_(0, slots, keys_values)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """`slots` [sequences, length] → keys and values, each [sequences, heads, length, head_size]."""
        gathered = self.layers[layer].index_select(0, slots.flatten())
        keys, values = gathered.view(*slots.shape, *gathered.shape[1:]).permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def copy(self, copy: Copy) -> None:
        """Copies the keys and values of tokens in all layers."""
        source, target, length = self.layout.ranges(copy)
        self.layers[:, target : target + length] = self.layers[:, source : source + length]


def device_budget_bytes(device: torch.device) -> int:
    """MEMORY_SHARE of the device's free memory."""
    return int(MEMORY_SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """The device's free memory, as its driver reports it now."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory.free_bytes()


def _check_free(device: torch.device, memory_bytes: int) -> None:
    """
    Raises:
        LoadFailure: another process has allocated what the plan gives to this worker.
    """
    if (free := free_bytes(device)) < memory_bytes:
        raise LoadFailure(
            f"The GPU has {free >> 20} MiB free, and the KV cache of this worker needs {memory_bytes >> 20} MiB: end "
            "the other processes on this GPU (nvidia-smi lists them), or lower TERCET_MAX_BATCH or the counts in "
            "TERCET_MODELS."
        )
