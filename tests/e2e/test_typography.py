"""Curly quotation marks, dashes and ellipses, which the served model does not know."""

from __future__ import annotations

import json

import pytest

from tests.e2e.harness import Tercet
from workers.text.typography import PLAIN, Typography

pytestmark = pytest.mark.quick
CURLY = "“I don’t know what you mean,” she said. “It’s only a dream—and he’s gone… You’d almost"
plain = Typography(PLAIN).plain


def test_a_suggestion_is_that_for_straight_marks_in_the_spelling_of_the_text_also_streamed(tercet: Tercet) -> None:
    """tests/workers/test_respelling.py has the other fields and raw prompts."""
    body = {"context": CURLY, "seed": 9, "length": 48, "stream": True}
    with tercet.client.stream("POST", "/autocomplete", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    *deltas, answer = map(json.loads, events)
    expected = tercet.ask(CURLY, seed=9, length=48)
    assert [one["value"] for one in answer["sentences"]] == [one["value"] for one in expected["sentences"]]
    straight = tercet.ask(plain(CURLY), seed=9, length=48)
    assert [plain(one["value"]) for one in expected["sentences"]] == [one["value"] for one in straight["sentences"]]
    for sentence in answer["sentences"]:
        assert not {*"\"'"} & {*sentence["value"]}
        branch = sentence["seed"] - 9
        text = "".join(event["text"] for event in deltas if event["branch"] == branch and "value" not in event)
        assert sentence["value"].startswith(text)
