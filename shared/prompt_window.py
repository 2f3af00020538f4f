"""The end of a long text that can be part of a prompt. Gateway and worker agree on it. Pure.

A worker's window starts at a multiple of its size in tokens, counted in characters from the start of the text
(`workers.text.window`), so the gateway may cut the text before it at such a multiple, and sends no megabyte of which a
worker would read some thousand characters.
"""

from __future__ import annotations

# Bounds the text that is encoded: English prose has four to five characters per token, so eight per token do not fit.
MAX_CHARS_PER_TOKEN = 8
# Left free in the context for the text after a gap (`workers.gap_filler`).
SUFFIX_ROOM = 16


def window_text(text: str, max_tokens: int) -> str:
    """The end of a text, of which a window of `max_tokens` is the same as of the whole."""
    num_cut = (len(text) - MAX_CHARS_PER_TOKEN * max_tokens) // max_tokens - 1
    return text[max(0, num_cut) * max_tokens :]
