"""What a reader of English stumbles over: ends that leave a phrase open, quotation marks that close nothing, copies.

Pure functions of text. Other languages pass unchanged, but for words and marks that they share with English.
"""

from __future__ import annotations

import re
from itertools import takewhile

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
