"""Who takes text that spells a special token for that token: the dialects of others, as their servers do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.api.conftest import MakeApi
from tests.gateway.generation.stubs import three_texts

TEXT = "The file ends in <|endoftext|>"


@pytest.mark.parametrize(
    ("path", "body", "is_text"),
    [
        ("/autocomplete", {"context": TEXT}, True),
        ("/autocomplete", {"context": "He saw", "suffix": TEXT, "stop": ["<|endoftext|>"]}, True),
        ("/autocomplete", {"context": TEXT, "strategy": "predict"}, True),
        ("/autocomplete", {"context": TEXT, "clean": False, "explain": 3}, True),
        ("/v1/completions", {"prompt": TEXT}, False),
        ("/v1/completions", {"prompt": [TEXT, TEXT], "echo": True, "logprobs": 1}, False),
        ("/v1/completions", {"prompt": TEXT, "clean": True}, False),
        ("/v1/completions", {"prompt": "He saw", "suffix": TEXT}, False),
        ("/generate", {"inputs": TEXT}, False),
        ("/", {"inputs": TEXT}, False),
    ],
)
def test_a_dialect_says_what_special_tokens_in_a_text_are(
    make_api: MakeApi, path: str, body: dict[str, Any], is_text: bool
) -> None:
    api = make_api(three_texts, max_batch=8)
    assert api.post(path, body).status_code == 200
    assert {call.special_as_text for call in api.pool.workers[0].calls} == {is_text}


@pytest.mark.parametrize(
    ("field", "is_text"), [("input", False), ("inputs", False), ("prompt", False), ("context", True)]
)
def test_in_sagemaker_s_route_the_body_s_dialect_decides(make_api: MakeApi, field: str, is_text: bool) -> None:
    api = make_api(three_texts, settings={"sagemaker": "1", "hosts": "*"}, max_batch=8)
    assert api.post("/invocations", {field: TEXT}).status_code == 200
    assert {call.special_as_text for call in api.pool.workers[0].calls} == {is_text}
