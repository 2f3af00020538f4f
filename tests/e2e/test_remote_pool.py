"""A gateway and a pool of workers on TCP with TLS: the same answers as the local pool's, and errors that say what is
wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import serving
from tests.e2e.remote_pool import Gateway, Workers, running_workers

REQUEST = {"context": "The old man looked at the sea and", "n_samples": 3, "length": 12, "seed": 11}


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Two slots, with a local gateway too: `tercet serve` on one machine that shares its workers."""
    with running_workers(tmp_path_factory.mktemp("w"), is_alone=False) as pool:
        yield pool


@pytest.fixture(scope="module")
def gateway(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving(Gateway(tmp_path_factory.mktemp("g"), **workers.gateway_settings)) as gateway:
        yield gateway


def sentences(answer: dict[str, Any]) -> list[tuple[str, float]]:
    return [(sentence["value"], sentence["score"]) for sentence in answer["sentences"]]


@pytest.mark.parametrize("strategy", ["sample", "predict"])
def test_answers_are_those_of_the_local_pool(workers: Workers, gateway: Gateway, strategy: str) -> None:
    request: dict[str, Any] = {**REQUEST, "strategy": strategy}
    local, remote = workers.ask(**request), gateway.ask(**request)
    assert sentences(local) == sentences(remote)
    assert len(remote["sentences"]) == 3


def test_its_slots_are_those_of_the_addresses(workers: Workers, gateway: Gateway) -> None:
    slots = gateway.wait_until_warm()  # it serves as soon as one of them is
    assert [slot["state"] for slot in slots] == ["warm", "warm"]
    assert workers.key not in gateway.log() + str(slots) + str(gateway.ready())
