"""Where a completion ends, which completions are rejected, and which are near-duplicates. Pure functions of text.

A completion usually ends where its tokens ran out, mid-word or mid-sentence. It is trimmed to the end of a word with
which a phrase can end, or of a sentence if one ends in its last third; a completion that ended by itself (end of text,
stop string) keeps its end. It ends before a quotation mark that closes nothing. The same rules apply to streamed text:
text is final when no later token can make them remove it. An idea ends with a sentence or clause, for
which more tokens are generated than requested.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from operator import eq

from rapidfuzz import fuzz

from gateway.generation.english import Quotes, copies_noun_phrase, ends_with_function_word

# Fewer tokens than this may not contain a whole word. Tokens past the requested length only complete a word.
MIN_TOKENS = 6
# The end of a sentence counts past this share of the requested tokens; in an idea past the other, as that of a clause.
LAST_THIRD, FIRST_THIRD = 2 / 3, 1 / 3
# Tokens past the requested length in which the sentence of an idea may end.
IDEA_TOKENS = 12

# Scripts that put no spaces between words: a text may end after any of their letters.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_CLOSING = "\"'”’)\\]»"
# A word and its punctuation before white space, a word before a dash, or a letter of an unspaced script.
_WORD_END = re.compile(rf"\w[^\w\s]*(?=\s)|\w(?=—|–|--)|[{_UNSPACED}]")
_SENTENCE_END = re.compile(rf"[.!?…]+[{_CLOSING}]*(?=\s+[^\sa-z])|[。！？]")
# The same at the end of a completion, where no token follows.
_LAST_SENTENCE_END = re.compile(rf"[.!?…]+[{_CLOSING}]*$")
# The end of a clause, without the mark after it.
_CLAUSE_END = re.compile(r"[^\W\d](?=[,;]\s|\s[—–-]\s|—)|[^\W\d],[\"”](?=\s)")
_PARAGRAPH_END = re.compile(r"(?<=\S)[^\S\n]*\n\s*\n")
_LAST_WORD_END = re.compile(rf"[^\W\d][.,;:!?…{_CLOSING}]*[.,;:!?…\"”)\]»]$")
# In a text without white space, such as an address or a path.
_INNER_WORD_END = re.compile(r"\w(?=[^\w\s'’-])")
_LAST_CHUNK = re.compile(r"\S+$")
_WORD = re.compile(r"\w+")
# A full stop after these does not end a sentence: abbreviations and initials.
_ABBREVIATION = re.compile(
    r"\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|St|Prof|Rev|Hon|Capt|Col|Gen|Lt|Sgt|Maj|Messrs|Mme|Mlle|Jr|Sr|No|Vol|vol|pp|vs|cf"
    r"|etc|e\.g|i\.e|viz)\.$"
)

_MARKS = ".,;:!?…\"'“”‘’()[]«»_*-–—"
_CHARACTER_LOOP = re.compile(r"(\S.{0,3}?)\1{5,}")
# End of the prompt that is searched for loops and repetitions.
_PROMPT_CHARS = 200
# A phrase of this many words that comes twice is a loop; a shorter one may be a figure of speech.
_LONG_PHRASE = 4
MAX_PHRASE = 12  # words
# An idea with as many words in a row of the text before it is a copy.
COPIED_WORDS = 6


class Trimmer:
    """Trims a completion, token by token or all at once."""

    def __init__(
        self, length: int, prompt: str = "", *, keeps_partial_word: bool = False, is_idea: bool = False
    ) -> None:
        """
        Args:
            length: requested tokens.
            prompt: the text before the completion.
            keeps_partial_word: for greedy text: a completion without a whole word is kept as it is, instead of being
                trimmed to nothing, and so are its last word and its quotation marks.
            is_idea: it ends with its paragraph or its last sentence within the requested tokens, else with the first
                sentence past them, else with its last clause, else like other completions.
        """
        self._length = length
        self._is_idea = is_idea
        self._quotes = None if keeps_partial_word else Quotes(prompt)
        self._is_cut = False  # the text ends before a quotation mark, or with its paragraph
        self._keeps_partial_word = keeps_partial_word
        self._text = ""
        self._ends: list[int] = []  # of each token in the text, in characters
        self._num_final = 0  # characters
        self._has_end = False  # a sentence has ended where the completion may end
        self._has_clause_end = False  # the same of a clause of an idea

    @property
    def text(self) -> str:
        """All text that is final."""
        return self._text[: self._num_final]

    def feed(self, token_text: str) -> str:
        """Add the next token's text. Returns the text that became final."""
        self._add(token_text)
        self._ends.append(len(self._text))
        return self._finalize(self._safe_end()) if token_text else ""

    def feed_all(self, text: str, ends: Sequence[int]) -> None:
        """Add all tokens at once, instead of by `feed`. The same text becomes final.

        Args:
            ends: where each token ends in the text, in characters.
        """
        self._add(text[: ends[-1]] if ends else "")
        self._ends = [min(end, len(self._text)) for end in ends]
        self._finalize(self._safe_end())

    def finish(self, finish_reason: str) -> str:
        """End the completion. Returns the text that became final."""
        if finish_reason in {"eos", "stop"} and not self._is_cut:
            return self._finalize(len(self._text.rstrip()))
        end = self._last_end() or self._plain_end() or self._inner_end()
        return self._finalize(end or (len(self._text.rstrip()) if self._keeps_partial_word else 0))

    def _add(self, text: str) -> None:
        """Add text, up to a quotation mark that closes nothing."""
        if self._is_cut:
            return
        num_good = len(text) if self._quotes is None else self._quotes.feed(text)
        self._is_cut = num_good < len(text)
        self._text += text[:num_good]
        if self._is_idea and (found := _PARAGRAPH_END.search(self._text)):
            self._text, self._is_cut = self._text[: found.start()], True

    def _finalize(self, end: int) -> str:
        start, self._num_final = self._num_final, max(end, self._num_final)
        return self._text[start : self._num_final]

    def _safe_end(self) -> int:
        """Where the text may end whatever follows: at a late end of a sentence, else at the end of a word."""
        # Begin at the last final word: what follows a word can show that it ends a sentence.
        begin = self._text.rfind(" ", 0, self._num_final) + 1
        if ends := [found.end() for found in _SENTENCE_END.finditer(self._text, begin) if self._ends_sentence(found)]:
            return ends[-1]
        if self._is_idea and not self._has_end:
            ends = [found.end() for found in _CLAUSE_END.finditer(self._text, begin)]
            if ends and self._share(ends[-1]) > FIRST_THIRD:
                self._has_clause_end = True
                return ends[-1]
        if self._has_end or self._has_clause_end:
            return self._num_final
        word_ends = (found for found in _WORD_END.finditer(self._text, begin) if self._is_in_reach(found.start()))
        return max((found.end() for found in word_ends if self._may_end(found.end())), default=0)

    def _plain_end(self) -> int:
        """The end of the last word of a completion that has only words with which no phrase ends."""
        word_ends = [found for found in _WORD_END.finditer(self._text) if self._is_in_reach(found.start())]
        text = self._text.rstrip()
        if text and _LAST_WORD_END.search(text) and self._is_in_reach(len(text) - 1):
            return len(text)
        return max((found.end() for found in word_ends), default=0)

    def _may_end(self, end: int) -> bool:
        """Whether the completion may end with the word, or the punctuation after it, that ends here."""
        if self._keeps_partial_word:
            return True
        return not ends_with_function_word(self._text[:end])

    def _last_end(self) -> int:
        """Where the text ends if no token follows."""
        text = self._text.rstrip()
        found = _LAST_SENTENCE_END.search(text)
        if found is not None and self._ends_sentence(found):
            return len(text)
        if text and self._is_in_reach(len(text) - 1) and not (self._has_end or self._has_clause_end):
            is_word_whole = _WORD.search(text) if self._is_cut else _LAST_WORD_END.search(text)
            if is_word_whole and self._may_end(len(text)):
                return len(text)
        return self._num_final

    def _inner_end(self) -> int:
        return max((found.end() for found in _INNER_WORD_END.finditer(self._text)), default=0)

    def _is_in_reach(self, position: int) -> bool:
        """Whether the word at `position` begins within the requested tokens."""
        if len(self._ends) <= self._length:
            return True
        found = _LAST_CHUNK.search(self._text[: position + 1])
        return found is None or found.start() < self._ends[self._length - 1]

    def _share(self, end: int) -> float:
        """Tokens up to the one that ends here or later, as a share of the requested ones."""
        return (bisect_left(self._ends, end) + 1) / self._length

    def _ends_sentence(self, found: re.Match[str]) -> bool:
        """Whether the completion may end with this end of a sentence. To be called in the order of the ends."""
        share, is_in_reach = self._share(found.end()), self._is_in_reach(found.start())
        if self._is_idea:
            is_end = share > FIRST_THIRD and (is_in_reach or not self._has_end)
        else:
            is_end = share > LAST_THIRD and is_in_reach
        is_end = is_end and not _ABBREVIATION.search(self._text[: found.end()])
        self._has_end |= is_end
        return is_end


def trim(
    text: str,
    ends: Sequence[int],
    length: int,
    finish_reason: str,
    prompt: str = "",
    *,
    keeps_partial_word: bool = False,
    is_idea: bool = False,
) -> str:
    """A whole completion, trimmed.

    Args:
        ends: where each token ends in `text`, in characters.
        length, prompt, keeps_partial_word, is_idea: as in `Trimmer`.
    """
    trimmer = Trimmer(length, prompt, keeps_partial_word=keeps_partial_word, is_idea=is_idea)
    trimmer.feed_all(text, ends)
    trimmer.finish(finish_reason)
    return trimmer.text


def rejection_reason(text: str, prompt: str) -> str | None:
    """Why a completion of `prompt` is not worth showing, or None.

    "loop": in a row, one to four characters six times, a word with the same punctuation three times, a word with any
    punctuation four times, a phrase of two or three words three times, or a longer phrase twice. A loop of words may
    begin in the prompt. "repeats_context": the completion begins with the words that the prompt ends with, or with a
    noun phrase that is among its last words ("The old man looked at" "the old man").
    """
    if _CHARACTER_LOOP.search(text):
        return "loop"
    before = prompt[-_PROMPT_CHARS:]
    plain = (before + text).casefold().split()
    words = [word.strip(_MARKS) or word for word in plain]  # a word of punctuation only stays
    continues_word = bool(before and text) and not (before[-1].isspace() or text[0].isspace())
    num_prompt_words = len(before.split()) - continues_word
    if _has_loop(plain, num_prompt_words, 1, 3) or _has_loop(words, num_prompt_words, 1, 4):
        return "loop"
    for size in range(2, min(MAX_PHRASE, len(words) // 2) + 1):
        if _has_loop(words, num_prompt_words, size, 3 if size < _LONG_PHRASE else 2):
            return "loop"
    starts_word = _WORD.match(before[-1:]) and text[:1].isspace()
    for size in range(1, min(MAX_PHRASE, num_prompt_words, len(words) - num_prompt_words) + 1):
        prompt_end = words[num_prompt_words - size : num_prompt_words]
        if prompt_end == words[num_prompt_words : num_prompt_words + size] and (size > 1 or starts_word):
            return "repeats_context"
    if not continues_word and copies_noun_phrase(words[num_prompt_words:], words[:num_prompt_words]):
        return "repeats_context"
    return None


def repeats_run(text: str, prompt: str) -> bool:
    """Whether `COPIED_WORDS` words in a row stand anywhere in the prompt, ignoring case and punctuation."""
    words, before = (
        [word for chunk in whole.casefold().split() if (word := chunk.strip(_MARKS))] for whole in (text, prompt)
    )
    joined = f" {' '.join(before)} "
    num_runs = len(words) - COPIED_WORDS + 1
    return any(f" {' '.join(words[at : at + COPIED_WORDS])} " in joined for at in range(num_runs))


def _has_loop(words: list[str], num_prompt_words: int, size: int, num_times: int) -> bool:
    """Whether a phrase of `size` words comes `num_times` in a row, and not only within the prompt's words."""
    equals_previous = bytes(map(eq, words[size:], words))  # 1 where words[size + i] == words[i]
    run = size * (num_times - 1)
    return equals_previous.find(b"\1" * run, max(0, num_prompt_words + 1 - size - run)) >= 0


def is_alike(first: str, second: str, similarity: float) -> bool:
    """Whether a reader would take two completions for the same, ignoring case and punctuation.

    Either the words of one text are the beginning of the other's, or the texts are at least `similarity` percent alike
    by rapidfuzz's `ratio`: 200 × the length of the longest common subsequence of characters / the sum of both lengths.
    """
    a, b = (" ".join(_WORD.findall(text.casefold())) for text in (first, second))
    return f"{a} ".startswith(f"{b} ") or f"{b} ".startswith(f"{a} ") or fuzz.ratio(a, b) >= similarity
