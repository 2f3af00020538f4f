"""What both pools know of texts: which characters are no text, how many keys words should save, and how much of a text
a prompt can have.

Characters that are no text are never typed. A model writes them where its bytes do not make up characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Control characters but tab and line ends, the specials (such as U+FFFD) and the noncharacters. Not the format
# characters that writers need: joiners of emoji and Persian, variation selectors, marks of direction, soft hyphens.
_PLANE_ENDS = "".join(f"{chr(end - 1)}{chr(end)}" for end in range(0x1FFFF, 0x110000, 0x10000))
NOT_TEXT = re.compile(f"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef\ufff0-\uffff{_PLANE_ENDS}]")
# Bounds the text that is encoded: English prose has four to five characters per token, so eight per token do not fit.
MAX_CHARS_PER_TOKEN = 8
# Left free in the context for the text after a gap (`workers.gap_filler`).
SUFFIX_ROOM = 16


def expected_keys(ends: Sequence[int], probabilities: Sequence[float]) -> float:
    """The keys that showing words should save; 0 without words.

    Σ P(this word and all before it) · its characters − P(the first word), since taking them costs one key.

    Args:
        ends: where each word ends, in characters.
    """
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    keys = sum(probability * length for probability, length in zip(probabilities, lengths, strict=True))
    return keys - sum(probabilities[:1])
