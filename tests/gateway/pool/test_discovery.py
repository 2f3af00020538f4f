"""The addresses of host names: what changes, what a failing resolver leaves, and which addresses count."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import structlog

from gateway.pool.discovery import Discovery, resolve
from tests.e2e.harness import until


def test_each_change_is_reported_once_and_a_failure_leaves_the_last_addresses() -> None:
    answers: list[set[str] | Exception] = [
        socket.gaierror("no such name"),
        {"10.0.0.1"},
        {"10.0.0.1"},
        {"10.0.0.2", "10.0.0.1"},
        socket.gaierror("no resolver"),
        socket.gaierror("no resolver"),
        set(),
        {"10.0.0.2", "10.0.0.1"},
        {"10.0.0.2"},
    ]
    reported: list[frozenset[str]] = []

    def resolver(_host: str) -> frozenset[str]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return frozenset(answer)

    with structlog.testing.capture_logs() as events:
        Discovery("workers.example", reported.append, resolver, interval_s=0.001)
        until(lambda: len(reported) == 3, 5, "three changes")
    assert reported == [{"10.0.0.1"}, {"10.0.0.1", "10.0.0.2"}, {"10.0.0.2"}]
    failures = [event for event in events if event["event"] == "host_not_resolved"]
    assert [event["num_addresses_kept"] for event in failures] == [0, 2]


@pytest.mark.parametrize("address", ["10.0.0.7", "::1"])
def test_an_address_is_not_looked_up(address: str) -> None:
    def resolver(_host: str) -> frozenset[str]:
        raise AssertionError

    reported: list[frozenset[str]] = []
    Discovery(address, reported.append, resolver)
    assert reported == [{address}]


def test_a_worker_with_addresses_of_both_families_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def info(family: socket.AddressFamily, address: str) -> tuple[Any, ...]:
        return family, socket.SOCK_STREAM, 6, "", (address, 0)

    found = [
        info(socket.AF_INET6, "fd00::1"),
        info(socket.AF_INET6, "fd00::2"),
        info(socket.AF_INET, "10.0.0.1"),
        info(socket.AF_INET, "10.0.0.1"),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
    assert resolve("both.example") == {"10.0.0.1"}
    del found[2:]
    assert resolve("six.example") == {"fd00::1", "fd00::2"}


def test_the_systems_resolver_is_used() -> None:
    assert resolve("localhost") == {"127.0.0.1"}
    with pytest.raises(OSError, match=r"\[Errno"):
        resolve("no-such-host.invalid")
