"""Specs of requests to test with."""

from __future__ import annotations

import time
from typing import Any

from gateway.generation.request import GenerationSpec
from shared.protocol import Sampling


def make_spec(timeout_s: float = 10.0, **fields: Any) -> GenerationSpec:
    """Three completions of a short prompt; `fields` replace any of the spec's."""
    defaults: dict[str, Any] = {
        "request_id": "r1",
        "model": "small",
        "prompt": "He saw",
        "max_prompt_tokens": 100,
        "num_completions": 3,
        "seed": 7,
        "sampling": Sampling(max_new_tokens=20),
        "ranks_first_token": True,
        "heals": True,
        "echoes": False,
        "num_top_logprobs": None,
        "is_streamed": False,
        "deadline": time.monotonic() + timeout_s,
        "session": None,
        "document": None,
    }
    return GenerationSpec(**(defaults | fields))
