"""Contract with the editor: token healing, whole words, distinct sentences, time limits, feedback."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gateway.generation.trimming import is_alike, rejection_reason
from tests.e2e.harness import ROOT, Tercet

OPENING = "The old man looked at the sea and"
PAGE = (ROOT / "workers" / "checkpoints" / "page.txt").read_text()


def texts(answer: dict[str, Any]) -> list[str]:
    return [sentence["value"] for sentence in answer["sentences"]]


def contexts(number: int) -> list[str]:
    """Contexts that end at a word boundary, spread over the page."""
    ends = [found.start() for found in re.finditer(r"\s", PAGE)]
    chosen = [ends[int(at * len(ends) / number)] for at in range(1, number)]
    return [PAGE[max(0, end - 600) : end] for end in chosen]


def test_three_sentences_that_differ_and_end_at_a_word(tercet: Tercet) -> None:
    """A small sample of what `make bench BENCH=writer` measures."""
    asked = contexts(60)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda item: tercet.ask(item[1], temperature=0.8, seed=item[0]), enumerate(asked)))
    num_whole = 0
    for context, answer in zip(asked, answers, strict=True):
        values = [sentence["value"] for sentence in answer["sentences"]]
        num_whole += len(values) == 3
        for value in values:
            assert re.search(r"\w[^\w\s]*$", value), value
            assert rejection_reason(value, context) is None
        assert not any(is_alike(a, b, 80) for a in values for b in values if a is not b)
    assert num_whole >= len(asked) - 1
