"""Token ids to text, incrementally, for one sequence.

Emits whole UTF-8 characters only, and no text that a stop string would remove again.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from workers.text.stop_strings import StopMatcher
from workers.text.tokenizer import Tokenizer


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
