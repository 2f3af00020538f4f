"""Letters at the end of an English text with which no word begins, and the words that they may be a misspelling of.

Pure functions of texts and of a list of English words. A model decides whether a word is misspelled: it depends on the
text before it.
"""

from __future__ import annotations

import gzip
import re
from bisect import bisect_left
from functools import cache
from importlib.metadata import distribution
from itertools import takewhile
from pathlib import Path
from string import ascii_lowercase

# The list of inflections lacks these.
_CLOSED_CLASSES = """about above across after again against almost already also although always among another anybody
anyone anything around because before behind below beneath between beyond both cannot could despite during each either
enough even every everybody everyone everything everywhere from have having herself himself instead into itself many
might moreover most much must myself neither nevertheless nobody none nothing only otherwise ourselves perhaps quite
rather several shall should since somebody someone something sometimes somewhere such than that their themselves then
there therefore these they this those though through throughout together towards twelve under unless until upon very
what whatever when whenever where whereas whether which while whoever whose will with within without would your
yourself wednesday saturday february"""
# Shorter ones have too many words near them. Of capitalised ones at the start of a sentence, more are names.
_WORD = re.compile(r"(?<![\w'’./@-])(?:[a-z]{4,32}|[A-Z]{4,32}|(?P<capitalised>[A-Z][a-z]{5,32}))$")
_SENTENCE_START = re.compile(r"(?:^|[.!?…\n])\W*$")
_LONG_WORD = re.compile(r"[^\W\d_]{4,}")
# A text with more unknown words than this among its last eight long ones may be in another language.
_MAX_UNKNOWN = 2


def unknown_word(text: str) -> str:
    """The letters at the end of an English text with which no English word and no other word of the text begins.

    Empty if there are none, and if they may be a name: capitalised, but not at the start of a sentence.
    """
    found = _WORD.search(text[-64:])
    if found is None or _words_from((word := found[0]).lower()):
        return ""
    before = text[: -len(word)]
    last = _LONG_WORD.findall(before[-200:].lower())[-8:]
    is_name = found["capitalised"] and not _SENTENCE_START.search(before[-64:])
    is_other_language = sum(not _words_from(each) for each in last) > _MAX_UNKNOWN
    return "" if is_name or is_other_language or re.search(rf"\b{word}", before, re.IGNORECASE) else word


def respellings(word: str) -> list[str]:
    """English words, in the case of `word`, that begin with its letters but for one: left out, added, replaced, or
    swapped with the next. The first letter is right. A word that `word` begins with is none, unless the last letter of
    `word` repeats that word's: "meadowsw" is a longer word, "untill" is not.
    """
    letters, beginnings = word.lower(), set()
    for at in range(1, len(letters) + 1):
        head, tail = letters[:at], letters[at:]
        beginnings |= {head + letter + rest for letter in ascii_lowercase for rest in (tail, tail[1:])}
        beginnings |= {head + tail[1:], head + tail[1:2] + tail[:1] + tail[2:]}
    spell = str.upper if word.isupper() else str.capitalize if word[0].isupper() else str
    found = {each for beginning in beginnings for each in _words_from(beginning)}
    return sorted(spell(each) for each in found if not letters.startswith(each) or letters == each + each[-1])


@cache
def _words() -> list[str]:
    """Ascending; in lower case."""
    file = distribution("lemminflect").locate_file("lemminflect/resources/infl_lu.csv.gz")
    words = set(_CLOSED_CLASSES.split())
    for line in gzip.decompress(Path(str(file)).read_bytes()).decode().lower().splitlines():
        lemma, _, *forms = line.split(",")  # each form with its spellings, the usual first
        # Of two, the shorter often lacks a consonant: "occurred/occured".
        words |= {lemma, *(each for form in forms for each in form.split("/") if len(each) >= form.find("/"))}
    return sorted(filter(str.isalpha, words))


def _words_from(beginning: str) -> list[str]:
    words = _words()
    following = range(bisect_left(words, beginning), len(words))
    return list(takewhile(lambda word: word.startswith(beginning), map(words.__getitem__, following)))
