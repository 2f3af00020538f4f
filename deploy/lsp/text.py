"""Pure functions on text: the rules of text.js and prose.js in gateway/static, to which a test holds these."""

from __future__ import annotations

import re
import unicodedata

# Of \p{Terminal_Punctuation}, which Python does not know, and the other marks of text.js: those in no category below.
_MARKS = re.compile(
    "["
    r"""!"$%'*,./:;=>?_`~\xaa\xab\xae\xb0\xb2\xb3\xb7\xb9\xba\u037e\u0387\u0589\u05c3\u060c\u061b\u061d-\u061f\u06d4"""
    r"\u0700-\u070a\u070c\u07f8\u07f9\u0830-\u0835\u0837-\u083e\u085e\u0964\u0965\u0e5a\u0e5b\u0f08\u0f0d-\u0f12"
    r"\u104a\u104b\u1361-\u1368\u166e\u16eb-\u16ed\u1735\u1736\u17d4-\u17d6\u17da\u1802-\u1805\u1808\u1809"
    r"\u1944\u1945\u1aa8-\u1aab\u1b4e\u1b4f\u1b5a\u1b5b\u1b5d-\u1b5f\u1b7d-\u1b7f\u1c3b-\u1c3f\u1c7e\u1c7f\u2018"
    r"\u201a\u201c\u201e\u2020\u2021\u2024\u2026\u2030\u2032\u2033\u2039\u203c\u203d\u2044\u2047-\u2049\u2122"
    r"\u2cf9-\u2cfb\u2e2e\u2e3c\u2e41\u2e4c\u2e4e\u2e4f\u2e53\u2e54\u3001\u3002\ua4fe\ua4ff\ua60d-\ua60f"
    r"\ua6f3-\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c7-\ua9c9\uaa5d-\uaa5f\uaadf\uaaf0\uaaf1\uabeb\ufe12"
    r"\ufe15\ufe16\ufe50-\ufe52\ufe54-\ufe57\uff01\uff0c\uff0e\uff1a\uff1b\uff1f\uff61\uff64"
    "\t\n\v\f\r\ufeff]"
)
_CLOSING = {"Pe", "Pf", "Pd", "Zs", "Zl", "Zp"}  # closing marks, dashes, white space
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
    return not all(unicodedata.category(char) in _CLOSING or _MARKS.match(char) for char in line)


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
