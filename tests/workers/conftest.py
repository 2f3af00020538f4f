"""The HTTP face of a slot, and transformers' model and tokenizer to compare it with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from tests.workers.contract import Endpoint
from tests.workers.helpers import EMBEDDED
from tests.workers.slots import endpoint_of, warm_service
from workers.service import SlotService


@pytest.fixture(scope="module")
def client() -> Iterator[Endpoint]:
    with warm_service() as service, endpoint_of(service) as client:
        yield client


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
