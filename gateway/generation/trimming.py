"""Where a completion ends, which completions are rejected, and which are near-duplicates. Pure functions of text.

A completion usually ends where its tokens ran out, mid-word or mid-sentence. It is trimmed to the end of a word with
which a phrase can end, or of a sentence if one ends in its last third; a completion that ended by itself (end of text,
stop string) keeps its end. It ends before a quotation mark that closes nothing. The same rules apply to streamed text:
text is final when no later token can make them remove it. An idea ends with a sentence or clause, for
which more tokens are generated than requested.

What a reader of English stumbles over is cut or rejected: ends that leave a phrase open, quotation marks that close
nothing, copies. Other languages pass unchanged, but for words and marks that they share with English.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import takewhile
from operator import eq

from rapidfuzz import fuzz

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

DETERMINER = re.compile(r"an?|any|each|every|his|her|its|my|our|some|that|the|their|these|this|those|your")
# Words that leave a reader waiting for the next one: determiners, prepositions, conjunctions, auxiliaries, and pronouns
# that are subjects only.
_FUNCTION_WORD = re.compile(
    rf"{DETERMINER.pattern}|about|after|all|am|and|are|as|at|be|because|been|before|but|by|can|could|did|do|does|for|from"
    r"|had|has|have|he|how|i|if|in|into|is|may|might|must|no|nor|of|on|or|shall|she|should|so|such|than|they|though"
    r"|through|to|under|until|upon|very|was|we|were|what|when|where|which|while|who|whose|will|with|without|would"
)
_LAST_WORD = re.compile(r"[\w’']+$")
# After these words, pronouns that may be objects elsewhere are subjects.
_SUBJECT_AT_END = re.compile(
    r"\b(and|as|because|but|if|or|than|that|what|when|where|which|while)\s+(it|you)$", re.IGNORECASE
)
_MAX_END_CHARS = 24  # longer than each of these
# A noun phrase is a copy if it is among this number of words before the cursor.
_NUM_COPIED_WORDS = 8
# End of a prompt in which an open quotation is looked for.
_MAX_QUOTED_CHARS = 2000
_QUOTE_OR_BLANK_LINE = re.compile(r'["“”]|\n\n')
# Beginnings of sentences in which a chat model answers a writer, or speaks about the text.
CHAT_VOICE = re.compile(
    r"(?:^|\n|[.!?:][\"”]?\s)\s*(?:sure[,!]|certainly[,!]|absolutely!|as an ai\b|(?:a|q|answer|note|update):"
    r"|i(?:['’]d| would|['’]ll| will|['’]m| am) (?:be )?(?:happy|glad|here) to (?:help|assist)"
    r"|i hope (?:this|that) helps|(?:i['’]m|i am) sorry, but i (?:can|do)"
    r"|i (?:have )?made (?:a (?:couple of|few) |some )?(?:minor |small )?(?:tweak|change|edit)s? to the"
    r"|(?:here|below|these|this|that)(?:['’]s| is| are)(?: just)?(?: [\w-]+){0,3}"
    r" (?:example|list|version|sample|summary|revision|rewrite|draft|breakdown|explanation|recipe)s?\b"
    r"|(?:can|could) you (?:help me|tell|provide|give|explain|describe|rewrite)"
    r"|how (?:would you|does that sound|do you plan)|the answer(?: is\b|:)|the (?:next |first )?(?:sentence|phrase)\b"
    r"|this (?:list|story|sentence|response) (?:can|is|has)|in (?:an?|this|the) (?:story|scene|sentence|example),)",
    re.IGNORECASE,
)
# After these, a straight quotation mark closes.
_BEFORE_CLOSING = re.compile(r"[\w.,;:!?…%)\]’'*]")


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

    def trim(self, text: str, ends: Sequence[int], finish_reason: str) -> str:
        """A whole completion, trimmed, instead of token by token by `feed`. The same text becomes final.

        Args:
            ends: where each token ends in the text, in characters.
        """
        self._add(text[: ends[-1]] if ends else "")
        self._ends = [min(end, len(self._text)) for end in ends]
        self._finalize(self._safe_end())
        self.finish(finish_reason)
        return self.text

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


def ends_with_function_word(text: str) -> bool:
    """Whether the last word of a text leaves its phrase open. Not if punctuation follows it."""
    end = text[-_MAX_END_CHARS:]
    found = _LAST_WORD.search(end)
    is_function = found is not None and is_function_word(found[0].casefold())
    return is_function or _SUBJECT_AT_END.search(end) is not None


def copies_noun_phrase(words: list[str], prompt_words: list[str]) -> bool:
    """Whether a text begins with a noun phrase that is among the last words before it.

    The phrases may go on with different words ("the old man looked at" "the old man with") once they share two.

    Args:
        words, prompt_words: of both texts, casefolded and without punctuation.
    """
    if not words or not DETERMINER.fullmatch(words[0]):
        return False
    phrase = _content_words(words[1:])
    last = prompt_words[-_NUM_COPIED_WORDS:]
    for at, word in enumerate(last):
        if DETERMINER.fullmatch(word):
            other = _content_words(last[at + 1 :])
            num_common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(phrase, other, strict=False)))
            if num_common > 1 or (num_common == 1 and num_common in {len(phrase), len(other)}):
                return True
    return False


def _content_words(words: list[str]) -> list[str]:
    return list(takewhile(lambda word: not is_function_word(word), words))


def is_function_word(word: str) -> bool:
    """Whether a casefolded word leaves a reader waiting for the next one."""
    return _FUNCTION_WORD.fullmatch(word) is not None


class Quotes:
    """Finds the first quotation mark that closes nothing. Quotations that are open at a blank line end there."""

    def __init__(self, prompt: str) -> None:
        self._depth = 0  # of curly marks
        self._is_open = False  # after an odd number of straight marks
        self._last = ""  # the character before what is fed next
        end = prompt[-_MAX_QUOTED_CHARS:]
        for found in _QUOTE_OR_BLANK_LINE.finditer(end):
            self._closes_nothing(found, end)
        self._last = end[-1:]

    def feed(self, text: str) -> int:
        """How many characters of `text` stand before such a mark; all if it has none."""
        text, num_before = self._last + text, len(self._last)
        for found in _QUOTE_OR_BLANK_LINE.finditer(text):
            if found.end() > num_before and self._closes_nothing(found, text):
                return found.start() - num_before
        self._last = text[-1:]
        return len(text) - num_before

    def _closes_nothing(self, found: re.Match[str], text: str) -> bool:
        match found[0]:
            case "“":
                self._depth += 1
            case "”":
                self._depth -= 1
                if self._depth < 0:
                    self._depth = 0
                    return True
            case '"':
                if not self._is_open and _BEFORE_CLOSING.match(text[max(0, found.start() - 1) : found.start()]):
                    return True
                self._is_open = not self._is_open
            case _:
                self._depth, self._is_open = 0, False
        return False
