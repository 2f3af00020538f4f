"""Stop strings in a stream of bytes.

Knows bytes only; refuses to know tokens and tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Finds the first stop string in a stream of bytes, and says which bytes it cannot concern.

    Bytes that may be the beginning of a stop string are held back until the next ones decide.
    """

    __slots__ = ("_held", "_stops", "has_stopped")

    def __init__(self, stops: Iterable[str], *, single_line: bool = False) -> None:
        """
        Raises:
            ValueError: if a stop string is empty.
        """
        self._stops = [stop.encode("utf-8", "replace") for stop in stops]
        if single_line:
            self._stops.append(b"\n")
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
        self._held = b""
        self.has_stopped = False

    def feed(self, data: bytes) -> bytes:
        """The bytes that are free to go; after a stop string, those before it and then none."""
        if self.has_stopped:
            return b""
        if not self._stops:
            return data
        data = self._held + data
        starts = [start for stop in self._stops if (start := data.find(stop)) >= 0]
        if starts:
            self.has_stopped = True
            self._held = b""
            return data[: min(starts)]
        num_held = max(_overlap(data, stop) for stop in self._stops)
        self._held = data[len(data) - num_held :]
        return data[: len(data) - num_held]

    def finish(self) -> bytes:
        """The bytes held back, when nothing more comes."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, stop: bytes) -> int:
    """Length of the longest end of `data` that is a proper beginning of `stop`."""
    for length in range(min(len(data), len(stop) - 1), 0, -1):
        if data.endswith(stop[:length]):
            return length
    return 0
