"""Simulated writers, one for each rule of keystroke savings.

Each is a pure function of a passage and of the suggestions at its positions; it knows neither servers nor clocks. All
take what saves the most keys at the moment, although another choice might save more later (greedy).

- literature: suggestions at every character; a taken one costs one key, whichever its place; the space after it comes
  with it. The rule of word-prediction research (for example keystroke_savings.py of github.com/kdv123/textpredict),
  with suggestions of several words.
- page: what the editor (gateway/static/tercet.js) costs if it requests suggestions at every key that is not a deletion;
  a writer who types five keys a second, and takes only what has been visible for 200 ms.
- pause: suggestions at the start of each word; one key for the first, two for the others; the space is typed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import Literal, Protocol, TypeAlias

from deploy.bench.quality.keystrokes import Passage, Suggest, Usage

Display: TypeAlias = Literal["keep", "replace"]

KEY_INTERVAL_MS = 200.0  # five keys a second
# The editor ignores Tab before (MIN_VISIBLE_MS in gateway/static/tercet.js).
MIN_VISIBLE_MS = 200.0

# Keys of the editor: Tab takes the whole suggestion, arrow right its next word, arrow up and down choose another. A
# chord would count two.
TAKE_KEYS = 1
TAKE_WORD_KEYS = 1
CHOOSE_KEYS = 1
DELETE_KEYS = 1  # for each character

# What arrow right takes (`firstWord` in gateway/static/text.js): white space, a word, the punctuation after it.
# Unicode's word boundaries keep an apostrophe or a full stop between letters inside the word.
_NEXT_WORD = re.compile(r"\s*(?:\w+(?:['’.]\w+)*)?[^\w\s]*")
_WORD = re.compile(r"\w+(?:['’]\w+)*")


class Writer(Protocol):
    """Types a passage with up to `num_suggestions` suggestions on show."""

    def __call__(self, passage: Passage, suggest: Suggest, num_suggestions: int) -> Usage: ...


def write_by_literature(passage: Passage, suggest: Suggest, num_suggestions: int) -> Usage:
    """The literature's rule. The space gives way to punctuation: it comes only where the text has one."""
    text, at = passage.text, passage.start
    usage = Usage(num_characters=passage.end - passage.start)
    shown = _Shown()
    while at < passage.end:
        suggestions = suggest(at).suggestions[:num_suggestions]
        usage += shown.replace(suggestions, text, at)
        lengths = [matching_length(suggestion, text[at:]) for suggestion in suggestions]
        lengths = [length + _has_space(text, at, length) for length in lengths]
        length = min(max(lengths, default=0), passage.end - at)
        if length > 1:
            usage += _take(text[at : at + length])
        usage.num_keys += 1
        at += max(length, 1)
    return usage


def write_by_pause(passage: Passage, suggest: Suggest, num_suggestions: int) -> Usage:
    """The rule of a writer who pauses before each word: an arrow chooses another suggestion than the first."""
    text, at = passage.text, passage.start
    usage = Usage(num_characters=passage.end - passage.start)
    positions, shown = set(passage.positions), _Shown()
    while at < passage.end:
        best_length, best_cost = 0, 0
        if at in positions:
            suggestions = suggest(at).suggestions[:num_suggestions]
            usage += shown.replace(suggestions, text, at)
            for rank, suggestion in enumerate(suggestions):
                length = min(matching_length(suggestion, text[at:]), passage.end - at)
                cost = 1 if rank == 0 else 2
                if length - cost > best_length - best_cost:
                    best_length, best_cost = length, cost
        if best_length:
            usage += _take(text[at : at + best_length])
        usage.num_keys += best_cost or 1
        at += best_length or 1
    return usage


@dataclass(frozen=True, slots=True)
class PageWriter:
    """The page's rule.

    Attributes:
        display: keep: a suggestion that still agrees with the typed text keeps its place, and the newest answer fills
            the free places; replace: the newest answer takes all places.
    """

    display: Display = "keep"

    def __call__(self, passage: Passage, suggest: Suggest, num_suggestions: int) -> Usage:
        """
        A key that takes a suggestion is pressed `KEY_INTERVAL_MS` after the key before it, as every other key. An
        answer that arrives after the next key is dropped, as the editor aborts its request. Taking several words of a
        suggestion, and deleting what does not fit, are one acceptance; suggestions are requested after it, unless it
        ended with a deletion, which leaves nothing on show.
        """
        text, at, now_ms = passage.text, passage.start, 0.0
        usage = Usage(num_characters=passage.end - passage.start)
        shown, is_deletion = _Shown(), False
        while at < passage.end:
            if is_deletion:
                shown = _Shown()
                usage.num_moments += 1
            else:
                answer = suggest(at)
                is_late = answer.latency_ms > KEY_INTERVAL_MS
                suggestions = () if is_late else answer.suggestions[:num_suggestions]
                if self.display == "keep" or is_late:
                    suggestions = shown.merge(suggestions, text, at, num_suggestions)
                usage += shown.replace(suggestions, text, at, now_ms + answer.latency_ms)
            now_ms += KEY_INTERVAL_MS
            best = max(self._takes(shown, text, at, passage.end, now_ms), key=_Take.by_savings, default=None)
            if best is None or best.num_kept <= best.num_keys:
                usage.num_keys += 1
                at, is_deletion = at + 1, False
                continue
            usage += _take(text[at : at + best.num_kept], best.num_deleted)
            usage.num_keys += best.num_keys
            now_ms += (best.num_keys - 1) * KEY_INTERVAL_MS
            at, is_deletion = at + best.num_kept, best.num_deleted > 0
        return usage

    @staticmethod
    def _takes(shown: _Shown, text: str, at: int, end: int, now_ms: float) -> Iterator[_Take]:
        """All ways to take one of the suggestions on show."""
        for place, suggestion in enumerate(shown.suggestions):
            if now_ms - shown.visible_since_ms[place] < MIN_VISIBLE_MS:
                continue
            choose_keys = CHOOSE_KEYS * min(place, len(shown.suggestions) - place)  # the choice wraps around
            num_equal = _num_equal(suggestion, text, at)
            ends = accumulate(len(word) for word in _NEXT_WORD.findall(suggestion) if word)
            takes = [(TAKE_WORD_KEYS * number, length) for number, length in enumerate(ends, 1)]
            for take_keys, length in [(TAKE_KEYS, len(suggestion)), *takes]:
                num_deleted = max(0, length - num_equal)
                num_keys = choose_keys + take_keys + DELETE_KEYS * num_deleted
                yield _Take(min(length, num_equal, end - at), num_deleted, num_keys)


@dataclass(frozen=True, slots=True)
class _Take:
    num_kept: int
    num_deleted: int
    num_keys: int

    def by_savings(self) -> tuple[int, int]:
        return self.num_kept - self.num_keys, -self.num_keys


class _Shown:
    """Suggestions on show at a position, best first, each with the time since which it has been visible."""

    def __init__(self) -> None:
        self.suggestions: tuple[str, ...] = ()
        self.visible_since_ms: tuple[float, ...] = ()
        self._at = 0

    def merge(self, suggestions: Sequence[str], text: str, at: int, num_suggestions: int) -> tuple[str, ...]:
        """What is on show if those that still hold keep their place and new ones fill the free places.

        A new one that only says what a kept one says, or begins or continues it, is left out.
        """
        places = [*self._rests(text, at), *[""] * num_suggestions][:num_suggestions]
        kept = [rest for rest in places if rest]
        new = [each for each in suggestions if each and not any(_agree(each, rest) for rest in kept)]
        return tuple(filter(None, (rest or (new.pop(0) if new else "") for rest in places)))

    def replace(self, suggestions: Sequence[str], text: str, at: int, now_ms: float = 0.0) -> Usage:
        """Show these at `at`. The counts of one moment: what still held, and what of it was replaced.

        A text that was on show already has been visible since then.
        """
        rests = self._rests(text, at)
        suggestions = tuple(filter(None, suggestions))
        since_ms = dict(zip(rests, self.visible_since_ms, strict=True))
        now_shown = [*suggestions, *[""] * len(rests)]
        holding = [(rest, now_shown[place]) for place, rest in enumerate(rests) if rest]
        self.suggestions, self._at = suggestions, at
        self.visible_since_ms = tuple(since_ms.get(suggestion, now_ms) for suggestion in suggestions)
        return Usage(
            num_moments=1,
            num_moments_shown=int(bool(suggestions)),
            num_holding=len(holding),
            num_replaced=sum(not _agree(rest, suggestion) for rest, suggestion in holding),
        )

    def _rests(self, text: str, at: int) -> list[str]:
        """What is left of each suggestion after the text up to `at`; empty for those that do not hold."""
        typed = text[self._at : at]
        return [each.removeprefix(typed) if each.startswith(typed) else "" for each in self.suggestions]


def matching_length(suggestion: str, text: str) -> int:
    """The length of the longest common prefix that ends inside a word of neither."""
    num_equal = _num_equal(suggestion, text)
    return max(
        (at for at in range(num_equal + 1) if not _is_inside_word(suggestion, at) and not _is_inside_word(text, at)),
        default=0,
    )


def _num_equal(suggestion: str, text: str, at: int = 0) -> int:
    """The length of the longest common prefix of the suggestion and the text from `at` on."""
    pairs = zip(suggestion, text[at : at + len(suggestion)], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _has_space(text: str, at: int, length: int) -> bool:
    """Whether a space follows that comes with a taken suggestion."""
    return length > 0 and not text[at + length - 1].isspace() and text[at + length : at + length + 1] == " "


def _take(kept: str, num_deleted: int = 0) -> Usage:
    """The counts of one acceptance, except its keys."""
    return Usage(
        num_accepted=1,
        num_accepted_characters=len(kept) + num_deleted,
        num_kept_characters=len(kept),
        num_accepted_words=len(_WORD.findall(kept)),
    )


def _agree(one: str, other: str) -> bool:
    """Whether one of two suggestions begins with the other, which is not empty."""
    return bool(one and other) and (one.startswith(other) or other.startswith(one))


def _is_inside_word(text: str, at: int) -> bool:
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()
