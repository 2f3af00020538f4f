"""Token constraints, and token healing, which is built on them.

A context that ends mid-word or in white space ends in tokens that the model rarely saw there in training, so its
continuation is poor. Token healing backs up to the last word boundary and constrains the output to begin with what was
typed of that word. Knows a tokenizer's vocabulary. Does not know models, sampling and the wire.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from workers.text.tokenizer import Tokenizer
from workers.text.typography import SPACES

# A longer word (in a text without spaces) has only its last tokens healed.
MAX_FORCED_BYTES = 32
# How far back the start of the last word is looked for.
_MAX_WORD_CHARS = 64


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that may come next, as ids.

    Attributes:
        allowed: may come in any case; ascending.
        if_likeliest: may come too if no other token of the whole vocabulary has a higher logit; ascending.
        longer: those of `allowed` and `if_likeliest` that carry text past the forced prefix.
        table: int32 [allowed + if_likeliest], both lists one after the other, for kernels.
        longer_table: int64 [longer], ascending. After a space there are tens of thousands: too many to list in a step.
    """

    allowed: tuple[int, ...]
    if_likeliest: tuple[int, ...]
    longer: frozenset[int]
    table: Any = field(init=False, compare=False)
    longer_table: Any = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", np.array(self.allowed + self.if_likeliest, np.int32))
        object.__setattr__(self, "longer_table", np.array(sorted(self.longer), np.int64))


class ForcedPrefix:
    """What restricts the tokens of one sequence: its text must begin with certain bytes. Follows the accepted tokens.

    Attributes:
        num_forced: accepted tokens that carry no text of their own, only text that was required.
    """

    def __init__(self, healing: TokenHealing, prefix: bytes) -> None:
        self._healing = healing
        self._rest = prefix  # what is not generated yet
        self.num_forced = 0

    def allowed_next(self, ahead: Sequence[int] = ()) -> AllowedTokens | None:
        """Tokens allowed after the accepted ones and then those of `ahead`; None if any token is."""
        rest = self._rest
        if rest and ahead:
            rest = rest[sum(len(self._healing.token_bytes(id_)) for id_ in ahead) :]
        return self._healing.allowed_tokens(rest) if rest else None

    def accept(self, token_id: int) -> int:
        """Takes the next generated token. Returns how many of its first bytes were required."""
        if not self._rest:
            return 0
        data = self._healing.token_bytes(token_id)
        num_required = min(len(data), len(self._rest))
        self._rest = self._rest[num_required:]
        self.num_forced += num_required == len(data)
        return num_required


class TokenHealing:
    """Splits prompts for healing, and lists the tokens that may begin a text. Thread-safe.

    It takes memory and time in proportion to the vocabulary, so a model has one (`LoadedModel.healing`).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.token_bytes = tokenizer.token_bytes
        by_bytes = sorted((data, id_) for id_ in range(tokenizer.vocab_size) if (data := tokenizer.token_bytes(id_)))
        self._sorted_bytes = [data for data, _ in by_bytes]
        self._sorted_ids = [id_ for _, id_ in by_bytes]
        self._id_of = dict(reversed(by_bytes))  # of tokens with equal bytes, the smallest id
        self.allowed_tokens = lru_cache(maxsize=1024)(self._allowed_tokens)

    def split(self, text: str) -> tuple[str, bytes]:
        """`text` before its last word, and that word as UTF-8 bytes, with the space before it: the forced prefix.

        Spaces at the end become plain ones: after others, models write a second one.
        A word is what the pre-tokenizer never joins with what precedes it: letters, digits, marks or white space.
        If the text is a single word, its first token stays in the prompt. Of a word longer than MAX_FORCED_BYTES only
        the last tokens are forced. A word with a byte that is no token of its own is not healed: tokens that begin it
        might not lead to its end. SmolLM2 lacks 21 bytes: of control characters, and of no assigned character's UTF-8.
        """
        if not text:
            return text, b""
        stem = text.rstrip(f" {SPACES}")
        text = stem + " " * (len(text) - len(stem))
        end = text[-_MAX_WORD_CHARS:].encode("utf-8", "replace").decode()
        start = self.tokenizer.last_word_start(end)
        word = end[start:]
        if start == 0 or len(word.encode()) > MAX_FORCED_BYTES:
            word = self._last_tokens(word)
        if not all(bytes([byte]) in self._id_of for byte in word.encode()):
            return text, b""
        return text[: len(text) - len(word)], word.encode()

    def _last_tokens(self, word: str) -> str:
        """The longest end of `word` in whole tokens and characters, at most MAX_FORCED_BYTES long and not all of it."""
        _, starts = self.tokenizer.encode_with_starts(word, special_as_text=True)
        fitting = [start for start in starts if start > 0 and len(word[start:].encode()) <= MAX_FORCED_BYTES]
        return word[min(fitting, default=len(word)) :]

    def _allowed_tokens(self, prefix: bytes) -> AllowedTokens:
        """The tokens that may come first in a text that must begin with `prefix` (not empty).

        Allowed are all tokens that begin with all of `prefix`. Of the tokens that are a part of it, those are allowed
        that the tokenizer would choose: as the first token of `prefix`, and of `prefix` followed by a letter. Any other
        part leads to tokens that the model never saw in training, even if it is likely as the start of another word
        (" f" of " fishwife"); it is allowed only if it is the likeliest token of all. If `prefix` is a token that no
        longer token begins with, it mostly is a whole word, and only that token is allowed (for " they" not " the",
        which would have to be continued with "y").
        """
        first = bisect_left(self._sorted_bytes, prefix)
        following = range(first, len(self._sorted_bytes))
        matching = takewhile(lambda at: self._sorted_bytes[at].startswith(prefix), following)
        whole = {self._sorted_ids[at] for at in matching}
        longer = frozenset(id_ for id_ in whole if len(self.token_bytes(id_)) > len(prefix))
        parts = {self._id_of[prefix[:n]] for n in range(1, len(prefix)) if prefix[:n] in self._id_of}
        if whole and not longer:
            parts = set()
        firsts = (self._first_token(prefix), self._first_token(prefix + b"a"))
        usual = {id_ for id_ in firsts if id_ in parts or id_ in whole}
        allowed = whole | (usual or parts)
        return AllowedTokens(tuple(sorted(allowed)), tuple(sorted(parts - allowed)), longer)

    def _first_token(self, data: bytes) -> int:
        """The id of the first token of `data`; -1 if the bytes are not text."""
        ids = self.tokenizer.encode(data.decode("utf-8", "ignore"), special_as_text=True)
        return ids[0] if ids else -1
