"""Finds stop strings in a stream of bytes. Does not know tokens or tokenizers."""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Passes a stream of bytes through up to the first stop string.

    Bytes that may be the start of a stop string are held back until later bytes decide.
    """

    def __init__(self, stops: Iterable[str], *, single_line: bool = False) -> None:
        """
        Args:
            single_line: a line feed is a stop string as well.

        Raises:
            ValueError: a stop string is empty.
        """
        self._stops = [stop.encode("utf-8", "replace") for stop in stops]
        if single_line:
            self._stops.append(b"\n")
        if not all(self._stops):
            raise ValueError("a stop string must not be empty")
        self._held = b""
        self.has_stopped = False

    def feed(self, data: bytes) -> bytes:
        """The bytes that no stop string can remove any more. After a complete stop string there are none."""
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
        """The held-back bytes, once the stream has ended."""
        held, self._held = self._held, b""
        return held


def _overlap(data: bytes, stop: bytes) -> int:
    """Length of the longest suffix of `data` that is a proper prefix of `stop`."""
    for length in range(min(len(data), len(stop) - 1), 0, -1):
        if data.endswith(stop[:length]):
            return length
    return 0
