"""The interrupt flag, which ends a multi-step decode after its current step."""

from __future__ import annotations

from array import array


class Interrupt:
    """A flag in memory that compiled code can poll. Any thread may set it.

    Attributes:
        address: address of an int64, other than 0 while the flag is set.
    """

    def __init__(self) -> None:
        self._memory = array("q", (0,))
        self.address = self._memory.buffer_info()[0]

    def set(self) -> None:
        self._memory[0] = 1

    def clear(self) -> None:
        self._memory[0] = 0
