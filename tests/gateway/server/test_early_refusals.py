"""Early refusals: only where the ordinary way would refuse too, and only of requests that need no parsing."""

from __future__ import annotations

import time

import pytest

from gateway.server.early_refusals import find_early_refusal
from shared.errors import NotReady, Overloaded, ShuttingDown, TercetError
from shared.protocol import State
from tests.gateway.exposition import samples
from tests.gateway.generation.stubs import MakePool, StubPool

HEAD = b"POST /autocomplete HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\n"
REQUEST = HEAD + b'Content-Length: 16\r\n\r\n{"context": "a"}'


def make_full(make_pool: MakePool) -> StubPool:
    """One slot, which is full, and no queue."""
    pool = make_pool(lambda _: [], queue=0)
    pool.admission.reserve("small", 3, time.monotonic() + 1)
    return pool


def find(pool: StubPool, request: bytes, *, needs_keys: bool = False) -> TercetError | None:
    return find_early_refusal(request, pool.fanout, pool.metrics, needs_keys=needs_keys)


@pytest.mark.parametrize(
    "request_bytes",
    [REQUEST, HEAD + b"X-Session-Id: " + b"s" * 128 + b"\r\n\r\n", HEAD + b"\r\n\r\nOrigin: a body, not a header\r\n"],
)
def test_a_request_is_refused_early_while_the_pool_is_full_and_counted(
    make_pool: MakePool, request_bytes: bytes
) -> None:
    pool = make_full(make_pool)
    error = find(pool, request_bytes)
    assert isinstance(error, Overloaded)
    assert error.headers["Retry-After"] in {"1", "2", "3"}
    assert samples(pool.metrics, "tercet_refused_requests_total") == {("overloaded",): 1}
    assert samples(pool.metrics, "tercet_requests_total") == {("/autocomplete", "503"): 1}
    pool.admission.release(0)
    assert find(pool, request_bytes) is None


def test_every_reason_to_refuse_counts(make_pool: MakePool) -> None:
    pool = make_pool(lambda _: [])
    assert find(pool, REQUEST) is None
    pool.admission.update(0, State(state="failed"))
    assert isinstance(find(pool, REQUEST), NotReady)
    pool.fanout.cancel_all(ShuttingDown("The server is shutting down."))
    assert isinstance(find(pool, REQUEST), ShuttingDown)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /autocomplete HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /autocomplete/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /autocomplete?a HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /autocomplete HTTP/1.0\r\nHost: localhost\r\n\r\n",
        HEAD + b"oRigin: https://notes.example\r\n\r\n",
        HEAD + b"Prefer: respond-async\r\n\r\n",
        HEAD + b"X-Request-Id: mine\r\n\r\n",
        HEAD + b"X-Request-Id : mine\r\n\r\n",
        HEAD + b"Content-Encoding: br\r\n\r\n",
        HEAD + b"Expect: 100-continue\r\n\r\n",
        HEAD + b"Connection: close\r\n\r\n",
        HEAD + b"Connection: TE, Close\r\n\r\n",
        HEAD + b"X-Session-Id:" + b"s" * 129 + b"\r\n\r\n",
    ],
)
def test_other_requests_are_parsed(make_pool: MakePool, request_bytes: bytes) -> None:
    assert find(make_full(make_pool), request_bytes) is None


def test_where_keys_are_needed_every_request_is_parsed(make_pool: MakePool) -> None:
    assert find(make_full(make_pool), REQUEST, needs_keys=True) is None
