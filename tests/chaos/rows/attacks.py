"""R28: what three attacks did to the requests of another key."""

from __future__ import annotations

import gzip
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Event

from shared.api_keys import new_key
from tests.chaos.http_client import LOOPBACK, Answer, Connection, completion_request, request_bytes
from tests.chaos.load import Load, count_failures, milliseconds, run_threads, short_completion
from tests.chaos.measure import Context, Findings
from tests.e2e.harness import Tercet

Attack = Callable[[int, dict[str, str], Event], None]
NUM_DRIPPING, DRIPPED_BYTES, DRIP_S = 400, 10, 1.0
NUM_UPLOADS = 60
NUM_SESSIONS, SUPERSEDED_S = 4, 2.0
NUM_GZIP, GZIP_S = 4, 0.2  # within the default rate of a key, 20 requests per second
SETTLE_S = 2.0  # from an attack's begin to the first request that counts


def _text(num_bytes: int) -> str:
    return " ".join(f"She opened door {number}, and" for number in range(num_bytes // 20))[:num_bytes]


def drip_bodies(port: int, _headers: dict[str, str], stop: Event) -> None:
    """Connections without a key, each of which announces a MB and sends it slowly."""
    head = request_bytes("POST", "/autocomplete").replace(b"\r\n\r\n", b"\r\nContent-Length: 1000000\r\n\r\n")
    connections: list[socket.socket] = []
    for _ in range(NUM_DRIPPING):
        connections.append(socket.create_connection((LOOPBACK, port)))
        connections[-1].sendall(head)
    while not stop.wait(DRIP_S):
        for connection in connections:
            with suppress(OSError):
                connection.send(b"x" * DRIPPED_BYTES)
    for connection in connections:
        connection.close()


def upload_with_invalid_keys(port: int, _headers: dict[str, str], stop: Event) -> None:
    """Clients that send whole bodies of a MB, each with another invalid key."""

    def upload(number: int) -> None:
        body = json.dumps({"context": _text(1_000_000)}).encode()
        request = request_bytes("POST", "/autocomplete", body, {"x-api-key": f"tercet_{number:040}"})
        with Connection(port) as connection:
            while not stop.is_set():
                connection.exchange(request)

    run_threads(NUM_UPLOADS, upload)


def supersede_sessions(port: int, headers: dict[str, str], stop: Event) -> None:
    """A key's sessions, each of which supersedes its long request again and again."""

    def write(number: int) -> None:
        session = headers | {"X-Session-Id": f"session-{number}"}

        def ask(context: str) -> None:
            with Connection(port) as connection:
                connection.exchange(completion_request(context, headers=session, length=256, n=8))

        asking: list[threading.Thread] = []
        while not stop.is_set():
            asking.append(threading.Thread(target=ask, args=(f"She opened door {random.random()}, and",)))
            asking[-1].start()
            stop.wait(SUPERSEDED_S)
        for thread in asking:
            thread.join()

    run_threads(NUM_SESSIONS, write)


def send_empty_gzip_members(port: int, headers: dict[str, str], stop: Event) -> None:
    """A key's bodies of 63 kB that are thousands of empty gzip members."""
    body = gzip.compress(b"", mtime=0) * 3150
    request = request_bytes("POST", "/autocomplete", body, headers | {"Content-Encoding": "gzip"})

    def send(_number: int) -> None:
        with Connection(port) as connection:
            while not stop.wait(GZIP_S):
                connection.exchange(request)

    run_threads(NUM_GZIP, send)


class _Attacked:
    """An instance, and the key that is attacked."""

    def __init__(self, tercet: Tercet, headers: dict[str, dict[str, str]], seconds: float, findings: Findings) -> None:
        self._port, self._headers, self._seconds, self._findings = tercet.port, headers, seconds, findings
        self._manager = get_context("spawn").Manager()
        # The attack is sent by another process: its work in this one would delay what is measured.
        self._processes = ProcessPoolExecutor(1, get_context("spawn"))

    def close(self) -> None:
        self._processes.shutdown()
        self._manager.shutdown()

    @contextmanager
    def during(self, attack: Attack) -> Iterator[None]:
        stop = self._manager.Event()
        attacking = self._processes.submit(attack, self._port, self._headers["attacking"], stop)  # type: ignore[arg-type]
        try:
            time.sleep(SETTLE_S)
            yield
        finally:
            stop.set()
            attacking.result()

    def completions(self, num_clients: int, length: int) -> list[Answer]:
        """Of the other key, for the time of a measurement."""
        make_request = partial(short_completion, headers=self._headers["other"], length=length)
        answers = Load(self._port, num_clients, make_request=make_request).run_for(self._seconds)
        self._findings.none_of("failed", dict(count_failures(answers)))
        return answers

    def bodies(self, num_bytes: int) -> list[Answer]:
        """Requests of the other key with a context of this size."""
        body = json.dumps({"context": _text(num_bytes), "length": 8}).encode()
        request = request_bytes("POST", "/autocomplete", body, self._headers["other"])
        answers: list[Answer] = []
        until = time.monotonic() + self._seconds
        while time.monotonic() < until or not answers:
            with Connection(self._port) as connection:
                answers.append(connection.exchange(request))
            time.sleep(0.2)
        self._findings.none_of("failed", dict(count_failures(answers)))
        return answers


def withstand_attacks(context: Context, findings: Findings) -> None:
    """R28. Bodies that drip or have no valid key, sessions that are superseded, gzip members."""
    path = context.directory() / "keys"
    keys = {name: {"x-api-key": new_key(path, name, rate=0)[0]} for name in ("attacking", "other")}
    tercet = context.shared(keys=str(path), api_key=keys["other"]["x-api-key"], dtype="auto", ack_ms="1000")
    attacked = _Attacked(tercet, keys, context.amount(2, 10), findings)
    try:
        for name, attack in (("dripped bodies", drip_bodies), ("invalid keys", upload_with_invalid_keys)):
            attacked.bodies(1000)
            with attacked.during(attack):
                median_ms = milliseconds(attacked.bodies(300_000), 0.5)
                findings.at_most(f"{name}: 300 kB, median ms", median_ms, 90.0, is_speed=True)
                findings.figures[f"{name}: 1 MB, median ms"] = milliseconds(attacked.bodies(1_000_000), 0.5)
        findings.figures["calm, two writers, p50 ms"] = milliseconds(attacked.completions(2, 20), 0.5)
        with attacked.during(supersede_sessions):
            p50_ms = milliseconds(attacked.completions(2, 20), 0.5)
            findings.at_most("superseded sessions: p50 ms", p50_ms, 70.0, is_speed=True)
        calm_ms = milliseconds(attacked.completions(2, 12), 0.99)
        with attacked.during(send_empty_gzip_members):
            attacked_ms = milliseconds(attacked.completions(2, 12), 0.99)
        findings.at_most("gzip members: p99 / calm", attacked_ms / calm_ms, 2.0, is_speed=True)
    finally:
        attacked.close()
