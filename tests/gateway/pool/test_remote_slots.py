"""Slots of other machines: real TCP servers that speak the protocol, at addresses of a name that come and go."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from gateway.pool.access import RemoteAccess
from gateway.pool.admission import Admission
from gateway.pool.watcher import PoolWatcher
from shared.errors import NotReady
from shared.plan import REMOTE, Model, Plan, Slot, make_slots
from shared.protocol import Accepted, GenerateRequest, State
from shared.setting_values import PoolUrl
from tests.e2e.harness import until
from tests.gateway.pool.helpers import DONE, END, HEAD, Server, line, port_of, serving_requests
from tests.gateway.pool.reservations import claim

KEY = "k" * 40
HOST = "workers.example"
WARM = State(state="warm", model="small", device="cuda:0", max_batch=6, n_ctx=64, vocab_size=500, num_gateways=1)
UNAUTHORIZED = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def access(tmp_path: Path) -> RemoteAccess:
    path = tmp_path / "pool.key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    return RemoteAccess(path, None)


class Worker:
    """A worker that is warm until it is stopped, and whose branches end when `finish` is set."""

    def __init__(self, state: State = WARM, key: str = KEY) -> None:
        self.state = state
        self.key = key
        self.finish = threading.Event()
        self.stop = threading.Event()
        self.num_branches = 0

    def __call__(self, connection: socket.socket, request: bytes) -> None:
        if b"Authorization: Bearer " + self.key.encode() not in request:
            connection.sendall(UNAUTHORIZED)
        elif request.startswith(b"GET /state "):
            connection.sendall(HEAD)
            while not self.stop.wait(0.02):
                connection.sendall(line(self.state))
            connection.sendall(END)
        elif request.startswith(b"POST /generate "):
            self.num_branches += 1
            connection.sendall(HEAD + line(Accepted()))
            self.finish.wait(10)
            connection.sendall(line(DONE) + END)

    @contextmanager
    def serving(self, host: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
        with serving_requests(self, host=host, port=port) as server:
            try:
                yield server
            finally:
                self.finish.set()
                self.stop.set()


class Pool:
    """A gateway's pool behind a name whose addresses the test sets."""

    def __init__(self, port: int, access: RemoteAccess, *addresses: str) -> None:
        self.addresses = frozenset(addresses)
        plan = Plan({}, [Model("small", "", REMOTE, 0, 0)], [], max_remote_branches=100)
        self.admission = Admission(plan, "auto", 6)
        url = PoolUrl("small", "http", HOST, port, port)
        self.watcher = PoolWatcher(
            plan, self.admission, 1.0, [url], access, resolver=lambda _host: self.addresses, interval_s=0.01
        )

    def states(self) -> dict[int, str]:
        return {index: state.state for index, state in self.admission.states().items()}

    def become(self, states: dict[int, str]) -> None:
        until(lambda: self.states() == states, 5, f"slots that are {states}")

    def reserve(self, num_branches: int = 1, timeout_s: float = 1.0) -> list[int]:
        return self.admission.reserve(claim(timeout_s=timeout_s), num_branches)


def test_a_gateway_without_workers_refuses_until_one_is_found(access: RemoteAccess) -> None:
    with Worker().serving() as server:
        pool = Pool(port_of(server), access)
        assert pool.states() == {}
        assert pool.admission.models.get("small").n_ctx == 0
        with pytest.raises(NotReady, match="none has an address"):
            pool.reserve()
        with pytest.raises(NotReady):
            pool.admission.check("")
        pool.addresses = frozenset({"127.0.0.1"})
        pool.become({0: "warm"})
        model = pool.admission.models.get("small")
        assert (model.n_ctx, model.vocab_size) == (64, 500)
        assert pool.reserve(6) == [0] * 6
        assert pool.admission.capacity() == 6
        assert server.requests[0].startswith(b"GET /state HTTP/1.1\r\n")
        assert f"Host: {HOST}:{port_of(server)}".encode() in server.requests[0]


def test_a_slot_whose_address_is_gone_finishes_its_branch_and_is_removed(access: RemoteAccess) -> None:
    first, second = Worker(), Worker()
    with first.serving() as server, ThreadPoolExecutor() as threads:
        port = port_of(server)
        pool = Pool(port, access, "127.0.0.1")
        pool.become({0: "warm"})
        [index] = pool.reserve()
        call = pool.watcher.clients[index].call(GenerateRequest(prompt="a"), time.monotonic() + 10)
        branch = threads.submit(lambda: list(call.lines()))
        with second.serving("127.0.0.2", port):
            until(lambda: first.num_branches == 1, 5, "a branch in the worker")
            pool.addresses = frozenset({"127.0.0.2"})
            pool.become({0: "draining", 1: "warm"})
            assert pool.reserve(6) == [1] * 6
            with pytest.raises(Exception, match="had room"):
                pool.reserve(timeout_s=0.1)
            first.finish.set()
            assert branch.result(5) == [[DONE]]
            pool.admission.release(index, claim())
            pool.become({1: "warm"})
            assert list(pool.watcher.clients) == [1]
            until(lambda: server.num_closed == server.num_connections, 5, "all connections closed")
            pool.addresses = frozenset({"127.0.0.1", "127.0.0.2"})
            pool.become({1: "warm", 2: "warm"})  # an index is never used again


def test_an_address_that_returns_before_its_slot_is_removed_keeps_it(access: RemoteAccess) -> None:
    with Worker().serving() as server, Worker().serving("127.0.0.2", port_of(server)):
        pool = Pool(port_of(server), access, "127.0.0.1")
        pool.become({0: "warm"})
        [index] = pool.reserve()
        pool.addresses = frozenset({"127.0.0.2"})
        pool.become({0: "draining", 1: "warm"})
        pool.addresses = frozenset({"127.0.0.1"})
        pool.become({0: "warm"})
        pool.admission.release(index, claim())
        assert pool.reserve(6) == [0] * 6


def test_a_slot_whose_machine_and_address_are_gone_is_removed(access: RemoteAccess) -> None:
    worker = Worker()
    with worker.serving() as server:
        pool = Pool(port_of(server), access, "127.0.0.1")
        pool.become({0: "warm"})
    pool.become({0: "down"})
    pool.addresses = frozenset({"127.0.0.2"})
    pool.become({1: "down"})


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (Worker(key="other" * 10), "The worker refused the key (TERCET_POOL_KEY)."),
        (
            Worker(State(state="warm", model="medium")),
            "The worker serves medium, not small: correct the entry of TERCET_POOL.",
        ),
    ],
    ids=["key", "model"],
)
def test_what_an_operator_must_correct_is_named_and_not_tried_all_the_time(
    access: RemoteAccess, worker: Worker, reason: str
) -> None:
    with worker.serving() as server:
        pool = Pool(port_of(server), access, "127.0.0.1")
        pool.become({0: "down"})
        until(lambda: pool.admission.states()[0].reason == reason, 5, reason)
        time.sleep(0.5)
        assert pool.states() == {0: "down"}
        assert server.num_connections == 1
        assert KEY not in str(pool.admission.slots())


def test_an_unreachable_worker_is_tried_with_pauses(access: RemoteAccess) -> None:
    with Worker().serving() as server:
        port = port_of(server)
    pool = Pool(port, access, "127.0.0.1")
    pool.become({0: "down"})
    until(lambda: pool.admission.states()[0].reason == "Connection refused", 5, "an attempt")
    with Worker().serving(port=port):
        pool.become({0: "warm"})


def test_requests_name_their_document_by_a_hash_and_carry_the_first_key(access: RemoteAccess, tmp_path: Path) -> None:
    worker = Worker()
    worker.finish.set()
    with worker.serving() as server:
        pool = Pool(port_of(server), access, "127.0.0.1")
        pool.become({0: "warm"})

        def session_id(document: int | None, request_id: str = "r", session: str | None = "secret") -> bytes:
            request = GenerateRequest(prompt="a", session=session, request_id=request_id)
            call = pool.watcher.clients[0].call(request, time.monotonic() + 5, document=document)
            assert list(call.lines()) == [[DONE]]
            head = server.requests[-1].partition(b"\r\n\r\n")[0]
            assert b"secret" not in head
            [value] = [field[14:] for field in head.split(b"\r\n") if field.startswith(b"X-Session-Id: ")]
            return value

        assert session_id(1) == session_id(1, "s") != session_id(2)
        assert session_id(None) == session_id(None) != session_id(None, "s")
        assert b"X-Session-Id" not in server.requests[0]
        new_key = "n" * 40
        (tmp_path / "pool.key").write_text(f"{new_key}\n{KEY}\n")
        worker.key = new_key
        until(lambda: access.key == new_key, 5, "the new key")
        assert session_id(1)


def test_local_slots_come_first_and_keep_their_indices(access: RemoteAccess, short_path: Path) -> None:
    plan = Plan({}, [], make_slots(["cpu"], [("small", 2)], short_path, 3), max_remote_branches=100)
    admission = Admission(plan, "auto", 6)
    with Worker().serving() as server:
        url = PoolUrl("small", "http", "127.0.0.1", port_of(server), port_of(server))
        PoolWatcher(plan, admission, 1.0, [url], access)
        until(lambda: admission.states()[2].state == "warm", 5, "a warm slot")
        assert [status.device for status in admission.slots()] == ["cpu", "cpu", "cuda:0"]
    assert plan.max_running == 106


def test_a_worker_that_drains_is_not_reconnected_all_the_time(access: RemoteAccess) -> None:
    def answer(connection: socket.socket, _request: bytes) -> None:
        connection.sendall(HEAD + line(State(state="draining", model="small", pid=1)) + END)

    with serving_requests(answer) as server:
        pool = Pool(port_of(server), access, "127.0.0.1")
        until(lambda: server.num_connections > 3, 5, "some attempts")
        time.sleep(1.0)
        assert server.num_connections < 8
        pool.addresses = frozenset({"127.0.0.2"})
        until(lambda: 0 not in pool.states(), 5, "the slot's removal")


def test_a_name_with_very_many_addresses_makes_a_bounded_number_of_slots(
    access: RemoteAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each slot has a thread. Without a bound, the answering DNS server decides how many."""
    monkeypatch.setattr("gateway.pool.watcher.MAX_HOST_SLOTS", 4)
    with Worker().serving() as server, structlog.testing.capture_logs() as logs:
        pool = Pool(port_of(server), access, *(f"127.0.0.{number}" for number in range(1, 100)))
        until(lambda: len(pool.states()) == 4, 5, "four slots")
        pool.addresses = frozenset({"127.0.0.1"})
        pool.become({0: "warm"})
    [left_out] = [line for line in logs if line["event"] == "addresses_left_out"]
    assert (left_out["num_used"], left_out["num_found"]) == (4, 99)


def test_a_slot_for_which_no_thread_can_be_started_is_added_when_one_can(
    access: RemoteAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake for the limit of threads."""
    start, refused = PoolWatcher._start, threading.Event()

    def fail_once(watcher: PoolWatcher, slot: Slot) -> None:
        if not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(watcher, slot)

    monkeypatch.setattr(PoolWatcher, "_start", fail_once)
    with Worker().serving() as server, structlog.testing.capture_logs() as events:
        pool = Pool(port_of(server), access, "127.0.0.1")
        pool.become({0: "warm"})
    assert refused.is_set()
    assert [event["event"] for event in events].count("slot_added") == 1
