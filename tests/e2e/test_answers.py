"""Answers of `POST /autocomplete` and `GET /metrics`, through both real pools."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from gateway.generation.selection import REJECTION_DETAILS
from gateway.generation.trimming import is_alike, rejection_reason
from tests.e2e.harness import ROOT, Tercet, until

pytestmark = pytest.mark.quick
OPENING = "The old man looked at the sea and"


def test_a_request_becomes_three_overlapping_branches_with_three_seeds(tercet: Tercet) -> None:
    answer = tercet.client.post(
        "/autocomplete",
        json={"context": OPENING, "seed": 4100, "length": 40},
        headers={"X-Request-Id": "three-branches"},
    ).json()
    assert answer["id"] == "three-branches"

    def finished() -> list[dict[str, Any]]:
        return [line for line in tercet.events("branch_finished") if line["request_id"] == "three-branches"]

    until(lambda: len(finished()) == 3, 10, "a log line of each branch")  # written after the answer has left
    branches = finished()
    assert sorted(branch["seed"] for branch in branches) == [4100, 4101, 4102]
    assert max(branch["started_at"] for branch in branches) < min(branch["ended_at"] for branch in branches)
    assert all(branch["role"] == "workers" for branch in branches)


@pytest.mark.integration
def test_three_sentences_that_differ_and_end_at_a_word(tercet: Tercet) -> None:
    """Where words of a page end. A small sample of what `make bench BENCH=writer` measures."""
    page = (ROOT / "workers/checkpoints/page.txt").read_text()
    ends = [found.start() for found in re.finditer(r"\s", page)]
    contexts = [page[max(0, end - 600) : end] for end in ends[len(ends) // 60 :: len(ends) // 60]]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda item: tercet.ask(item[1], temperature=0.8, seed=item[0]), enumerate(contexts)))
    num_whole = 0
    for context, answer in zip(contexts, answers, strict=True):
        values = [sentence["value"] for sentence in answer["sentences"]]
        num_whole += len(values) == 3
        for value in values:
            assert re.search(r"\w[^\w\s]*$", value), value
            assert rejection_reason(value, context) is None
        assert not any(is_alike(a, b, 80) for a in values for b in values if a is not b)
    assert num_whole >= len(contexts) - 1 >= 58


def test_a_worker_reports_its_memory(tercet: Tercet) -> None:
    for row in tercet.slots():
        rss = psutil.Process(row["pid"]).memory_info().rss  # more than the proportional set size by what is shared
        assert 0.3 * rss < row["memory_bytes"] < 1.1 * rss


def test_odd_texts_fail_no_branch(tercet: Tercet) -> None:
    for fields in (
        {"stop": ["x" * 256] * 8},
        {"stop": ["\x00"]},
        {"session": "\x00"},
        {"context": "\x00" * 300},
        {"context": "\ufeff\u202e\U0010ffff"},
        {"context": ""},
        {"explain": 10, "n": 8},
    ):
        body = {"context": "The old man looked at", "length": 3, "seed": 1, **fields}
        response = tercet.client.post("/autocomplete", json=body)
        assert response.status_code == 200, (fields, response.text)
        assert {error["code"] for error in response.json()["errors"]} <= REJECTION_DETAILS.keys(), fields


GERMAN = "Der alte Mann sah auf das Meer hinaus und dachte an die Zeit, als er noch jung war und"
HEBREW = "הזקן הביט בים וחשב על הימים שבהם היה עדיין צעיר"


def test_no_sentence_where_the_model_does_not_know_the_language(tercet: Tercet) -> None:
    """Only on request."""
    for context in (GERMAN, HEBREW):
        answer = tercet.ask(context, familiar_only=True)
        assert answer["sentences"] == []
        assert not answer["partial"]
        assert [error["code"] for error in answer["errors"]] == ["unfamiliar_context"] * 3
        assert "TERCET_MIN_FAMILIARITY" in answer["errors"][0]["detail"]
    known = "It was late in the evening. The old man looked at the sea and thought of"
    plain, checked = (tercet.ask(known, seed=3, familiar_only=only)["sentences"] for only in (False, True))
    assert [sentence["value"] for sentence in plain] == [sentence["value"] for sentence in checked]
    assert plain
    assert tercet.ask(HEBREW, clean=False)["sentences"]
