"""The HTTP face of a slot, and transformers' model and tokenizer to compare it with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from falcon import testing
from transformers import AutoTokenizer, GPT2LMHeadModel

from tests.workers.helpers import EMBEDDED
from tests.workers.slots import HANGUPS, warm_service
from workers.app import SlotApp
from workers.service import SlotService


@pytest.fixture(scope="module")
def client() -> Iterator[testing.TestClient]:
    with warm_service() as service:
        yield testing.TestClient(SlotApp(service, HANGUPS))


@pytest.fixture(scope="module")
def reference() -> Any:
    return GPT2LMHeadModel.from_pretrained(EMBEDDED, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reference_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED)


@pytest.fixture(scope="module")
def service() -> Iterator[SlotService]:
    """In int8, as it is served by default."""
    with warm_service(max_batch=10, dtype="int8") as service:
        yield service
