"""Curly quotation marks, dashes and ellipses, which the served model does not know, on every route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.harness import Tercet
from workers.text.typography import PLAIN, Typography

pytestmark = pytest.mark.quick
CURLY = "“I don’t know what you mean,” she said. “It’s only a dream—and he’s gone… You’d almost"
plain = Typography(PLAIN).plain


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": " and gone,” he said."},
        {"clean": False},
        {"explain": 2},
        {"stop": ["”"]},
    ],
    ids=str,
)
def test_suggestions_are_those_for_straight_marks_in_the_spelling_of_the_text(
    tercet: Tercet, fields: dict[str, Any]
) -> None:
    straight = json.loads(json.dumps(fields, ensure_ascii=False).replace("”", '\\"'))
    found, expected = tercet.ask(CURLY, seed=5, **fields), tercet.ask(plain(CURLY), seed=5, **straight)
    values = [sentence["value"] for sentence in found["sentences"]]
    assert values
    assert [plain(value) for value in values] == [sentence["value"] for sentence in expected["sentences"]]
    assert not {*"\"'"} & {*"".join(values)}
    for sentence in found["sentences"]:
        if explanation := sentence.get("explanation"):
            assert "".join(token["text"] for token in explanation).endswith(sentence["value"])


def test_a_streamed_suggestion_is_spelled_alike(tercet: Tercet) -> None:
    body = {"context": CURLY, "seed": 9, "length": 48, "stream": True}
    with tercet.client.stream("POST", "/autocomplete", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    *deltas, answer = map(json.loads, events)
    expected = tercet.ask(CURLY, seed=9, length=48)
    assert [one["value"] for one in answer["sentences"]] == [one["value"] for one in expected["sentences"]]
    for sentence in answer["sentences"]:
        branch = sentence["seed"] - 9
        text = "".join(event["text"] for event in deltas if event["branch"] == branch and "value" not in event)
        assert sentence["value"].startswith(text)


def test_scores_offsets_and_tokens_are_those_of_the_text_as_it_was_sent(tercet: Tercet) -> None:
    body = {"prompt": CURLY, "max_tokens": 8, "seed": 3}
    choice = tercet.client.post("/v1/completions", json={**body, "echo": True, "logprobs": 1}).json()["choices"][0]
    assert choice["text"].startswith(CURLY)
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[len(choice["logprobs"]["tokens"]) - 8] == len(CURLY)
    ids = tercet.client.post("/tokenize", json={"prompt": CURLY}).json()["tokens"]
    assert len(ids) == len(offsets) - 8
    details = tercet.client.post(
        "/generate",
        json={"inputs": CURLY, "parameters": {"details": True, "decoder_input_details": True, "max_new_tokens": 4}},
    ).json()["details"]
    assert [token["id"] for token in details["prefill"]] == ids
    text = tercet.client.post("/v1/completions", json={**body, "max_tokens": 40}).json()["choices"][0]["text"]
    assert not {*"\"'"} & {*text}
