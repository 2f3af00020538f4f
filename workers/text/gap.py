"""Which beginnings of a continuation fill a gap: where it is cut, so that it runs into the text that follows.

Pure functions of texts. Does not know models, tokens and the wire.
"""

from __future__ import annotations

import re

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


def _meeting(text: str, after: str) -> int:
    """Where `text` runs into `after`: the index of the first character that they share; its length if they do not."""
    after = after.lstrip()
    pieces = list(_PIECE.finditer(after))[:_MEETING_PIECES]
    head = after[: pieces[-1].end()] if pieces else after
    starts = (piece.start() for piece in _PIECE.finditer(text))
    met = (start for start in starts if text.startswith(head, start) or after.startswith(text[start:]))
    return next(met, len(text))
