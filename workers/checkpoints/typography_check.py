"""Measures which typographic marks a model does not know, by what they cost in prose that has many of them.

Each mark is compared with its plain spelling on a bundled paragraph, by the runner that serves the model. Knows
paragraphs and log-probabilities. Does not know what is done about a mark, slots, and the cache's location.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import structlog

from workers.checkpoints.measured import measured_once
from workers.engine.core import ScoreFn
from workers.text.tokenizer import Tokenizer
from workers.text.typography import PLAIN, SPACES, Typography

# A mark is unknown if it costs this much more than its plain spelling, in nats per character. Each costs the embedded
# checkpoint, which was trained without them, 1.3 or more; “ ” ‘ ’ — … cost SmolLM2 at most 0.07.
MAX_COST = 0.2
# The same for marks of other languages, which cost more in English although a model knows them (SmolLM2: 0.2 to 0.4).
MAX_FOREIGN_COST = 0.5
_FOREIGN = {*"„‟«»‚‛‹›\u3000"}
_DIALOGUE = (
    "<I am sure,> said Tom. <Come in,> she said, <and sit down.> <No,> he said. <Why not?> she asked. <It is late,>"
    " said he. <Good night,> she said."
)
_CONTRACTIONS = "It<s late, and I don<t think he<ll come; he wasn<t at home, and his wife<s sister hadn<t seen him."
_DASHES = "He was old<very old<and tired. She knew it<they all knew it<but said nothing. It was late<too late."
_PAUSES = "I thought< well, I don't know< It seemed to me< But it is late< He waited< and then< nothing< Perhaps<"
_COMPOUNDS = "The well<known, good<looking son<in<law had a half<empty tea<cup and a second<hand arm<chair."
_WORDS = "It was late,<and I do not<think he will<come; he was<not at home, and<his sister had<not seen<him."
_LINES = "It was late.<He had gone.<She knew it.<The fire was out.<Nobody came.<The house was quiet.<"
# A paragraph; what stands for "<", and for ">", in its plain spelling; and with each mark. Where two have a mark, the
# first decides.
_PARAGRAPHS = (
    (_CONTRACTIONS, ("'",), [("’",)]),
    (_DIALOGUE, ('"', '"'), [("“", "”"), ("„", "“"), ("«", "»"), ("‟", "”")]),
    (_DIALOGUE, ("'", "'"), [("‘", "’"), ("‚", "‘"), ("‹", "›"), ("‛", "’")]),
    (_DASHES, ("--",), [("—",), ("―",), ("–",)]),
    (_PAUSES, ("...",), [("…",)]),
    (_COMPOUNDS, ("-",), [(mark,) for mark in "‐‑‒−"]),
    (_WORDS, (" ",), [(mark,) for mark in f"{SPACES}\t"]),
    (_WORDS.replace("<", " <"), ("",), [(mark,) for mark in "\xad\u200b\u2060\ufeff"]),
    (_LINES, ("\n",), [(mark,) for mark in ("\r\n", "\r", "\u2028", "\u2029")]),
)
_NAME = "marks-" + hashlib.sha256(repr((_PARAGRAPHS, MAX_COST, MAX_FOREIGN_COST)).encode()).hexdigest()[:8]
log = structlog.get_logger()


def measured_typography(directory: Path, tokenizer: Tokenizer, score: ScoreFn, cache: Path | None) -> Typography:
    """The marks that the model in `directory` does not know; `cache` as for `measured_once`."""

    def measure() -> list[str]:
        marks = unknown_marks(tokenizer, score)
        log.info("typography_measured", directory=str(directory), unknown="".join(filter(str.isprintable, marks)))
        return marks

    marks = measured_once(directory, _NAME, cache, list[str], measure)
    return Typography(mark for mark in marks if mark in PLAIN)


def unknown_marks(tokenizer: Tokenizer, score: ScoreFn) -> list[str]:
    """The marks that a model does not know, of those in `workers.text.typography.PLAIN`."""

    def cost(paragraph: str, marks: tuple[str, ...]) -> float:
        """In nats."""
        text = paragraph.replace("<", marks[0]).replace(">", marks[-1])
        ids = tokenizer.encode(f"\n{text}", special_as_text=True)
        return math.inf if max(ids, default=0) >= tokenizer.vocab_size else -sum(score(ids))

    is_unknown: dict[str, bool] = {}
    for paragraph, plain, marks in _PARAGRAPHS:
        plain_cost = cost(paragraph, plain)
        for mark in marks:
            max_cost = MAX_FOREIGN_COST if _FOREIGN & {*mark} else MAX_COST
            costs_more = cost(paragraph, mark) - plain_cost > max_cost * len(paragraph)
            for char in mark:
                is_unknown.setdefault(char, costs_more)
    return [mark for mark, is_one in is_unknown.items() if is_one]
