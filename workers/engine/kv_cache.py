"""Keys and values of what has been computed, one slot for one sequence.

Knows memory. Refuses to know which tokens a slot holds: the scheduler does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.attention import COLUMNS, value_width


class KVCache:
    """Static storage: every slot has room for the model's whole context.

    Memory is zeroed by the system when it is first touched, so slots cost what was written to them.
    """

    def __init__(
        self, num_slots: int, num_layers: int, num_heads: int, head_size: int, n_ctx: int
    ) -> None:
        positions = -(-n_ctx // COLUMNS) * COLUMNS
        shape = (num_layers, num_slots, num_heads, positions)
        self._head_size = head_size
        self._keys = torch.zeros(*shape, head_size)
        self._values = torch.zeros(*shape, value_width(head_size))

    def write(self, layer: int, slot: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values, each [rows, heads, head_size], from position `start` on."""
        place = slice(start, start + len(keys))
        self._keys[layer, slot, :, place] = keys.transpose(0, 1)
        cell = self._values[layer, slot, :, place]
        cell[..., : self._head_size] = values.transpose(0, 1)
        cell[..., self._head_size] = 1

    def read(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """[heads, positions, head_size] keys and [heads, positions, value_width] values."""
        return self._keys[layer, slot], self._values[layer, slot]
