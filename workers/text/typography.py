"""Typographic marks that a model does not know: their plain spelling for the model, and the writer's for its output.

Phones, Macs and word processors write “ ” ‘ ’ — … and white space other than plain. A model that was trained on text
without them loses most of what it knows in such a text. Pure functions of texts. Does not know tokens, models, and
which marks a model does not know (`workers.checkpoints.typography_check` measures that).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

SPACES = "\xa0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
# What each mark means, spelled plainly.
PLAIN = {
    **dict.fromkeys("“”„‟«»", '"'),
    **dict.fromkeys("‘’‚‛‹›", "'"),
    **dict.fromkeys("—―–", "--"),  # after a digit, "–" is a hyphen
    **dict.fromkeys("‐‑‒−", "-"),
    "…": "...",
    **dict.fromkeys(f"{SPACES}\t", " "),
    **dict.fromkeys("\xad\u200b\u2060\ufeff", ""),  # soft hyphen, and characters without width
    **dict.fromkeys(("\r\n", "\r", "\u2028", "\u2029"), "\n"),
}
MARK = re.compile("|".join(re.escape(mark) for mark in PLAIN if len(mark) == 1))  # "\r\n" begins with one
# The mark that closes what each opens. The first of a text opens, so an English ” is none of these.
_CLOSING = {"“": "”", "„": "“", "‟": "”", "«": "»", "»": "«", "‘": "’", "‚": "‘", "‛": "’", "‹": "›", "›": "‹"}
_OPENS_AFTER = re.compile(r"[\s(\[{\-–—\"'“„«‘‚‹]|$")
_CLOSES_BEFORE = re.compile(r"[\s.,;:!?…)\]}\"'\-–—]|$")
_ELISION = re.compile(r"'(?:tis|twas|tween|em|til|cause|cos|bout|round|neath|n|\d\ds?)\b", re.IGNORECASE)
_PLAIN_MARK = re.compile(r"\"|'|--|\.{3}|\n")
# The end of a text of which the next characters decide what it means.
_UNDECIDED = re.compile(r"(?:(?<!\w)'\w{1,6}|[\"'.\-])+\Z")
# End of a text in which its spelling is looked for.
_MAX_READ_CHARS = 20_000
# End of a text in which an open quotation is looked for. Quotations that are open at a blank line end there.
_MAX_QUOTED_CHARS = 2000
_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a text spells what a model spells plainly; by default plainly. `double`, `single`: an opening and a closing
    mark."""

    double: str = '""'
    single: str = "''"
    apostrophe: str = "'"
    dash: str = "--"
    ellipsis: str = "..."
    line_end: str = "\n"


TYPOGRAPHIC = Spelling("“”", "‘’", "’", "—", "…")  # as phones and word processors write English


class Typography:
    """The marks that one model does not know."""

    def __init__(self, unknown: Iterable[str] = ()) -> None:
        """
        Args:
            unknown: of the marks in `PLAIN`.
        """
        self._unknown = sorted(unknown, key=lambda mark: -len(mark))
        self._marks = re.compile("|".join(map(re.escape, self._unknown)) or "(?!)")

    def plain(self, text: str) -> str:
        """`text` with the plain spelling of the marks that the model does not know."""
        return self._marks.sub(_plain_mark, text)

    def spelling(self, text: str) -> Spelling:
        """How `text` spells what the model does not know.

        Of several ways the last counts. Who types some marks types all: a mark that `text` lacks is typographic where
        others are, unless there are straight quotation marks.
        """
        text = text[-_MAX_READ_CHARS:]
        plain = Spelling()
        found = self._quotes(text, '"'), self._quotes(text, "'"), self._last(text, "--"), self._last(text, "...")
        is_straight = plain.double == found[0] or plain.single == found[1]
        is_typographic = not is_straight and not {*found} <= {"", plain.dash, plain.ellipsis}
        usual = TYPOGRAPHIC if is_typographic else plain
        defaults = usual.double, usual.single, usual.dash, usual.ellipsis
        double, single, dash, ellipsis = (used or default for used, default in zip(found, defaults, strict=True))
        apostrophe = "’" if single != plain.single else "'"
        line_end = "\r\n" if self._last(text, "\n") == "\r\n" else "\n"
        return Spelling(double, single, apostrophe, dash, ellipsis, line_end)

    def _quotes(self, text: str, plain: str) -> str:
        """The opening and the closing mark that `text` uses; empty if it uses none."""
        last = self._last(text, plain)
        if last in ("", plain):
            return 2 * last
        usual = TYPOGRAPHIC.double if plain == '"' else TYPOGRAPHIC.single
        opening = next((mark for mark in text if mark in _CLOSING and PLAIN[mark] == plain), usual[0])
        return opening + _CLOSING[opening]

    def _last(self, text: str, plain: str) -> str:
        """Of `plain` and the marks that mean it, the one that `text` used last; empty if it used none."""
        marks = (plain, *(mark for mark in self._unknown if PLAIN[mark] == plain))
        used = [mark for mark in marks if mark in text]
        return max(used, key=lambda mark: (text.rfind(mark) + len(mark), len(mark)), default="")


def _plain_mark(found: re.Match[str]) -> str:
    is_hyphen = found[0] == "–" and found.string[: found.start()][-1:].isdigit()
    return "-" if is_hyphen else PLAIN[found[0]]


class Speller:
    """Spells a model's output like the text before it. It may be fed in any pieces: they give the same text.

    Attributes:
        widths: of each character fed, the number of characters that are spelled with it; of several that become one,
            the last has it.
    """

    def __init__(self, spelling: Spelling, before: str) -> None:
        """
        Args:
            before: the text before the output, as the writer spelled it.
        """
        self.widths: list[int] = []
        self._spelling = spelling
        self._last = before[-1:]  # the character before what is not spelled yet
        self._held = ""
        paragraph = _BLANK_LINE.split(before[-_MAX_QUOTED_CHARS:])[-1]
        self._has_double = _is_open(paragraph, spelling.double)  # an open quotation
        self._has_single = _is_open(paragraph, spelling.single)

    def feed(self, text: str) -> str:
        """Add the next piece. Returns the text that no later piece can change."""
        text = self._last + self._held + text
        undecided = _UNDECIDED.search(text, len(self._last))
        end = undecided.start() if undecided else len(text)
        self._held = text[end:]
        return self._spell(text, end)

    def finish(self) -> str:
        """The text that was held back, once the output has ended."""
        text, self._held = self._last + self._held, ""
        return self._spell(text, len(text))

    def _spell(self, text: str, end: int) -> str:
        """`text` to `end`, without the character before it."""
        parts: list[str] = []
        at = len(self._last)
        for found in _PLAIN_MARK.finditer(text, at, end):
            mark = self._mark(text, found)
            parts += text[at : found.start()], mark
            self.widths += [1] * (found.start() - at) + [0] * (len(found[0]) - 1) + [len(mark)]
            at = found.end()
        parts.append(text[at:end])
        self.widths += [1] * (end - at)
        self._last = text[end - 1 : end]
        return "".join(parts)

    def _mark(self, text: str, found: re.Match[str]) -> str:
        spelling, mark = self._spelling, found[0]
        before, after = text[: found.start()][-1:], text[found.end() : found.end() + 1]
        if mark == '"':
            self._has_double = _opens(before, after, self._has_double)
            return spelling.double[not self._has_double]
        if mark == "'":
            if (before.isalnum() and after.isalnum()) or (not before.isalnum() and _ELISION.match(text, found.start())):
                return spelling.apostrophe
            was_open, self._has_single = self._has_single, _opens(before, after, self._has_single)
            return spelling.single[not self._has_single] if was_open or self._has_single else spelling.apostrophe
        if mark == "--":
            return spelling.dash
        if mark == "...":
            return spelling.ellipsis
        if before == "\n":
            self._has_double = self._has_single = False
        return spelling.line_end


def _opens(before: str, after: str, is_open: bool) -> bool:
    """Whether a quotation mark between two characters opens a quotation; `is_open`: there is an open one."""
    may_open, may_close = _OPENS_AFTER.match(before), _CLOSES_BEFORE.match(after)
    if bool(may_open) == bool(may_close) or before in {"-", "–", "—"}:
        return not is_open
    return may_open is not None


def _is_open(paragraph: str, pair: str) -> bool:
    """Whether a quotation is open at the end of a paragraph."""
    if pair[0] == pair[1]:
        return False
    marks = re.findall(rf"{pair[0]}|{pair[1]}(?!\w)", paragraph)
    return marks[-1:] == [pair[0]]
