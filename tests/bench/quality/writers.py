"""Simulated writers, one for each rule of keystroke savings.

Each is a pure function of a passage and of the suggestions at its positions; it knows neither servers nor clocks. All
take what saves the most keys at the moment, although another choice might save more later (greedy).

- literature: suggestions at every character; a taken one costs one key, whichever its place; the space after it comes
  with it. Replaced suggestions are not counted. The rule of word-prediction research (for example keystroke_savings.py
  of github.com/kdv123/textpredict), with suggestions of several words.
- page: the editor (gateway/static/completer.js) as it is: suggestions at every key that is not a deletion; a writer who
  types five keys a second, and takes only what has been visible for 200 ms: the first suggestion. This writer stops to
  think before each sentence, and for a shorter time after a comma: there the editor shows an idea, and the list of the
  others.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, takewhile
from typing import TypeAlias

from tests.bench.quality.keystrokes import Answer, Suggest, Usage
from tests.bench.quality.passages import Passage

KEY_INTERVAL_MS = 200.0  # five keys a second, on average
# Deviation of the logarithm of the time between two keys. An assumption: a regular rhythm, with a key every 200 ms,
# would decide by a millisecond whether a suggestion was visible for 200.
RHYTHM_SIGMA = 0.35
PAINT_MS = 8.0  # half a frame at 60 Hz, from a change to its display
# The editor (gateway/static/completer.js) ignores keys before a suggestion was visible for so long.
MIN_VISIBLE_MS = 200.0

# How long the writer thinks: after the end of a sentence or a line, and after other punctuation. An assumption. The
# editor asks for an idea after IDEA_DELAY_MS (`IDEA_DELAY_MS` in completer.js).
SENTENCE_PAUSE_MS, CLAUSE_PAUSE_MS = 3000.0, 1800.0
IDEA_DELAY_MS = 1200.0
# A fragment of at most two words gives its place to an idea once it was visible for so long (shown_suggestions.js).
MAX_FRAGMENT_MS = 1000.0
_SENTENCE_START = re.compile(r"(?:[.!?…][\"'”’)]*\s|\n)$")
_CLAUSE_START = re.compile(r"[,;:—–][\"'”’)]*\s?$")
# Keys of the editor: Tab takes the first suggestion; Alt with the arrow right takes a word, after which the arrow alone
# takes one more. A chord counts two.
TAKE_KEYS = 1
CHORD_KEYS = 2
DELETE_KEYS = 1  # for each character

# What arrow right takes (`firstWord` in gateway/static/text.js): white space, a word, the punctuation after it.
# Unicode's word boundaries keep an apostrophe or a full stop between letters inside the word.
_NEXT_WORD = re.compile(r"\s*(?:\w+(?:['’.]\w+)*)?[^\w\s]*")
# Typing one of these removes the space that came with a taken suggestion. The editor has more such marks by now
# (`replacesSpace` in gateway/static/text.js); the figures in docs/QUALITY.md were measured with these.
_REPLACES_SPACE = re.compile(r"[.,;:!?…)\]}”’\n]")
_WORD = re.compile(r"\w+(?:['’]\w+)*")
# The first of `firstSentence` in gateway/static/text.js.
_FIRST_SENTENCE = re.compile(r"\s*[^\n]*?[^\W_][^\n]*?(?:[.!?…][\"”’)]*(?=\s|$)|(?=\n)|$)")


# Types a passage with a number of suggestions on show.
Writer: TypeAlias = Callable[[Passage, Suggest, int], Usage]


def write_by_literature(passage: Passage, suggest: Suggest, num_suggestions: int) -> Usage:
    """The literature's rule. A taken suggestion brings a space only where the text has one."""
    text, at = passage.text, passage.start
    usage = Usage(num_characters=passage.end - passage.start)
    while at < passage.end:
        suggestions = suggest(at).suggestions[:num_suggestions]
        usage += Usage(num_moments=1, num_moments_shown=int(any(suggestions)))
        lengths = [matching_length(suggestion, text[at:]) for suggestion in suggestions]
        lengths = [length + _has_space(text, at, length) for length in lengths]
        length = min(max(lengths, default=0), passage.end - at)
        if length > 1:
            usage += _take(text[at : at + length])
        usage.num_keys += 1
        at += max(length, 1)
    return usage


@dataclass(frozen=True, slots=True)
class PageWriter:
    """The page's rule.

    Attributes:
        min_usefulness: the editor's threshold: predictions with a lower usefulness, in keys, are held back.
        think: ideas at a position, best first, for pauses. None: the writer does not pause.
    """

    min_usefulness: float = 0.0
    think: Suggest | None = None

    def __call__(self, passage: Passage, suggest: Suggest, num_suggestions: int) -> Usage:
        """
        A key comes after an interval of a human rhythm, whether it types or takes. An answer that comes after the next
        key is dropped, as the editor aborts its request. A taken suggestion brings a space, which punctuation replaces
        at no cost. Taking several words of a suggestion, and deleting what does not fit, are one acceptance, which
        hides the others; suggestions are requested after it, unless it ended with a deletion.
        """
        text, at, now_ms = passage.text, passage.start, 0.0
        usage = Usage(num_characters=passage.end - passage.start)
        intervals_ms, page = key_intervals_ms(passage.start), _Page(self.min_usefulness)
        is_deletion = False
        while at < passage.end:
            interval_ms = next(intervals_ms)
            page.show(now_ms)
            if not is_deletion:
                answer = suggest(at)
                if answer.latency_ms <= interval_ms:
                    page.merge(answer, num_suggestions)
                    page.show(now_ms + answer.latency_ms)
            pause_ms = pause_before(text, at) if self.think and not is_deletion else 0.0
            if pause_ms and self.think:
                idea = self.think(at)
                if IDEA_DELAY_MS + idea.latency_ms <= pause_ms:
                    page.add_idea(idea, now_ms + IDEA_DELAY_MS + idea.latency_ms, num_suggestions)
                usage += Usage(num_pauses=1, num_pauses_shown=int(bool(page.visible)))
            usage += page.count()
            usage.num_moments_right += bool(page.visible) and comes_next(page.visible[0].rest, text, at)
            now_ms += pause_ms or interval_ms
            takes = _takes_on_page(page.visible, text, at, passage.end, now_ms, is_listed=pause_ms > 0)
            best = max(takes, key=_Take.by_savings, default=None)
            if best is None or best.num_kept <= best.num_keys:
                usage.num_keys += 1
                page.follow(text[at])
                at += 1
                is_deletion = False
                continue
            usage += _take(text[at : at + best.num_kept], best.num_deleted)
            usage.num_keys += best.num_keys
            # A pause precedes the start of a word, so what is kept is a whole word unless it ends inside the first.
            usage.num_pauses_taken += bool(pause_ms) and _has_whole_word(text, at, best.num_kept)
            now_ms += sum(islice(intervals_ms, best.num_keys - 1))
            page.clear()
            at += best.num_kept
            is_deletion = best.num_deleted > 0
        return usage


def pause_before(text: str, at: int) -> float:
    """How long the writer thinks before a character, in milliseconds; 0: not at all."""
    before = text[max(0, at - 4) : at]
    if text[at : at + 1].isspace():
        return 0.0
    if _SENTENCE_START.search(before):
        return SENTENCE_PAUSE_MS
    return CLAUSE_PAUSE_MS if _CLAUSE_START.search(before) else 0.0


def first_sentence(text: str) -> str:
    """A suggestion to the end of its first sentence, as the editor cuts ideas."""
    found = _FIRST_SENTENCE.match(text)
    return (found[0] if found else text).rstrip()


def _first_word(text: str) -> str:
    """The first word of a suggestion, with what precedes and follows it, as arrow right takes it."""
    found = _NEXT_WORD.match(text)
    return found[0] if found else text


def key_intervals_ms(seed: int) -> Iterator[float]:
    """Times between keys: log-normal, five keys a second on average."""
    rng = random.Random(seed)
    while True:
        yield rng.lognormvariate(math.log(KEY_INTERVAL_MS) - RHYTHM_SIGMA**2 / 2, RHYTHM_SIGMA)


@dataclass(slots=True)
class _OnPage:
    """A suggestion that agrees with the text: what is left of it, and since when it has been visible."""

    rest: str
    visible_since_ms: float | None = None


class _Page:
    """What the page shows (gateway/static/shown_suggestions.js): what agrees keeps its order, new ones follow."""

    def __init__(self, min_usefulness: float) -> None:
        self._min_usefulness = min_usefulness
        self.visible: list[_OnPage] = []
        self._counted: list[_OnPage] = []  # visible at the last count

    def show(self, now_ms: float) -> None:
        """Show the first."""
        if self.visible and self.visible[0].visible_since_ms is None:
            self.visible[0].visible_since_ms = now_ms + PAINT_MS

    def merge(self, answer: Answer, num_suggestions: int) -> None:
        """Add what is useful enough and says something else."""
        usefulness = answer.usefulness or (math.inf,) * len(answer.suggestions)
        found = list(zip(answer.suggestions, usefulness, strict=True))[:num_suggestions]
        fresh = [_OnPage(rest) for rest, keys in found if keys >= self._min_usefulness]
        self.visible = _distinct([*self.visible, *fresh])[:num_suggestions]

    def add_idea(self, answer: Answer, now_ms: float, num_suggestions: int) -> None:
        """Show the first idea, to the end of its sentence, and the others after what is on show.

        What is on show stays, unless an idea continues it, or it is a fragment that the writer has left standing.
        """
        ideas = [_OnPage(first_sentence(idea)) for idea in answer.suggestions]
        first = self.visible[0] if self.visible else _OnPage("", now_ms)
        chosen = [idea for idea in ideas if idea.rest and idea.rest.startswith(first.rest)]
        if _is_fragment(first.rest) and now_ms - (first.visible_since_ms or now_ms) >= MAX_FRAGMENT_MS:
            chosen += [idea for idea in ideas if not _is_fragment(idea.rest)]
        self.visible = _distinct([*chosen[:1], *self.visible, *ideas])[:num_suggestions]
        self.show(now_ms)

    def follow(self, typed: str) -> None:
        """A character was typed: what does not agree with it leaves."""
        self.visible = [each for each in self.visible if each.rest.startswith(typed) and each.rest != typed]
        for each in self.visible:
            each.rest = each.rest.removeprefix(typed)

    def clear(self) -> None:
        self.visible = []

    def count(self) -> Usage:
        """The counts of one moment: of what was visible and still agrees, whether it is not first any more."""
        before, self._counted = self._counted, self.visible
        holding = [each for each in before if any(each is other for other in self.visible)]
        is_changed = bool(before and self.visible) and before[0] is not self.visible[0]
        return Usage(
            num_changed=int(is_changed),
            num_moments=1,
            num_moments_shown=int(bool(self.visible)),
            num_holding=len(holding),
            num_replaced=int(is_changed and holding[:1] == before[:1]),
        )


def _takes_on_page(
    visible: Sequence[_OnPage], text: str, at: int, end: int, now_ms: float, *, is_listed: bool
) -> Iterator[_Take]:
    """All ways to take the first suggestion, if it has been visible for long enough, and of a list the others whole."""
    if not visible or visible[0].visible_since_ms is None or now_ms - visible[0].visible_since_ms < MIN_VISIBLE_MS:
        return
    rest = visible[0].rest
    ends = accumulate(len(word) for word in _NEXT_WORD.findall(rest) if word)
    # The first word is a chord; it chooses the suggestion, so the next words are single keys.
    takes = [(CHORD_KEYS + TAKE_KEYS * number, length) for number, length in enumerate(ends)]
    for take_keys, length in [(TAKE_KEYS, len(rest)), *takes]:
        yield _page_take(rest[:length], text, at, end, take_keys)
    for other in visible[1:] if is_listed else ():
        yield _page_take(other.rest, text, at, end, CHORD_KEYS)


def _page_take(taken: str, text: str, at: int, end: int, take_keys: int) -> _Take:
    """Taking this much of a suggestion, with its space, and deleting what does not fit."""
    num_equal = common_length(taken, text, at)
    num_deleted = len(taken) - num_equal
    if not taken[-1:].isspace():
        follows = text[at + num_equal : at + num_equal + 1]
        if num_deleted == 0 and follows == " ":
            num_equal += 1
        elif num_deleted or (at + num_equal < end and not _REPLACES_SPACE.match(follows)):
            num_deleted += 1
    return _Take(min(num_equal, end - at), num_deleted, take_keys + DELETE_KEYS * num_deleted)


@dataclass(frozen=True, slots=True)
class _Take:
    num_kept: int
    num_deleted: int
    num_keys: int

    def by_savings(self) -> tuple[int, int]:
        return self.num_kept - self.num_keys, -self.num_keys


def comes_next(suggestion: str, text: str, at: int) -> bool:
    """Whether a suggestion follows in the text, and a word ends there."""
    return text.startswith(suggestion, at) and not is_inside_word(text, at + len(suggestion))


def matching_length(suggestion: str, text: str) -> int:
    """The length of the longest common prefix that ends inside a word of neither."""
    num_equal = common_length(suggestion, text)
    return max(
        (at for at in range(num_equal + 1) if not is_inside_word(suggestion, at) and not is_inside_word(text, at)),
        default=0,
    )


def common_length(one: Sequence[object], other: Sequence[object], at: int = 0) -> int:
    """The length of the longest common prefix of one sequence and the other from `at` on."""
    pairs = zip(one, other[at : at + len(one)], strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _has_whole_word(text: str, at: int, length: int) -> bool:
    """Whether a word that begins in this part of the text ends in it, too."""
    return any(found.end() <= at + length for found in _WORD.finditer(text, at, at + length + 1))


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


def _distinct(all_on_page: Sequence[_OnPage]) -> list[_OnPage]:
    """Those without the ones that only begin or continue one before them, or begin with the same word."""
    distinct: list[_OnPage] = []
    for each in all_on_page:
        word = _first_word(each.rest).strip()
        if each.rest and not any(
            _agree(each.rest, other.rest) or word == _first_word(other.rest).strip() for other in distinct
        ):
            distinct.append(each)
    return distinct


def _is_fragment(suggestion: str) -> bool:
    """Whether it is at most two words."""
    return sum(bool(word) for word in _NEXT_WORD.findall(suggestion.rstrip())) <= 2


def _agree(one: str, other: str) -> bool:
    """Whether one of two suggestions begins with the other, which is not empty."""
    return bool(one and other) and (one.startswith(other) or other.startswith(one))


def is_inside_word(text: str, at: int) -> bool:
    """Whether `at` is inside a word."""
    return 0 < at < len(text) and text[at - 1].isalnum() and text[at].isalnum()
