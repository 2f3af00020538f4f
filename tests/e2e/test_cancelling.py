"""Cancelled requests release their queue places and sequences: in the gateway's queue and in mid-decode."""

from __future__ import annotations

import json
import re
import socket
import time

import httpx
import pytest

from tests.e2e.harness import PATIENCE_S, Tercet, until

pytestmark = pytest.mark.quick
LONG = {"context": "The old man looked at the sea and", "length": 256, "seed": 1}


def in_flight(tercet: Tercet) -> int:
    """Sequences in the worker's engine, from the worker's metrics."""
    transport = httpx.HTTPTransport(uds=str(tercet.run_dir / "slot-0.sock"))
    with httpx.Client(transport=transport, base_url="http://slot") as worker:
        text = worker.get("/metrics").text
    found = re.search(r'in_flight_branches\{slot="0"\} (\d+)', text)
    assert found is not None
    return int(found[1])


def test_a_client_that_hangs_up_frees_its_sequences(slow: Tercet) -> None:
    body = json.dumps(LONG).encode()
    head = f"POST /autocomplete HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", slow.port)) as client:
        client.sendall(head + body)
        until(lambda: in_flight(slow) == 3, PATIENCE_S, "the request in the engine")
    gone = time.monotonic()
    until(lambda: in_flight(slow) == 0, 5, "its sequences freed")
    print(f"freed after {1e3 * (time.monotonic() - gone):.0f} ms")
    assert slow.ask(length=2)["sentences"]
