"""The openai SDK, unmodified, against the real pools: answers, exceptions and retries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI

from shared.api_keys import new_key
from tests.e2e.harness import Tercet, metric, running, until

PROMPT = "The old man looked at the sea and"


@pytest.fixture(scope="package")
def client(tercet: Tercet) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{tercet.url}/v1", api_key="none") as client:
        yield client


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tercet]:
    """An instance that requires a key, has no queue and computes one sequence at a time."""
    base = tmp_path_factory.mktemp("t")
    key, _ = new_key(base / "keys", "tests")
    with running(base, keys=str(base / "keys"), api_key=key, key_rate="0", max_batch="1", queue="0") as instance:
        yield instance


def client_of(tercet: Tercet) -> OpenAI:
    return OpenAI(base_url=f"{tercet.url}/v1", api_key=tercet.environ["TERCET_API_KEY"])


def test_an_overloaded_server_is_asked_again_after_the_time_that_it_names(small: Tercet) -> None:
    """The default delay before the first retry is at most half a second; `Retry-After` says one second or more."""

    def num_refused() -> float:
        return metric(small, 'tercet_refused_requests_total{reason="overloaded"}')

    with client_of(small) as client, ThreadPoolExecutor(1) as threads:
        stream = client.completions.create(model="embedded", prompt=PROMPT, max_tokens=256, stream=True)
        next(iter(stream))  # it occupies the only place
        began = time.monotonic()
        pending = threads.submit(
            client.completions.with_raw_response.create, model="embedded", prompt=PROMPT, max_tokens=1
        )
        until(num_refused, 10, "a refusal")
        stream.close()
        answer = pending.result()
    assert (answer.status_code, answer.retries_taken, num_refused()) == (200, 1, 1)
    assert time.monotonic() - began >= 1
