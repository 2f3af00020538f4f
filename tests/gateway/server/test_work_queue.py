"""Bulkheads of the HTTP server: the class of a request, and what a class and an owner may take."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from gateway.server.bounds import MAX_SMALL, divide_descriptors
from gateway.server.connections import Connection, Phase, Step
from gateway.server.served_app import Work
from gateway.server.work_queue import WorkQueue
from tests.gateway.server.arrivals import advance, open_connection


class Clients:
    """Connections whose complete requests wait, with this many bytes each."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def waiting(self, num_bytes: int = 100) -> Connection:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            self._stack.callback(sock.close)
        connection = open_connection(ours, max_body_bytes=1 << 20)
        head = b"POST /jobs HTTP/1.1\r\nContent-Length: %d\r\n\r\n"
        theirs.sendall(head % (num_bytes - len(head) - 1) + b"x" * num_bytes)
        while advance(connection, 0.0) is not Step.ANSWER:
            pass
        connection.wait_for_thread(0.0)
        return connection


@pytest.fixture
def clients() -> Iterator[Clients]:
    with ExitStack() as stack:
        yield Clients(stack)


def test_the_newest_request_of_the_owner_with_most_bytes_is_refused(clients: Clients) -> None:
    queue = WorkQueue(1, 30.0, 10_000)
    big = [clients.waiting(4000) for _ in range(3)]
    assert queue.append(big[0], "bursting") == []
    assert queue.append(big[1], "bursting") == []
    assert queue.append(big[2], "bursting") == [big[2]]
    small = [clients.waiting(1500) for _ in range(2)]
    assert queue.append(small[0], "other") == []
    assert queue.append(small[1], "other") == [big[1]]
    assert [queue.take(), queue.take()] == [big[0], None]


def test_a_request_that_is_larger_than_the_bound_is_served_alone(clients: Clients) -> None:
    queue = WorkQueue(1, 30.0, 1000)
    connection = clients.waiting(4000)
    assert queue.append(connection, "") == []
    assert queue.take() is connection


def test_what_is_late_or_closed_takes_no_turn_and_no_bytes(clients: Clients) -> None:
    queue = WorkQueue(1, 30.0, 10_000)
    first, late, closed, last = (clients.waiting(4000) for _ in range(4))
    queue.append(first, "")
    assert queue.take_late(31.0) == []  # a thread is free
    assert queue.take() is first
    queue.append(late, "")
    assert queue.take_late(29.0) == []
    assert queue.take_late(31.0) == [late]
    queue.finish()
    queue.append(closed, "")
    assert queue.append(last, "") == []
    closed.phase = Phase.CLOSED
    assert queue.take() is last
    assert not queue.waiting


def test_a_store_that_hangs_holds_the_threads_for_jobs_and_other_requests_for_two_seconds(clients: Clients) -> None:
    _, work = divide_descriptors(100, 10, 30.0)
    held, late = [clients.waiting() for _ in range(MAX_SMALL)], clients.waiting()
    for connection in (*held, late):
        work[Work.JOBS].append(connection, "")
    assert [work[Work.JOBS].take() for _ in (*held, late)] == [*held, None]
    assert work[Work.JOBS].take_late(1.9) == []
    assert work[Work.JOBS].take_late(2.1) == [late]
    work[Work.READS].append(late, "")
    assert work[Work.READS].take() is late


def test_responses_that_wait_for_slow_clients_are_bounded_at_the_expense_of_who_has_most(clients: Clients) -> None:
    queue = WorkQueue(1, 30.0, 20 << 20)

    def answered(owner: str, num_bytes: int) -> tuple[Connection, list[Connection]]:
        connection = clients.waiting()
        with suppress(BrokenPipeError):  # it has handed over the whole response, of which some is sent later
            connection.response.sendall(b"x" * num_bytes)
        return connection, queue.hold_response(connection, owner)

    first, closed = answered("slow", 9 << 20)
    assert closed == []
    assert answered("slow", 9 << 20)[1] == []
    assert answered("other", 3 << 20)[1] == [first]
    assert answered("other", 3 << 20)[1] == []
