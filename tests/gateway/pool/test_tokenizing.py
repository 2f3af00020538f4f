"""Tokens of texts: one long text at a time, ended with its client, retried only where no worker has begun."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.pool.client import BranchError
from gateway.pool.tokenizing import PoolTokenizer
from shared.errors import ClientGone, DeadlineExceeded, NotReady, ShuttingDown, TercetError
from shared.protocol import LONG_TEXT_CHARS, State, TokenizeResponse, Tokens
from tests.e2e.harness import until
from tests.gateway.generation.stubs import MakePool, StubPool

LONG = "x" * (LONG_TEXT_CHARS + 1)


def tokens_of(text: str) -> TokenizeResponse:
    """A text as one token."""
    return TokenizeResponse(ids=[7], texts=[text], ends=[len(text)], n_ctx=1024, eos_id=0)


def found_in(text: str) -> Tokens:
    """What the gateway reads of `tokens_of`."""
    return Tokens(ids=[7], ends=[len(text)], n_ctx=1024, eos_id=0)


class Worker:
    """What a slot does with texts: the next of `steps` for each, then an answer."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.is_held = threading.Event()
        self.is_held.set()
        self.num_running = self.max_running = 0
        self._lock = threading.Lock()

    def __call__(self, text: str) -> TokenizeResponse:
        with self._lock:
            self.began.append(text)
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
        self.is_held.wait(20)
        with self._lock:
            self.num_running -= 1
        return tokens_of(text)


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def pool(make_pool: MakePool, worker: Worker) -> StubPool:
    return make_pool(lambda _: [], tokenize=worker)


@pytest.fixture
def tokenizer(pool: StubPool) -> PoolTokenizer:
    return PoolTokenizer(pool.admission, pool.clients)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def later(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def start(
    threads: ThreadPoolExecutor, tokenizer: PoolTokenizer, text: str, owner: str, **options: Any
) -> Future[Tokens]:
    future = threads.submit(tokenizer.tokenize, "small", text, later(), owner=owner, **options)
    time.sleep(0.01)  # they arrive in this order
    return future


def test_one_long_text_at_a_time_is_in_a_worker_whatever_the_number_of_slots(
    make_pool: MakePool, threads: ThreadPoolExecutor, worker: Worker
) -> None:
    pool = make_pool(*[lambda _: []] * 4, tokenize=worker)
    tokenizer = PoolTokenizer(pool.admission, pool.clients)
    worker.is_held.clear()
    futures = [start(threads, tokenizer, LONG, "a") for _ in range(4)]
    futures += [start(threads, tokenizer, LONG, "b")]
    until(lambda: worker.num_running == 1, 5, "a text in a worker")
    worker.is_held.set()
    assert [future.result(10).ids for future in futures] == [[7]] * 5
    assert worker.max_running == 1
    assert pool.admission.in_flight() == [0] * 4


def test_a_text_waits_for_no_long_one(threads: ThreadPoolExecutor, tokenizer: PoolTokenizer, worker: Worker) -> None:
    worker.is_held.clear()
    futures = [start(threads, tokenizer, LONG, "a") for _ in range(2)]
    futures.append(start(threads, tokenizer, "b", "a"))
    until(lambda: worker.num_running == 2, 5, "a long text and another in the worker")
    assert "b" in worker.began
    worker.is_held.set()
    assert [future.result(10).ids for future in futures] == [[7]] * 3
    assert worker.max_running == 2


@pytest.mark.parametrize("is_waiting", [True, False], ids=["waiting", "running"])
@pytest.mark.parametrize("by", ["client", "stop"])
def test_a_text_ends_with_its_client_or_with_the_server(
    threads: ThreadPoolExecutor, tokenizer: PoolTokenizer, worker: Worker, is_waiting: bool, by: str
) -> None:
    worker.is_held.clear()
    if is_waiting:
        start(threads, tokenizer, LONG, "a")
        until(lambda: worker.num_running == 1, 5, "the text before it in the worker")
    hangups: list[Callable[[], None]] = []

    @contextmanager
    def cancelling(cancel: Callable[[], None]) -> Iterator[None]:
        hangups.append(cancel)
        yield

    text = LONG + "text"
    future = start(threads, tokenizer, text, "b", cancelling=cancelling)
    until(lambda: worker.num_running == 1 and hangups, 5, "the text in the worker, or its turn")
    if by == "client":
        hangups[0]()
    else:
        tokenizer.cancel_all(ShuttingDown("over"))
    expected: type[TercetError] = ClientGone if by == "client" else ShuttingDown
    assert isinstance(future.exception(5), expected)
    assert worker.num_running == 1  # it was not awaited
    assert worker.began.count(text) == (not is_waiting)
    worker.is_held.set()


def test_a_text_that_a_worker_has_begun_is_sent_to_no_other(make_pool: MakePool, threads: ThreadPoolExecutor) -> None:
    """The same text went to the next slot after 10 s, and so to all of them."""
    worker = Worker()
    pool = make_pool(lambda _: [], lambda _: [], tokenize=worker)
    tokenizer = PoolTokenizer(pool.admission, pool.clients)
    worker.is_held.clear()
    with pytest.raises(DeadlineExceeded):
        tokenizer.tokenize("small", "slow", later(0.3))
    lost = start(threads, tokenizer, "lost", "")
    until(lambda: "lost" in worker.began, 5, "a text in the worker")
    for client in pool.clients:  # as the watcher does when a worker's state stream ends
        client.abort_calls(BranchError("slot_lost", "lost"))
    assert isinstance(lost.exception(5), NotReady)
    worker.is_held.set()
    assert worker.began == ["slow", "lost"]


def test_a_text_goes_to_another_slot_if_none_has_begun_it(make_pool: MakePool) -> None:
    worker = Worker()
    pool = make_pool(lambda _: [], lambda _: [], lambda _: [], tokenize=worker)
    tokenizer = PoolTokenizer(pool.admission, pool.clients)
    pool.workers[0].close()
    pool.admission.update(1, State(state="loading"))
    assert tokenizer.tokenize("small", "a", later()) == found_in("a")
    pool.workers[2].close()
    with pytest.raises(NotReady):
        tokenizer.tokenize("small", "a", later())
    assert worker.began == ["a"]


def test_a_text_waits_for_a_slot_that_is_warm_in_a_moment(make_pool: MakePool, threads: ThreadPoolExecutor) -> None:
    """During a reload it was refused at once."""
    worker = Worker()
    pool = make_pool(lambda _: [], tokenize=worker)
    pool.admission.update(0, State(state="loading"))
    future = start(threads, PoolTokenizer(pool.admission, pool.clients), "a", "")
    assert not worker.began
    pool.admission.update(0, State(state="warm"))
    assert future.result(5) == found_in("a")


def test_a_text_waits_for_a_slot_that_another_gateway_uses(make_pool: MakePool) -> None:
    refusals = iter(["slot_full", "slot_full"])

    def tokenize(text: str) -> TokenizeResponse | str:
        return next(refusals, None) or tokens_of(text)

    pool = make_pool(lambda _: [], tokenize=tokenize)
    tokenizer = PoolTokenizer(pool.admission, pool.clients)
    assert tokenizer.tokenize("small", "a", later()) == found_in("a")
    assert next(refusals, None) is None
