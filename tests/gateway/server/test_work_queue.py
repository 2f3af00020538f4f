"""Bulkheads of the HTTP server: the class of a request, and what a class and an owner may take."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from gateway.server.connections import LARGE_BYTES, Connection, Phase, Step
from gateway.server.work_queue import LARGE_S_PER_BYTE, MAX_PAUSE_S, WorkQueue
from shared.cpu_share import SHARE
from tests.gateway.server.arrivals import advance


class Clients:
    """Connections whose complete requests wait, with this many bytes each."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def waiting(self, num_bytes: int = 100) -> Connection:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            self._stack.callback(sock.close)
        connection = Connection(ours, "", "", now=0.0, max_body_bytes=1 << 20, tls=None)
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


def test_owners_take_turns_whatever_each_has_waiting(clients: Clients) -> None:
    """First come, first served, the second owner's request waited for all of the first's."""
    queue = WorkQueue(2, 30.0, 1 << 20)
    burst = [clients.waiting() for _ in range(10)]
    for connection in burst:
        assert queue.append(connection, "bursting") == []
    first, second = burst[:2]
    assert [queue.take(0.0), queue.take(0.0), queue.take(0.0)] == [first, second, None]  # no more than it has threads
    other = clients.waiting()
    queue.append(other, "other")
    queue.finish(first, 0.0, 0.0)
    third = queue.take(0.0)
    queue.finish(second, 0.0, 0.0)
    assert other in (third, queue.take(0.0))


def test_the_newest_request_of_the_owner_with_most_bytes_is_refused(clients: Clients) -> None:
    queue = WorkQueue(1, 30.0, 10_000)
    big = [clients.waiting(4000) for _ in range(3)]
    assert queue.append(big[0], "bursting") == []
    assert queue.append(big[1], "bursting") == []
    assert queue.append(big[2], "bursting") == [big[2]]
    small = [clients.waiting(1500) for _ in range(2)]
    assert queue.append(small[0], "other") == []
    assert queue.append(small[1], "other") == [big[1]]
    assert [queue.take(0.0), queue.take(0.0)] == [big[0], None]


def test_a_request_that_is_larger_than_the_bound_is_served_alone(clients: Clients) -> None:
    queue = WorkQueue(1, 30.0, 1000)
    connection = clients.waiting(4000)
    assert queue.append(connection, "") == []
    assert queue.take(0.0) is connection


def test_what_is_late_or_closed_takes_no_turn_and_no_bytes(clients: Clients) -> None:
    queue = WorkQueue(1, 30.0, 10_000)
    late, closed, last = (clients.waiting(4000) for _ in range(3))
    queue.append(late, "")
    assert queue.take_late(29.0) == []
    assert queue.take_late(31.0) == [late]
    queue.append(closed, "")
    assert queue.append(last, "") == []
    closed.phase = Phase.CLOSED
    assert queue.take(0.0) is last
    assert not queue.has_waiting


def test_large_requests_begin_at_a_bounded_rate_and_small_ones_between_them(clients: Clients) -> None:
    """At once, 60 bodies of 1 MB hold up every other request until the last of them is parsed."""
    queue = WorkQueue(3, 0.2, 1 << 20)
    large = [clients.waiting(LARGE_BYTES + 1) for _ in range(2)]
    for connection in large:
        queue.append(connection, "bursting")
    assert queue.take(10.0) is large[0]
    assert queue.take(10.0) is None
    small = clients.waiting()
    queue.append(small, "bursting")
    assert queue.take(10.0) is small
    assert queue.resumes_at == pytest.approx(10.0 + (LARGE_BYTES + 1) * LARGE_S_PER_BYTE)
    assert queue.take(queue.resumes_at) is large[1]
    assert queue.resumes_at == math.inf


def test_a_large_request_may_wait_for_as_many_others_as_the_class_may_hold(clients: Clients) -> None:
    queue = WorkQueue(1, 0.2, 1 << 20)
    large, small = clients.waiting(LARGE_BYTES + 1), clients.waiting()
    queue.append(large, "")
    queue.append(small, "")
    last = 0.2 + (1 << 20) * LARGE_S_PER_BYTE
    assert queue.take_late(0.199) == []
    assert queue.take_late(0.201) == [small]
    assert queue.take_late(last - 0.001) == []
    assert queue.take_late(last + 0.001) == [large]


def test_without_a_free_thread_no_large_request_resumes(clients: Clients) -> None:
    queue = WorkQueue(1, 30.0, 1 << 20)
    for _ in range(2):
        queue.append(clients.waiting(LARGE_BYTES + 1), "")
    queue.take(0.0)
    assert queue.resumes_at == math.inf  # the server would look at it without a pause


def test_large_requests_leave_threads_to_others(clients: Clients) -> None:
    """Texts of 1 MB to be tokenized held all threads of their class, each for seconds."""
    queue = WorkQueue(2, 30.0, 1 << 20, max_large=1)
    large, second, small = clients.waiting(LARGE_BYTES + 1), clients.waiting(LARGE_BYTES + 1), clients.waiting()
    for connection in (large, second):
        queue.append(connection, "bursting")
    assert queue.take(0.0) is large
    assert queue.take(1.0) is None
    assert queue.resumes_at == math.inf
    queue.append(small, "other")
    assert queue.take(1.0) is small
    queue.finish(large, 0.0, 0.0)
    assert queue.take(1.0) is second


def test_a_class_pauses_for_another_while_that_has_requests(clients: Clients) -> None:
    """150 `GET /metrics` at once took the interpreter from completions."""
    completions = WorkQueue(1, 30.0, 1 << 20)
    queue = WorkQueue(2, 30.0, 1 << 20, yields_to=completions)
    first, second, third, completion = (clients.waiting() for _ in range(4))
    for connection in (first, second, third):
        queue.append(connection, "")
    assert queue.take(10.0) is first
    completions.append(completion, "")
    completions.take(10.0)
    queue.finish(first, 10.0, 0.01)
    pause_s = 0.01 * (1 - SHARE) / SHARE
    assert queue.take(10.0 + pause_s / 2) is None
    assert queue.resumes_at == pytest.approx(10.0 + pause_s)
    assert queue.take(queue.resumes_at) is second
    queue.finish(second, 11.0, 60.0)
    assert queue.resumes_at == 11.0 + MAX_PAUSE_S
    completions.finish(completion, 11.0, 0.0)
    assert queue.take(11.0) is third
    assert queue.resumes_at == math.inf


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
