"""Where a completion may end, and which are not worth showing. Pure: knows texts and counts of tokens.

A completion is cut where its tokens ran out, which is seldom where a writer would stop. It is cut back to the
end of a word, or of a sentence if one ends in its last third; a text that ended by itself stays as it is. The
same is done to a text that arrives piece by piece: nothing is let go that would have to be taken back.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from operator import eq

from rapidfuzz import fuzz

# Fewer tokens than this may not hold a whole word; those past the length asked for only finish one.
MIN_TOKENS = 6
# A sentence's end is taken where it lies past this share of the tokens asked for.
LAST_THIRD = 2 / 3

# Scripts that put no spaces between words: a text may end after any of their letters.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_CLOSING = "\"'”’)\\]»"
# A word and its marks in front of white space, a word in front of a dash, or a letter that is a word.
_WORD_END = re.compile(rf"\w[^\w\s]*(?=\s)|\w(?=—|–|--)|[{_UNSPACED}]")
_SENTENCE_END = re.compile(rf"[.!?…]+[{_CLOSING}]*(?=\s+[^\sa-z])|[。！？]")
# The same where nothing follows.
_LAST_SENTENCE_END = re.compile(rf"[.!?…]+[{_CLOSING}]*$")
_LAST_WORD_END = re.compile(rf"[^\W\d][.,;:!?…{_CLOSING}]*[.,;:!?…\"”)\]»]$")
# Where no white space has come: the end of a word in an address or a path.
_INNER_WORD_END = re.compile(r"\w(?=[^\w\s'’-])")
_LAST_CHUNK = re.compile(r"\S+$")
_WORD = re.compile(r"\w+")
# What a full stop does not end: short forms, and initials.
_SHORT_FORM = re.compile(
    r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|St|Prof|Rev|Hon|Capt|Col|Gen|Lt|Sgt|Maj|Messrs|Mme|Mlle|Jr|Sr|No|Vol|vol|pp|vs|cf"
    r"|etc|e\.g|i\.e|viz)\.$"
)

_MARKS = ".,;:!?…\"'“”‘’()[]«»_*-–—"
_MARKS_IN_A_LOOP = re.compile(r"(\S.{0,3}?)\1{5,}")
# How much of the context can be part of a loop.
_CONTEXT_CHARS = 200
# Four words said twice are a loop; three may be a figure of speech.
_LONG_PHRASE = 4
MAX_PHRASE = 12  # words


class Trimmer:
    """One completion as it comes, token by token."""

    __slots__ = ("_ends", "_has_late_end", "_is_literal", "_length", "_num_released", "_text")

    def __init__(self, length: int, *, is_literal: bool = False) -> None:
        """
        Args:
            length: tokens asked for.
            is_literal: a text without a whole word stays, as it is.
        """
        self._length = length
        self._is_literal = is_literal
        self._text = ""
        self._ends: list[int] = []  # characters there after each token
        self._num_released = 0  # characters
        self._has_late_end = False  # a sentence has ended in the last third

    @property
    def text(self) -> str:
        """All that has been let go."""
        return self._text[: self._num_released]

    def feed(self, piece: str) -> str:
        """What is certain to stay, now that the next token's text has come."""
        self._text += piece
        self._ends.append(len(self._text))
        return self._release(self._certain_end()) if piece else ""

    def take(self, text: str, ends: Sequence[int]) -> None:
        """All tokens at once, instead of by `feed`; what is certain then is what would have become so."""
        self._text, self._ends = text[: ends[-1]] if ends else "", list(ends)
        self._release(self._certain_end())

    def finish(self, finish_reason: str) -> str:
        """The rest that stays, at the end."""
        if finish_reason in {"eos", "stop"}:
            return self._release(len(self._text.rstrip()))
        end = self._last_end() or self._inner_end()
        return self._release(end or (len(self._text.rstrip()) if self._is_literal else 0))

    def _release(self, end: int) -> str:
        start, self._num_released = self._num_released, max(end, self._num_released)
        return self._text[start : self._num_released]

    def _certain_end(self) -> int:
        """Where the text can end whatever follows: a late end of a sentence, else an end of a word."""
        begin = self._text.rfind(" ", 0, self._num_released) + 1  # what follows a word may show that it ends a sentence
        sentence_ends = [
            found.end()
            for found in _SENTENCE_END.finditer(self._text, begin)
            if self._is_in_reach(found.start()) and self._is_late_sentence_end(found.end())
        ]
        if sentence_ends:
            self._has_late_end = True
            return sentence_ends[-1]
        if self._has_late_end:
            return self._num_released
        word_ends = (found for found in _WORD_END.finditer(self._text, begin) if self._is_in_reach(found.start()))
        return max((found.end() for found in word_ends), default=0)

    def _last_end(self) -> int:
        """Where the text ends, now that nothing follows."""
        text = self._text.rstrip()
        if text and self._is_in_reach(len(text) - 1):
            found = _LAST_SENTENCE_END.search(text)
            if found is not None and self._is_late_sentence_end(found.end()):
                return len(text)
            if not self._has_late_end and _LAST_WORD_END.search(text):
                return len(text)
        return self._num_released

    def _inner_end(self) -> int:
        return max((found.end() for found in _INNER_WORD_END.finditer(self._text)), default=0)

    def _is_in_reach(self, place: int) -> bool:
        """Whether the word at `place` begins within the tokens asked for."""
        if len(self._ends) <= self._length:
            return True
        found = _LAST_CHUNK.search(self._text[: place + 1])
        return found is None or found.start() < self._ends[self._length - 1]

    def _is_late_sentence_end(self, end: int) -> bool:
        num_tokens = bisect_left(self._ends, end) + 1
        return num_tokens > LAST_THIRD * self._length and not _SHORT_FORM.search(self._text[:end])


def clean(text: str, ends: Sequence[int], length: int, finish_reason: str, *, is_literal: bool = False) -> str:
    """A completion that is there already.

    Args:
        ends: characters of `text` that are there after each token.
        length, is_literal: as `Trimmer` has them.
    """
    cleaner = Trimmer(length, is_literal=is_literal)
    cleaner.take(text, ends)
    cleaner.finish(finish_reason)
    return cleaner.text


def fault(text: str, context: str) -> str | None:
    """Why a completion of `context` is not worth showing, or None.

    "loop": a word three times on end (four times with marks between them: "no, no, no" is said), a few words three
    times, more of them twice, or a mark over and over; "repeats_context": it begins by saying again what the context
    ends with.
    """
    if _MARKS_IN_A_LOOP.search(text):
        return "loop"
    before = context[-_CONTEXT_CHARS:]
    plain = (before + text).casefold().split()
    words = [word.strip(_MARKS) or word for word in plain]  # marks alone stay
    is_one_word = bool(before and text) and not (before[-1].isspace() or text[0].isspace())  # where they meet
    num_old = len(before.split()) - is_one_word
    if _has_loop(plain, num_old, 1, 3) or _has_loop(words, num_old, 1, 4):
        return "loop"
    for size in range(2, min(MAX_PHRASE, len(words) // 2) + 1):
        if _has_loop(words, num_old, size, 3 if size < _LONG_PHRASE else 2):
            return "loop"
    ended = _WORD.match(before[-1:]) and text[:1].isspace()
    for size in range(1, min(MAX_PHRASE, num_old, len(words) - num_old) + 1):
        if words[num_old - size : num_old] == words[num_old : num_old + size] and (size > 1 or ended):
            return "repeats_context"
    return None


def _has_loop(words: list[str], num_old: int, size: int, num_times: int) -> bool:
    """Whether `size` words come `num_times` on end, and not all among the first `num_old`."""
    is_as_before = bytes(map(eq, words[size:], words))  # of each word from `size` on, as the one so many before it
    run = size * (num_times - 1)
    return is_as_before.find(b"\1" * run, max(0, num_old + 1 - size - run)) >= 0


def is_alike(one: str, other: str, similarity: float) -> bool:
    """Whether a reader would take two completions for one: their words (case and marks left out) are the same up to
    the end of one of them, or as a whole at least `similarity` percent so.

    The figure is rapidfuzz's `ratio`: twice the length of the longest common subsequence, by the lengths of both.
    """
    a, b = (" ".join(_WORD.findall(text.casefold())) for text in (one, other))
    return f"{a} ".startswith(f"{b} ") or f"{b} ".startswith(f"{a} ") or fuzz.ratio(a, b) >= similarity
