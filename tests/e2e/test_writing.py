"""Contract with the editor: token healing, whole words, distinct sentences, time limits, feedback."""

from __future__ import annotations

import re
import textwrap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gateway.generation.trimming import is_alike, rejection_reason
from tests.e2e.harness import ROOT, Tercet

OPENING = "The old man looked at the sea and"
PAGE = (ROOT / "workers" / "checkpoints" / "page.txt").read_text()
SENTENCES = textwrap.wrap(PAGE, 50)


def greedy(tercet: Tercet, context: str, length: int = 10) -> str:
    value: str = tercet.ask(context, temperature=0, n_samples=1, length=length)["sentences"][0]["value"]
    return value


def texts(answer: dict[str, Any]) -> list[str]:
    return [sentence["value"] for sentence in answer["sentences"]]


def test_every_position_in_a_sentence_can_be_completed(tercet: Tercet) -> None:
    """Fifty sentences, half of them the model's own. If the completion from before a word starts with the typed part of
    that word, the completion from inside the word is its rest."""
    own = [sentence[:25].rsplit(" ", 1)[0] for sentence in SENTENCES[:25]]
    with ThreadPoolExecutor(8) as pool:
        written = list(pool.map(lambda opening: greedy(tercet, opening, 8), own))
        sentences = [opening + text for opening, text in zip(own, written, strict=True)] + SENTENCES[25:50]
        assert len(sentences) == 50
        heads = {
            (sentence, start)
            for sentence in sentences
            for start in [found.start() for found in re.finditer(r"(?<=\w)(?= \w)", sentence)]
        }
        free = dict(zip(heads, pool.map(lambda head: greedy(tercet, head[0][: head[1]]), heads), strict=True))
        splits = [
            (sentence, start, split)
            for sentence, start in heads
            for split in range(start + 1, start + 1 + len(re.match(r" \w+", sentence[start:])[0]))  # type: ignore[index]
        ]
        healed = list(pool.map(lambda split: greedy(tercet, split[0][: split[2]]), splits))
    num_compared = 0
    for (sentence, start, split), text in zip(splits, healed, strict=True):
        typed, whole = sentence[start:split], free[sentence, start]
        if whole.startswith(typed):
            rest = whole[len(typed) :]
            assert rest.startswith(text) or text.startswith(rest), (sentence[:split], rest, text)
            num_compared += 1
    print(f"{len(splits)} places, {num_compared} compared")
    assert num_compared > 300


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


def test_an_explanation_lists_the_most_likely_tokens(tercet: Tercet) -> None:
    answer = tercet.ask("The old man looked at the se", seed=3, explain=4)
    plain = tercet.ask("The old man looked at the se", seed=3)
    assert texts(plain) == texts(answer)
    for sentence in answer["sentences"]:
        tokens = sentence["explanation"]
        text = "".join(token["text"] for token in tokens)
        assert text.removeprefix(" se").startswith(sentence["value"])
        assert len(tokens) == sentence["tokens"]
        mean = sum(token["logprob"] for token in tokens) / len(tokens)
        assert mean == pytest.approx(sentence["score"])
        for token in tokens:
            logprobs = [logprob for _, logprob in token["likeliest"]]
            assert len(logprobs) == 4
            assert logprobs == sorted(logprobs, reverse=True)
            assert token["logprob"] <= logprobs[0] + 1e-4
