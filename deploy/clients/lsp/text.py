"""Pure functions on text: the rules of text.js and prose.js in gateway/static, to which a test holds these."""

from __future__ import annotations

import re
import unicodedata

# Punctuation that opens nothing, and signs such as those of emphasis.
_NO_TEXT = {"Pc", "Pd", "Pe", "Pf", "Pi", "Po", "Sc", "Sk", "Sm"}
_EMPHASIS = str.maketrans("", "", "*_~=`$")

_FRONT_MATTER = re.compile(r"\ufeff?(---|\+\+\+)[^\S\n]*(?:\n|\Z)")
_BLOCK = re.compile(
    r"^(?:[ \t]*(?:>|[-*+](?=\s)|\d{1,9}[.)](?=\s)))*[ \t]*(?:(`{3,})[^`\n]*|(~{3,}).*|(\$\$|\\\[)[^\S\n]*)$",
    re.MULTILINE,
)
_BLOCK_ENDS = {
    "---": r"^(?:---|\.\.\.)[^\S\n]*\n",
    "+++": r"^\+\+\+[^\S\n]*\n",
    "$$": r"^.*\$\$.*\n",
    r"\[": r"^.*\\\].*\n",
}
_BLANK_LINE = re.compile(r"[^\S\n]*\n")
_QUOTED, _NOT_QUOTED = re.compile(r"[ \t]*>"), re.compile(r"^(?![ \t]*>)", re.MULTILINE)
_PARAGRAPH = re.compile(r"^[^\S\n]*(?:$|(?:[-*+>]|\d{1,9}[.)]|#{1,6})\s)", re.MULTILINE)
_SPAN = re.compile(r"`+|\$\$|\$(?=[^\s\d$])|\\.", re.DOTALL)
_SPAN_ENDS = {"$$": r"\$\$", "$": r"(?<=[^\s\\])\$(?!\d)|\n", r"\(": r"\\\)", r"\[": r"\\\]"}
_MAX_PARAGRAPH_CHARS = 20_000


def has_text_after(after: str) -> bool:
    """Whether text follows the caret on its line: more than closing marks and punctuation."""
    line = after.partition("\n")[0]
    return not all(char.isspace() or unicodedata.category(char) in _NO_TEXT for char in line)


def trim_suffix(after: str) -> str:
    """What follows the caret on its line, as it is sent: of marks alone, none of emphasis, before which models know no
    words."""
    line = after.partition("\n")[0]
    suffix = line if has_text_after(line) else line.translate(_EMPHASIS)
    return suffix if suffix.strip() else ""


def is_prose(before: str) -> bool:
    """Whether a caret is in prose, and not in a block or span of code or mathematics, nor in front matter, of Markdown.

    Args:
        before: all of the document before the caret.
    """
    text = before.replace("\r\n", "\n")
    start = 0
    block = _FRONT_MATTER.match(text) or _BLOCK.search(text)
    while block:
        mark = block[block.lastindex or 0]
        at = text.find("\n", block.end(block.lastindex or 0)) + 1 or len(text)
        ends = re.compile(_BLOCK_ENDS.get(mark, rf"^[ \t>]*{mark[0]}{{{len(mark)},}}[^\S\n]*\n"), re.MULTILINE)
        # Before a blank line, --- is a rule, and no front matter (Pandoc).
        end = (mark == "---" and _BLANK_LINE.match(text, at)) or ends.search(text, at)
        left = _QUOTED.match(block[0]) and _NOT_QUOTED.search(text, at)
        if left and not (end and end.start() <= left.start()):
            start = left.start()
        elif end:
            start = end.end()
        else:
            return False
        block = _BLOCK.search(text, start)
    start = max(start, len(text) - _MAX_PARAGRAPH_CHARS)
    start = max((found.start() for found in _PARAGRAPH.finditer(text, start)), default=start)
    while span := _SPAN.search(text, start):
        start = span.end()
        ends_span = rf"(?<!`){span[0]}(?!`)" if span[0][0] == "`" else _SPAN_ENDS.get(span[0])
        if ends_span:
            if not (found := re.compile(ends_span).search(text, start)):
                return False
            start = found.end()
    return True
