"""Which beginnings of a continuation fill a gap: where it is cut, so that it runs into the text that follows.

Pure functions of texts. Does not know models, tokens and the wire.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from shared.text import NOT_TEXT

# Scripts that put no spaces between words: a text may be cut after any of their letters.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_SPACED = rf"(?![{_UNSPACED}])\w"
_WORD = rf"[{_UNSPACED}]|(?:{_SPACED})+(?:['’](?:{_SPACED})+)*"
_PIECE = re.compile(rf"(?P<word>{_WORD})|[^\w\s]+")
_LEADING_WORD = re.compile(rf"(?:{_SPACED})+(?:['’](?:{_SPACED})+)*")
_ENDS_IN_WORD = re.compile(rf"{_SPACED}$")
# Before these a space is written: words of scripts that have spaces, and opening marks.
_NEEDS_SPACE = re.compile(rf"{_SPACED}|[“‘«(\[{{]|[\"'](?=\w)")
# A shorter common text may be a coincidence: "of the" is in many sentences, and in gaps before "of the".
_MEETING_PIECES = 2
# Longer gaps are filled by chance only.
MAX_FILLS = 10
# The probability that nothing is missing, before the text after the gap is read. From 0.03 to 0.3 little changes.
NOTHING_MISSING = math.log(0.3)
MIN_REST = 1e-3  # what the candidates leave, at least
# How much less likely the text after the gap is after other fills than after the best candidate, in nats. With 0, words
# of fills are right twice as often as stated; with 2, too seldom (`make bench BENCH=typist ARGS="--stated 600"`).
OTHERS_EVIDENCE = -1.5
_FIRST_WORD = re.compile(r"\W*\w*")


class FillScore(NamedTuple):
    """Log-probabilities: of a fill after the text before the gap, and of the text after the gap, given both."""

    prior: float
    evidence: float


def gap_fills(text: str, before: str, after: str, *, is_complete: bool) -> list[str]:
    """The beginnings of a continuation that can stand between the text before a gap and the text after it.

    Each ends at the end of a word, or of the punctuation after it, with the white space that the text after it lacks.
    Inside a word, it is what the word's parts lack: "er" of "erful day" before "ful". None repeats the beginning of the
    text after the gap, or goes past it, or past a character that is no text.

    Args:
        text: continues `before`.
        after: not blank.
        is_complete: the last word of `text` cannot be continued.

    Returns:
        Distinct texts, at most `MAX_FILLS`, the shortest first.
    """
    text, *rest = NOT_TEXT.split(text, maxsplit=1)
    word = found[0] if (found := _LEADING_WORD.match(after)) else ""
    is_inside_word = bool(word and _ENDS_IN_WORD.search(before[-1:]))
    joint = " " if _NEEDS_SPACE.match(after) else ""
    first = found[0].casefold() if (found := _PIECE.search(after)) else ""
    end = _meeting(text, after)
    fills: dict[str, None] = {}
    for piece in _PIECE.finditer(text):
        if is_inside_word:
            fill = text[: piece.end() - len(word)] if piece[0].endswith(word) else ""
            return [fill] if fill.strip() else []
        if piece[0] == word:
            fills[text[: piece.start()]] = None
        is_cut_short = piece.end() == len(text) and _ENDS_IN_WORD.search(text) and (rest or not is_complete)
        if piece.end() > end or is_cut_short:
            break
        is_end = piece["word"] or not text[piece.end() : piece.end() + 1].strip()
        if is_end and piece[0].casefold() != first:
            fills[text[: piece.end()] + joint] = None
    return [fill for fill in fills if fill.strip()][:MAX_FILLS]


def fill_probabilities(scores: Mapping[str, FillScore]) -> dict[str, float]:
    """The probability that each of the fills is what is missing, given the text before the gap and after it.

    By Bayes' rule: P(fill | text before) · P(text after | text before, fill), over the sum of it for all that may be
    missing. Fills that are not among the candidates have the probability that the first words of the candidates leave,
    and the text after follows them less well than the best candidate, by `OTHERS_EVIDENCE`.

    Args:
        scores: of the candidates. The empty one stands for nothing that is missing.
    """
    if not scores:
        return {}
    joint = {fill: score.prior + score.evidence for fill, score in scores.items()}
    by_length = sorted(filter(None, scores), key=len, reverse=True)
    first_words = {_FIRST_WORD.match(fill)[0]: scores[fill].prior for fill in by_length}  # type: ignore[index]
    rest = max(MIN_REST, 1 - sum(map(math.exp, first_words.values())))
    others = math.log(rest) + OTHERS_EVIDENCE + max(score.evidence for fill, score in scores.items() if fill)
    highest = max(others, *joint.values())
    total = math.exp(others - highest) + sum(math.exp(value - highest) for value in joint.values())
    return {fill: math.exp(value - highest) / total for fill, value in joint.items()}


def _meeting(text: str, after: str) -> int:
    """Where `text` runs into `after`: the index of the first character that they share; its length if they do not."""
    after = after.lstrip()
    pieces = list(_PIECE.finditer(after))[:_MEETING_PIECES]
    head = after[: pieces[-1].end()] if pieces else after
    starts = (piece.start() for piece in _PIECE.finditer(text))
    met = (start for start in starts if text.startswith(head, start) or after.startswith(text[start:]))
    return next(met, len(text))
