"""The closed-loop and open-loop clients, against a small HTTP server in this process."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from deploy.tuning.load import clients as clients_module
from deploy.tuning.load.clients import LOOPBACK, Clients, Connection, Exchange
from deploy.tuning.load.workload import W
from gateway.api.schema import AutocompleteResponse, Sentence
from shared.errors import StartError
from tests.bench.rounds import raise_for_status
from tests.gateway.pool.helpers import port_of, respond, serving_requests
from workers.checkpoints.resolve import resolve


def sentence(queue_ms: float, decode_ms: float) -> Sentence:
    return Sentence(
        value=" x",
        time=0.1,
        score=-1.0,
        finish_reason="length",
        seed=1,
        slot=0,
        model="m",
        tokens=20,
        cached_tokens=5,
        queue_ms=queue_ms,
        prefill_ms=10.0,
        decode_ms=decode_ms,
    )


ANSWER = msgspec.json.encode(
    AutocompleteResponse(
        id="1",
        model="m",
        seed=1,
        sentences=[sentence(1.0, 50.0), sentence(2.0, 60.0)],
        time=0.1,
        partial=False,
        errors=[],
    )
)

STREAM = b"event: done\ndata: " + ANSWER + b"\n\n"


@contextmanager
def gateway(bodies: list[dict[str, Any]], delay_s: float = 0.0) -> Iterator[int]:
    """A port that answers requests with `ANSWER` after a delay, but breaks the connection for the context "break"."""

    def answer(connection: socket.socket, request: bytes) -> None:
        body = json.loads(request.partition(b"\r\n\r\n")[2])
        bodies.append(body)
        if body["context"] == "break":
            return
        time.sleep(delay_s)
        kind, data = ("text/event-stream", STREAM) if body.get("stream") else ("application/json", ANSWER)
        respond(connection, 503 if body["context"] == "busy" else 200, data, {"Content-Type": kind})

    with serving_requests(answer) as server:
        yield port_of(server)


def test_a_reply_is_read_from_the_gateways_response() -> None:
    reply = Exchange(200, ANSWER, 1.0, 1.019, 1.080).reply(21)
    assert reply.engine_ms == 72
    assert (reply.wall_ms, reply.first_text_ms) == pytest.approx((80, 19))
    assert (reply.num_tokens, reply.cached_tokens) == (42, 5)
    assert Exchange(503, b"busy", 1.0, 0.0, 1.1).reply(20).num_tokens == 0


def test_concurrent_clients_send_new_prompts_and_count_every_reply() -> None:
    bodies: list[dict[str, Any]] = []
    with gateway(bodies) as port:
        clients = Clients(LOOPBACK, port, resolve("embedded"), W, 1, session="s")
        load = clients.send_concurrently(4, 3)
        streamed = clients.send_for(2, 0.05, True)
    assert len(load.replies) == 12
    assert len({body["context"] for body in bodies}) == len(bodies) == 12 + len(streamed.replies)
    assert {body["session"] for body in bodies} == {"s"}
    assert load.elapsed_s > 0
    assert all(reply.num_tokens == 40 and reply.wall_ms > 0 for reply in raise_for_status(load.replies))
    assert len(streamed.replies) >= 2
    assert all(0 < reply.first_text_ms <= reply.wall_ms for reply in raise_for_status(streamed.replies))


def test_a_lost_connection_counts_as_status_0_and_the_next_request_reconnects() -> None:
    with gateway([]) as port, Connection(LOOPBACK, port) as connection:
        replies = [connection.request(W.body(context, 1)) for context in ("one", "break", "two", "busy")]
    assert [reply.status for reply in replies] == [200, 0, 200, 503]
    with pytest.raises(StartError, match="status 0"):
        raise_for_status(replies)


def test_arrivals_do_not_wait_for_responses() -> None:
    bodies: list[dict[str, Any]] = []
    with gateway(bodies, delay_s=0.2) as port:
        clients = Clients(LOOPBACK, port, resolve("embedded"), W, 1)
        load = clients.send_at_rate(100, 0.2)
    assert len(load.replies) == 20  # one after another they would take 4 s
    assert load.elapsed_s < 2
    assert {reply.status for reply in load.replies} == {200}
    assert len({body["context"] for body in bodies}) == 20


def test_a_request_that_is_sent_late_has_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """No coordinated omission: here a single client must send what arrives while it waits for responses."""
    monkeypatch.setattr(clients_module, "MAX_OPEN_LOOP_CLIENTS", 1)
    with gateway([], delay_s=0.05) as port:
        clients = Clients(LOOPBACK, port, resolve("embedded"), W, 1)
        load = clients.send_at_rate(100, 0.2)
    # The last of 20 requests ends after 1 s at the earliest, and was planned within the first 0.2 s.
    assert load.replies[-1].wall_ms >= 800
    assert load.replies[0].wall_ms < load.replies[-1].wall_ms


def test_an_open_loop_sends_one_request_at_least() -> None:
    with gateway([]) as port:
        clients = Clients(LOOPBACK, port, resolve("embedded"), W, 1)
        assert len(clients.send_at_rate(0.01, 0.1).replies) == 1
