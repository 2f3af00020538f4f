"""Tokens to text, one sequence at a time: whole characters only, nothing that a stop string takes back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from workers.text.stop_strings import StopMatcher

if TYPE_CHECKING:
    from workers.text.tokenizer import Tokenizer


class Detokenizer:
    """Tokens in, text out, one sequence's: whole characters only, nothing that a stop takes back.

    `"".join([*map(feed, ids), finish()])` is the text up to the first stop string, the same
    however the ids are spread over calls.
    """

    __slots__ = ("_decoder", "_matcher", "_num_typed_bytes", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, single_line: bool = False, num_forced_bytes: int = 0
    ) -> None:
        """
        Args:
            num_forced_bytes: how many bytes at the beginning are not new, and left out.
        """
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop, single_line=single_line)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_typed_bytes = num_forced_bytes

    def feed(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; it may be empty."""
        data = self._tokenizer.token_bytes(token_id)
        new = data[self._num_typed_bytes :]
        self._num_typed_bytes = max(0, self._num_typed_bytes - len(data))
        return self._decoder.decode(self._matcher.feed(new))

    def finish(self) -> str:
        """The rest, at the end; an unfinished last character is dropped."""
        return self._decoder.decode(self._matcher.finish())
