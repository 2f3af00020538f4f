"""Slow, plain definitions of a loop, a repetition and similarity, to compare the gateway's own with."""

from __future__ import annotations

import re

from gateway.generation.trimming import DETERMINER, is_function_word

PUNCTUATION = ".,;:!?…\"'“”‘’()[]«»_*-–—"


def is_alike_reference(first: str, second: str, similarity: float) -> bool:
    """Words, without case and punctuation: one list begins the other, or the joined texts' LCS ratio is high enough.

    A text without words begins no other.
    """
    a, b = (re.findall(r"\w+", text.casefold()) for text in (first, second))
    short = min(len(a), len(b))
    return (short > 0 and a[:short] == b[:short]) or lcs_percent(" ".join(a), " ".join(b)) >= similarity


def lcs_percent(a: str, b: str) -> float:
    """200 × the longest common subsequence / the sum of both lengths; 100 for two empty texts."""
    lengths = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if x == y else max(lengths[i][j + 1], lengths[i + 1][j])
    return 200 * lengths[-1][-1] / (len(a) + len(b)) if a or b else 100.0


def rejection_reference(text: str, prompt: str) -> str | None:
    """Every position, every phrase length, compared word by word. `prompt` is shorter than what is searched of it."""
    for start in range(len(text)):
        for size in range(1, 5):
            unit = text[start : start + size]
            if unit and not unit[0].isspace() and "\n" not in unit[1:] and text[start:].startswith(unit * 6):
                return "loop"
    whole = prompt + text
    words: list[str] = []
    num_prompt_words = 0
    for match in re.finditer(r"\S+", whole.casefold()):
        words.append(match[0])
        # A word across the boundary is the completion's.
        num_prompt_words += match.end() <= len(prompt) and not (
            match.end() == len(prompt) and bool(text) and not text[0].isspace()
        )
    bare = [word.strip(PUNCTUATION) or word for word in words]
    for phrases, size, num_times in [
        (words, 1, 3),
        (bare, 1, 4),
        (bare, 2, 3),
        (bare, 3, 3),
        *((bare, size, 2) for size in range(4, 13)),
    ]:
        for start in range(len(phrases)):
            run = phrases[start : start + size * num_times]
            is_whole = len(run) == size * num_times
            if is_whole and run == run[:size] * num_times and start + len(run) > num_prompt_words:
                return "loop"
    old, new = bare[:num_prompt_words], bare[num_prompt_words:]
    is_new_word = bool(re.search(r"\w\Z", prompt)) and text[:1].isspace()
    for size in range(1, 13):
        is_repetition = size <= len(old) and size <= len(new) and old[-size:] == new[:size]
        if is_repetition and (size > 1 or is_new_word):
            return "repeats_context"
    is_inside_word = bool(prompt) and not prompt[-1].isspace() and not text[:1].isspace()
    if not is_inside_word and copies_reference(new, old[-8:]):
        return "repeats_context"
    return None


def copies_reference(new: list[str], old: list[str]) -> bool:
    """A determiner and content words on both sides: two equal ones, or one that is all there is on either side."""
    runs = [" ".join(words) for words in runs_after_determiners(new)[:1] + runs_after_determiners(old)]
    if not new or not DETERMINER.fullmatch(new[0]):
        return False
    mine, *others = [run.split() for run in runs]
    for other in others:
        for size in range(1, 1 + min(len(mine), len(other))):
            if mine[:size] == other[:size] and (size > 1 or 1 in {len(mine), len(other)}):
                return True
    return False


def runs_after_determiners(words: list[str]) -> list[list[str]]:
    """The content words after each determiner."""
    runs = []
    for at, word in enumerate(words):
        if DETERMINER.fullmatch(word):
            run: list[str] = []
            while at + 1 + len(run) < len(words) and not is_function_word(words[at + 1 + len(run)]):
                run.append(words[at + 1 + len(run)])
            runs.append(run)
    return runs
