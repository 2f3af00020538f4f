"""The flag that ends a multi-step call after its current step."""

from __future__ import annotations

from array import array


class Interrupt:
    """Rung by whoever wants another plan: of steps in one call, the one under way is then the last.

    `address` is that of an int64, 0 while it is silent. Any thread may ring it.
    """

    def __init__(self) -> None:
        self._memory = array("q", (0,))
        self.address = self._memory.buffer_info()[0]

    def set(self) -> None:
        self._memory[0] = 1

    def clear(self) -> None:
        self._memory[0] = 0
