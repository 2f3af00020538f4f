"""Token ids to text, incrementally, for one sequence, up to its first stop string.

Emits whole UTF-8 characters only, and no text that a stop string would remove again.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from workers.text.tokenizer import Tokenizer


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


class CharacterIndex:
    """Finds where tokens begin in the text that they make up, in characters, token by token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.num_chars = 0  # whole ones

    def feed(self, data: bytes) -> int:
        """Where the token of these bytes begins; inside a character, where the character does."""
        is_in_character = bool(self._decoder.getstate()[0])
        begin = self.num_chars
        self.num_chars += len(self._decoder.decode(data))
        # Any other byte begins a character, so the incomplete one before it is U+FFFD.
        is_continued = 0x80 <= data[0] < 0xC0 if data else True
        return begin + 1 if is_in_character and not is_continued else begin


class Detokenizer:
    """Decodes one sequence token by token.

    `"".join([*map(feed, ids), finish()])` is the text up to the first stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, single_line: bool = False, num_forced_bytes: int = 0
    ) -> None:
        """
        Args:
            stop: stop strings; the text ends before the first of them.
            single_line: stop at a line feed as well.
            num_forced_bytes: bytes at the start of the output that repeat the prompt's last word (token healing); they
                are left out of the text.

        Raises:
            ValueError: a stop string is empty.
        """
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop, single_line=single_line)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_skipped_bytes = num_forced_bytes  # still to come

    def feed(self, token_id: int) -> str:
        """The text delta of `token_id`; empty while a character is incomplete or a stop string may have begun."""
        data = self._tokenizer.token_bytes(token_id)
        new = data[self._num_skipped_bytes :]
        self._num_skipped_bytes = max(0, self._num_skipped_bytes - len(data))
        return self._decoder.decode(self._matcher.feed(new))

    def finish(self) -> str:
        """The text that was held back, once the sequence has ended; an incomplete last character is dropped."""
        return self._decoder.decode(self._matcher.finish())


def _overlap(data: bytes, stop: bytes) -> int:
    """Length of the longest suffix of `data` that is a proper prefix of `stop`."""
    for length in range(min(len(data), len(stop) - 1), 0, -1):
        if data.endswith(stop[:length]):
            return length
    return 0
