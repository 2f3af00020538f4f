"""Where in a long document the prompt begins.

GPT-2's positions are absolute: a window that slides with each key would shift every token, and nothing computed
for the last key could be used for the next. So the window's start holds still while the document grows, and
jumps by about a quarter of the window when it must. It depends on the text alone, on no history: the same
request gets the same prompt, and so the same text, whatever was asked before. Knows text and counts only.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable

# Where the search begins: English prose has four to five characters a token, so this much does not fit.
_MAX_CHARS_PER_TOKEN = 8
_WORD_START = re.compile(r"\s(?=\S)")
# A place without white space for so long is cut where it stands.
_MAX_WORD_CHARS = 64


def encode_window(text: str, max_tokens: int, encode: Callable[[str], tuple[list[int], list[int]]]) -> list[int]:
    """Token ids of the end of `text`: all of it if that is at most `max_tokens`, else some 3/4 of that or more.

    The start is one of the places `max_tokens`, 2 · `max_tokens`, … characters into the text (a quarter of the
    window in English prose), each moved on to the next word; the first from which the rest fits. Reads a bounded
    part of the text's end. Where characters are many tokens each, it is the last `max_tokens` tokens.

    Args:
        encode: text to token ids, and the character that each begins at. Words are encoded one by one: from the
            start of a word on, a text's tokens are those of what begins there.
    """
    first = max(0, -(-(len(text) - _MAX_CHARS_PER_TOKEN * max_tokens) // max_tokens))
    begin = _start(text, first * max_tokens)
    ids, starts = encode(text[begin:])
    all_ids = ids

    def encode_from(place: int) -> list[int]:
        start = _start(text, place * max_tokens)
        index = bisect_left(starts, start - begin)
        is_word_start = starts[index : index + 1] == [start - begin] and text[start].isspace()
        return all_ids[index:] if start == begin or is_word_start else encode(text[start:])[0]

    if len(ids) <= max_tokens:
        return ids
    last = len(text) // max_tokens
    num_surplus_chars = (len(text) - first * max_tokens) * (len(ids) - max_tokens) // len(ids)
    place = min(last, first + num_surplus_chars // max_tokens)  # near where it will be
    ids = encode_from(place)
    while len(ids) > max_tokens and place < last:
        place += 1
        ids = encode_from(place)
    while place > first and len(longer := encode_from(place - 1)) <= max_tokens:
        place -= 1
        ids = longer
    if len(ids) > max_tokens or len(ids) < max_tokens // 2:
        return encode_from(place - 1)[-max_tokens:] if place > first else ids[-max_tokens:]
    return ids


def _start(text: str, place: int) -> int:
    """The first word's start from `place` on, its space included, so that words stay whole."""
    if place == 0:
        return 0
    found = _WORD_START.search(text, place, place + _MAX_WORD_CHARS)
    return found.start() if found else place
