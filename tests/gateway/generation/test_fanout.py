"""The fan-out over real slot clients and stub workers on Unix sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
import structlog

from gateway.generation import request as request_module
from gateway.generation.fanout import FULL_QUEUE_PAUSE_S, MAX_BRANCHES_AT_ONCE
from gateway.generation.request import BranchEvent, BranchFailure, BranchResult, RequestContext, TokenDelta
from gateway.pool.client import SlotClient
from shared.errors import DeadlineExceeded, Overloaded
from shared.protocol import PROTOCOL, Accepted, GenerateRequest, Group, Sampling, State
from shared.time_margins import MARGINS
from tests.e2e.harness import until
from tests.gateway.exposition import total
from tests.gateway.generation.stubs import (
    Break,
    Hang,
    MakePool,
    Raw,
    Refusal,
    Respond,
    Step,
    StubPool,
    Together,
    completion,
    make_spec,
)


@pytest.fixture(autouse=True)
def late_events_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the last event can come later after the deadline than a client waits for it."""
    monkeypatch.setattr(request_module, "MARGINS", replace(MARGINS, collect_s=30.0))


def by_seed(request: GenerateRequest) -> Iterator[Step]:
    yield from completion(request, f" seed {request.seed}")


def start(pool: StubPool, context: RequestContext) -> list[BranchEvent]:
    """Start a request and collect its events until every branch has its outcome."""
    pool.fanout.start(context)
    return collect(context, context.spec.num_branches)


def texts_of(delta: TokenDelta) -> tuple[str, ...]:
    return tuple(token.text for token in delta.tokens)


def collect(context: RequestContext, num_branches: int) -> list[BranchEvent]:
    events: list[BranchEvent] = []
    while sum(not isinstance(event, TokenDelta) for event in events) < num_branches:
        event = context.next_event()
        assert event is not None
        events.append(event)
    return events


def test_a_request_is_a_call_per_branch_with_its_spec(make_pool: MakePool) -> None:
    pool = make_pool(by_seed)
    sampling = Sampling(max_new_tokens=9, temperature=0)
    context = RequestContext(make_spec(sampling=sampling, owner="o", session="s", max_prompt_tokens=50))
    outcomes = start(pool, context)
    results = sorted(
        (outcome for outcome in outcomes if isinstance(outcome, BranchResult)), key=lambda result: result.branch
    )
    assert [(result.branch, result.seed, result.slot, result.model) for result in results] == [
        (0, 7, 0, "small"),
        (1, 8, 0, "small"),
        (2, 9, 0, "small"),
    ]
    assert [result.done.text for result in results] == [" seed 7", " seed 8", " seed 9"]
    calls = sorted(pool.workers[0].calls, key=lambda call: call.seed)
    for index, call in enumerate(calls):
        assert (call.prompt, call.prompt_ids, call.max_prompt_tokens) == ("He saw", None, 50)
        assert (call.heal, call.echo, call.stream, call.logprobs) == (True, False, False, None)
        assert (call.owner, call.session) == ("o", "s")
        assert (call.request_id, call.group) == ("r1", Group(id="r1.0", size=3))
        assert (call.sampling.max_new_tokens, call.sampling.first_rank) == (9, index)
        assert 9_000 < call.deadline_ms < 10_000
    pool.wait_until_idle()
    assert pool.num_branches(0, "ok") == 3


def test_tokens_that_arrive_together_with_the_result_are_delivered_before_it(make_pool: MakePool) -> None:
    pool = make_pool(lambda request: [Together(list(completion(request, " the sea.")))])
    events = start(pool, RequestContext(make_spec(is_streamed=True, num_completions=1)))
    assert isinstance(events[0], TokenDelta)
    assert texts_of(events[0]) == (" the", " sea", ".")
    assert isinstance(events[1], BranchResult)


def test_a_result_is_delivered_before_its_response_ends(make_pool: MakePool) -> None:
    is_delivered, has_ended = threading.Event(), threading.Event()

    def respond(request: GenerateRequest) -> Iterator[Step]:
        yield from completion(request, " the sea")
        is_delivered.wait(5)
        has_ended.set()

    pool = make_pool(respond)
    [result] = start(pool, RequestContext(make_spec(num_completions=1)))
    assert isinstance(result, BranchResult)
    assert not has_ended.is_set()
    is_delivered.set()


@pytest.mark.parametrize(
    ("steps", "code"),
    [([Break()], "broken"), ([Refusal(503, "not_ready")], "not_ready"), ([Hang()], "not_acknowledged")],
)
def test_a_failed_branch_is_retried_on_another_slot(make_pool: MakePool, steps: list[Step], code: str) -> None:
    pool = make_pool(lambda _: steps, by_seed)
    pool.clients[0] = SlotClient(pool.plan.slots[0], ack_s=0.5 if code == "not_acknowledged" else 10.0)
    [result] = start(pool, RequestContext(make_spec(num_completions=1)))
    assert isinstance(result, BranchResult)
    assert result.slot == 1
    assert [len(worker.calls) for worker in pool.workers] == [1, 1]
    pool.wait_until_idle()
    assert (pool.num_branches(0, code), pool.num_branches(1, "ok")) == (1, 1)


def kill_worker(pool: StubPool, slot: int) -> Iterator[Step]:
    """As its master's reader sees it, with the process id of the worker that is gone."""
    pool.admission.update(slot, State(state="down", pid=pool.admission.states()[slot].pid, protocol=PROTOCOL))
    yield Accepted()
    yield Break()


def test_a_request_that_ends_two_workers_gets_no_third(make_pool: MakePool) -> None:
    def kill(slot: int) -> Respond:
        return lambda _: kill_worker(pool, slot)

    pool = make_pool(kill(0), kill(1), kill(2), max_batch=1)
    with structlog.testing.capture_logs() as logs:
        [failure] = start(pool, RequestContext(make_spec(num_completions=1)))
    assert isinstance(failure, BranchFailure)
    assert failure.code == "broken"
    assert sorted(len(worker.calls) for worker in pool.workers) == [0, 1, 1]
    [event] = [event for event in logs if event["event"] == "request_ended_workers"]
    assert event["request_id"] == "r1"
    pool.wait_until_idle()


def test_branches_that_have_not_begun_end_with_their_request_that_ends_workers(make_pool: MakePool) -> None:
    def kill(slot: int) -> Respond:
        return lambda _: kill_worker(pool, slot)

    pool = make_pool(kill(0), kill(1), by_seed, max_batch=1)
    context = RequestContext(make_spec(num_completions=1, prompts=("He saw",) * 2))
    context.ends_workers = True
    outcomes = start(pool, context)
    assert [outcome.code for outcome in outcomes if isinstance(outcome, BranchFailure)] == ["slot_lost"] * 2
    assert not any(worker.calls for worker in pool.workers)


def test_all_branches_on_a_worker_that_is_killed_are_tried_again(make_pool: MakePool) -> None:
    """The signal may be anyone's."""

    def kill(_: GenerateRequest) -> Iterator[Step]:
        return kill_worker(pool, 0)

    pool = make_pool(kill, by_seed, max_batch=3)
    outcomes = start(pool, RequestContext(make_spec()))
    assert {outcome.slot for outcome in outcomes if isinstance(outcome, BranchResult)} == {1}
    assert len(outcomes) == 3


def test_connections_that_break_while_their_workers_live_are_no_reason_to_stop(make_pool: MakePool) -> None:
    pool = make_pool(lambda _: [Break()], lambda _: [Break()], by_seed)
    [result] = start(pool, RequestContext(make_spec(num_completions=1)))
    assert isinstance(result, BranchResult)


def test_a_branch_without_a_thread_refuses_its_request_and_leaves_no_room_taken(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake for the limit of threads; tests/e2e/test_engine_failures.py has a real one."""
    pool = make_pool(by_seed)
    context = RequestContext(make_spec(is_streamed=True))  # its events do not wait for others
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(Overloaded, match="No thread"):
            pool.fanout.start(context)
        pool.fanout.top_up(context, range(3, 4))
    assert pool.admission.in_flight() == [0]
    failure = context.next_event()
    assert isinstance(failure, BranchFailure)
    assert (failure.branch, failure.code) == (3, "overloaded")
    assert len(start(pool, RequestContext(make_spec()))) == 3
    pool.wait_until_idle()


@pytest.mark.parametrize("place", ["_call", "_reserve_one"])
@pytest.mark.parametrize("kind", [BaseException, SystemExit, ZeroDivisionError])
def test_an_exception_of_any_class_is_its_branchs_failure_and_is_logged_without_texts(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], place: str
) -> None:
    pool = make_pool(by_seed, max_batch=2)
    prompts = ("a secret prompt",)
    with monkeypatch.context() as patched, structlog.testing.capture_logs() as logs:
        patched.setattr(pool.fanout, place, Mock(side_effect=kind))
        outcomes = start(pool, RequestContext(make_spec(prompts=prompts)))
    failures = [outcome for outcome in outcomes if isinstance(outcome, BranchFailure)]
    assert {failure.code for failure in failures} == {"internal_error"}
    assert all("r1" in failure.detail for failure in failures)
    assert [event["event"] for event in logs] == ["unhandled_exception"] * len(failures)
    assert all(isinstance(event["exc_info"], kind) for event in logs)
    assert "secret" not in str(logs)
    assert len(start(pool, RequestContext(make_spec()))) == 3
    pool.wait_until_idle()


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_follows_the_last_line_changes_nothing(make_pool: MakePool) -> None:
    pool = make_pool(lambda request: [*completion(request, " a"), Raw(b"x\n")], by_seed)
    [result] = start(pool, RequestContext(make_spec(num_completions=1)))
    assert isinstance(result, BranchResult)
    pool.wait_until_idle()


@pytest.mark.parametrize("code", ["slot_full", "not_ready"])
def test_a_branch_waits_for_a_slot_that_is_full_or_whose_worker_stops(make_pool: MakePool, code: str) -> None:
    """More often than a failed branch is retried, and without the budget for retries."""
    refusals = iter([Refusal(503, code)] * 5)

    def respond(request: GenerateRequest) -> Iterator[Step]:
        refusal = next(refusals, None)
        yield from [refusal] if refusal else completion(request, " the sea")

    pool = make_pool(respond, num_retries=0)
    [result] = start(pool, RequestContext(make_spec(num_completions=1)))
    assert isinstance(result, BranchResult)
    assert pool.num_branches(0, code) == 5


def test_a_branch_that_waits_for_room_ends_at_its_deadline(make_pool: MakePool) -> None:
    pool = make_pool(lambda _: [Refusal(503, "slot_full")])
    [event] = start(pool, RequestContext(make_spec(num_completions=1, timeout_s=1.0)))
    assert isinstance(event, BranchFailure)
    pool.wait_until_idle()


def test_more_branches_than_room_run_in_waves(make_pool: MakePool) -> None:
    def respond(request: GenerateRequest) -> Iterator[Step]:
        time.sleep(0.02)
        yield from by_seed(request)

    pool = make_pool(respond, respond, max_batch=2)
    outcomes = start(pool, RequestContext(make_spec(num_completions=8)))
    results = [outcome for outcome in outcomes if isinstance(outcome, BranchResult)]
    assert sorted(result.branch for result in results) == list(range(8))
    assert {result.done.text for result in results} == {f" seed {7 + index}" for index in range(8)}
    assert all(1 <= worker.max_running <= 2 for worker in pool.workers)
    groups = [call.group for worker in pool.workers for call in worker.calls]
    assert groups == [Group(id="r1.0", size=8)] * 8
    pool.wait_until_idle()


def test_branches_beyond_those_at_once_start_as_others_end(make_pool: MakePool) -> None:
    running = threading.Semaphore(MAX_BRANCHES_AT_ONCE)
    prompts = tuple(f"prompt {number}" for number in range(15))

    def respond(request: GenerateRequest) -> Iterator[Step]:
        assert running.acquire(blocking=False)
        time.sleep(0.005)
        running.release()
        yield from completion(request, f" after {request.prompt}, seed {request.seed}")

    pool = make_pool(respond, respond, max_batch=32)
    outcomes = start(pool, RequestContext(make_spec(prompts=prompts, num_completions=2)))
    texts = {outcome.branch: outcome.done.text for outcome in outcomes if isinstance(outcome, BranchResult)}
    assert texts == {
        2 * number + k: f" after {prompt}, seed {7 + k}" for number, prompt in enumerate(prompts) for k in range(2)
    }
    pool.wait_until_idle()


def test_branches_that_have_not_started_wait_behind_other_requests(make_pool: MakePool) -> None:
    order: list[str] = []
    is_other_waiting = threading.Event()

    def respond(request: GenerateRequest) -> Iterator[Step]:
        assert is_other_waiting.wait(5)
        order.append(request.request_id)
        yield from by_seed(request)

    pool = make_pool(respond, max_batch=1)
    batch = RequestContext(make_spec(prompts=("a",) * (MAX_BRANCHES_AT_ONCE + 2), num_completions=1))
    pool.fanout.start(batch)
    other = RequestContext(make_spec(request_id="other", num_completions=1))
    waiting = threading.Thread(target=pool.fanout.start, args=(other,))
    waiting.start()
    until(lambda: pool.admission.num_arrived == 1 + MAX_BRANCHES_AT_ONCE, 5, "the other request")
    is_other_waiting.set()
    collect(batch, batch.spec.num_branches)
    collect(other, 1)
    waiting.join(5)
    # The first branches, all of which wait now, were admitted with their request.
    assert order.index("other") == MAX_BRANCHES_AT_ONCE


def test_a_branch_that_has_not_started_tries_a_full_queue_again(make_pool: MakePool) -> None:
    """The first branch that ends leaves room for a single branch, and the queue is full of a request for two."""
    gates = {"first": threading.Event(), "rest": threading.Event()}

    def respond(request: GenerateRequest) -> Iterator[Step]:
        assert gates["first" if request.prompt == "first" else "rest"].wait(5)
        yield from by_seed(request)

    pool = make_pool(respond, max_batch=MAX_BRANCHES_AT_ONCE, queue=2)
    prompts = ("first", *("a",) * MAX_BRANCHES_AT_ONCE)
    batch = RequestContext(make_spec(prompts=prompts, num_completions=1))
    pool.fanout.start(batch)
    other = RequestContext(make_spec(request_id="other", num_completions=2))
    waiting = threading.Thread(target=pool.fanout.start, args=(other,))
    waiting.start()
    until(lambda: pool.admission.num_waiting == 2, 5, "the other request in the queue")
    gates["first"].set()
    until(lambda: pool.admission.in_flight() == [MAX_BRANCHES_AT_ONCE - 1], 5, "the end of the first branch")
    time.sleep(FULL_QUEUE_PAUSE_S)  # long enough for the last branch to be refused once
    gates["rest"].set()
    assert all(isinstance(outcome, BranchResult) for outcome in collect(batch, batch.spec.num_branches))
    collect(other, 2)
    waiting.join(5)


def test_a_cancelled_request_starts_no_further_branches(make_pool: MakePool) -> None:
    pool = make_pool(lambda request: [Accepted(), Hang()], max_batch=32)
    context = RequestContext(make_spec(prompts=("a",) * 20, num_completions=1))
    pool.fanout.start(context)
    pool.workers[0].wait(lambda worker: len(worker.calls) == MAX_BRANCHES_AT_ONCE)
    context.cancel()
    pool.wait_until_idle()
    assert len(pool.workers[0].calls) == MAX_BRANCHES_AT_ONCE


def test_a_top_up_is_placed_before_waiting_requests(make_pool: MakePool) -> None:
    is_released = threading.Event()

    def respond(request: GenerateRequest) -> Iterator[Step]:
        if request.request_id == "r1" and request.seed == 7:
            assert is_released.wait(5)
        yield from by_seed(request)

    pool = make_pool(respond, max_batch=1)
    first, second = RequestContext(make_spec(num_completions=1)), RequestContext(make_spec(request_id="r2"))
    pool.fanout.start(first)
    waiting = threading.Thread(target=pool.fanout.start, args=(second,))
    waiting.start()
    until(lambda: pool.admission.num_waiting > 0, 5, "the second request in the queue")
    pool.fanout.top_up(first, range(1, 2))
    until(lambda: pool.admission.num_arrived == 3, 5, "the top-up")
    is_released.set()
    collect(first, 2)
    collect(second, 3)
    waiting.join()
    assert [call.request_id for call in pool.workers[0].calls[:3]] == ["r1", "r1", "r2"]


def test_a_branch_whose_turn_comes_after_the_deadline_is_not_sent(make_pool: MakePool) -> None:
    pool = make_pool(by_seed)
    context = RequestContext(make_spec(timeout_s=0.004, num_completions=1))  # less than the margin for returning
    try:
        [failure] = start(pool, context)
    except DeadlineExceeded:  # on a busy machine, already at the reservation
        return
    assert isinstance(failure, BranchFailure)
    assert failure.code == "deadline_exceeded"
    assert pool.workers[0].calls == []


def test_cancellation_ends_running_branches_and_waiting_ones_of_a_later_wave(make_pool: MakePool) -> None:
    pool = make_pool(lambda _: [Accepted(), Hang()], max_batch=1)
    context = RequestContext(make_spec(timeout_s=60, num_completions=4))
    pool.fanout.start(context)
    pool.workers[0].wait(lambda worker: len(worker.calls) == 1)
    context.cancel()
    pool.workers[0].wait(lambda worker: worker.num_hangups == 1)
    pool.wait_until_idle()
    time.sleep(0.05)  # a branch that still waited, or a retry, would get the room now
    assert len(pool.workers[0].calls) == 1


def test_without_a_retry_budget_a_branch_fails_with_its_last_error(make_pool: MakePool) -> None:
    pool = make_pool(lambda _: [Break()], num_retries=1)
    failures = start(pool, RequestContext(make_spec(num_completions=3)))
    assert {failure.code for failure in failures if isinstance(failure, BranchFailure)} == {"broken"}
    assert len(pool.workers[0].calls) == 3 + 1
    assert total(pool.metrics, "tercet_branch_retries_total") == 1
    assert total(pool.metrics, "tercet_branch_retries_refused_total") == 3


def warm(pool: StubPool, *revisions: str) -> None:
    """Set the revision of the slots' weights, in slot order."""
    for index, revision in enumerate(revisions):
        pool.admission.update(index, State(state="warm", ms_per_token=1.0, revision=revision))


def test_a_branch_fails_rather_than_mix_weights(make_pool: MakePool) -> None:
    is_changed = threading.Event()

    def one_breaks(request: GenerateRequest) -> Iterator[Step]:
        if request.seed != 8:
            yield from by_seed(request)
        else:
            yield Accepted()
            assert is_changed.wait(5)
            yield Break()

    pool = make_pool(one_breaks, by_seed)
    warm(pool, "a", "b")
    context = RequestContext(make_spec(is_streamed=True))
    pool.fanout.start(context)
    collect(context, 2)
    warm(pool, "b", "b")
    is_changed.set()
    [failure] = collect(context, 1)
    assert isinstance(failure, BranchFailure)
    assert (failure.branch, failure.code) == (1, "not_ready")
    assert pool.workers[1].calls == []
