"""Truncates a long document to a prompt whose start does not move with every keystroke.

GPT-2's positions are absolute: if the window moved with each key, every token would change its position and no cached
KV could be reused. The window's start therefore stays where it is while the document grows (a sticky window), and moves
by about a quarter of the window when it has to. It is a function of the text alone, so the same request gets the same
prompt, and the same completion, whatever was requested before. Knows text and counts of tokens only.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable

from shared.text import MAX_CHARS_PER_TOKEN

_WORD_START = re.compile(r"\s(?=\S)")
# Text without white space for this many characters is cut anywhere.
_MAX_WORD_CHARS = 64


def encode_window(text: str, max_tokens: int, encode: Callable[[str], tuple[list[int], list[int]]]) -> list[int]:
    """Token ids of the end of `text`: all of it if it has at most `max_tokens` tokens, else about 3/4 of that or more.

    The window can start at `max_tokens`, 2 · `max_tokens`, … characters into the text (steps of about a quarter of the
    window in English prose), each moved forward to the start of the next word. It starts at the first of these from
    which the rest fits. Only a bounded part at the end of the text is encoded. Where characters take many tokens each,
    the result is the last `max_tokens` tokens.

    Args:
        encode: text to (token ids, index of the character at which each begins). It must encode words independently:
            the tokens from a word's start on are those of the text that begins there.
    """
    first = max(0, -(-(len(text) - MAX_CHARS_PER_TOKEN * max_tokens) // max_tokens))
    begin = _start(text, first * max_tokens)
    all_ids, starts = encode(text[begin:])
    if len(all_ids) <= max_tokens:
        return all_ids

    def encode_from(step: int) -> list[int]:
        start = _start(text, step * max_tokens)
        index = bisect_left(starts, start - begin)
        is_word_start = starts[index : index + 1] == [start - begin] and text[start].isspace()
        return all_ids[index:] if start == begin or is_word_start else encode(text[start:])[0]

    last = len(text) // max_tokens
    num_surplus_chars = (len(text) - first * max_tokens) * (len(all_ids) - max_tokens) // len(all_ids)
    step = min(last, first + num_surplus_chars // max_tokens)  # an estimate, corrected below
    ids = encode_from(step)
    while len(ids) > max_tokens and step < last:
        step += 1
        ids = encode_from(step)
    while step > first and len(longer := encode_from(step - 1)) <= max_tokens:
        step -= 1
        ids = longer
    if len(ids) > max_tokens or len(ids) < max_tokens // 2:
        return encode_from(step - 1)[-max_tokens:] if step > first else ids[-max_tokens:]
    return ids


def _start(text: str, index: int) -> int:
    """The start of the first word at or after `index`, including the space before it, so that words stay whole."""
    if index == 0:
        return 0
    found = _WORD_START.search(text, index, index + _MAX_WORD_CHARS)
    return found.start() if found else index
