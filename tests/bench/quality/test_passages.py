"""Passages of prose, and the context that an editor sends."""

from __future__ import annotations

import random

from tests.bench.quality.passages import choose_passages, trim_context

TEXT = "the old man looked at the sea " * 100


def test_passages_have_whole_words() -> None:
    passages = choose_passages({"f": TEXT}, 5, 4, random.Random(0))
    assert len(passages) == 5
    for passage in passages:
        typed = passage.text[passage.start : passage.end]
        assert len(typed.split()) == 4
        assert typed.endswith(" ")
        assert not typed.startswith(" ")
        assert TEXT[passage.start - 1] == " "


def test_a_context_is_trimmed_as_the_editor_does() -> None:
    """Its start is a multiple of 4,096 characters, so that consecutive requests share a prefix."""
    text = "".join(chr(ord("a") + at % 26) for at in range(20000))
    assert trim_context(text[:8192]) == text[:8192]
    assert trim_context(text[:12287]) == text[:12287]
    assert trim_context(text[:12288]) == text[4096:12288]
    assert trim_context(text) == text[8192:]
