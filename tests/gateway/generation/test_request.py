"""Specs of branches; a request's event queue and its cancellation."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gateway.generation.request import BranchEvent, BranchFailure, RequestContext, TokenDelta
from shared.errors import ClientGone, Superseded
from shared.protocol import MAX_SEED, Sampling, Token
from shared.time_margins import MARGINS
from tests.gateway.generation.stubs import make_spec

TOKENS = TokenDelta(0, (Token(text=" a", token_id=0, logprob=-1.0),))


def test_each_branch_has_the_next_seed_and_the_last_seed_wraps() -> None:
    spec = make_spec(seed=MAX_SEED - 1)
    assert [spec.branch(index).seed for index in range(4)] == [MAX_SEED - 1, MAX_SEED, 0, 1]
    assert [spec.branch(index).index for index in range(4)] == [0, 1, 2, 3]


def test_a_claim_says_whose_request_it_is() -> None:
    spec = make_spec(owner="o", session="s")
    claim = RequestContext(spec).claim
    assert (claim.model, claim.deadline, claim.owner) == ("small", spec.deadline, "o")
    assert (claim.has_session, RequestContext(make_spec()).claim.has_session) == (True, False)


def test_branches_of_several_prompts_are_numbered_prompt_by_prompt_and_draw_like_those_of_one() -> None:
    spec = make_spec(prompts=("He saw", [5, 6]), num_completions=2, seed=7)
    branches = [spec.branch(index) for index in range(spec.num_branches)]
    assert [(branch.index, branch.prompt, branch.seed) for branch in branches] == [
        (0, "He saw", 7),
        (1, "He saw", 8),
        (2, [5, 6], 7),
        (3, [5, 6], 8),
    ]
    assert [branch.group.size for branch in branches] == [2] * 4
    assert len({branch.group.id for branch in branches}) == 2


def test_greedy_branches_start_with_tokens_of_different_rank_on_request() -> None:
    greedy = Sampling(temperature=0, top_k=7)
    ranked, alike = (make_spec(sampling=greedy, ranks_first_token=ranks) for ranks in (True, False))
    assert [ranked.branch(index).sampling.first_rank for index in range(5)] == [0, 1, 2, 3, 4]
    assert ranked.branch(4).sampling.top_k == 7
    assert [alike.branch(index).sampling for index in range(3)] == [greedy] * 3
    assert make_spec(sampling=Sampling(temperature=1)).branch(2).sampling.first_rank == 0


def test_events_come_in_the_order_of_delivery_until_the_deadline_and_its_grace() -> None:
    context = RequestContext(make_spec(timeout_s=0.5, is_streamed=True))
    events: list[BranchEvent] = [TOKENS, TokenDelta(1, TOKENS.tokens), BranchFailure(0, "broken", "")]
    for event in events:
        context.deliver(event)
    assert [context.next_event() for _ in events] == events
    assert not context.is_over
    assert context.next_event() is None
    assert time.monotonic() >= context.spec.deadline + MARGINS.collect_s
    assert context.is_over


def test_events_of_a_whole_response_wait_for_the_last_outcome() -> None:
    context = RequestContext(make_spec(timeout_s=60, num_completions=2))
    failures = [BranchFailure(index, "broken", "") for index in range(4)]
    received: list[BranchEvent | None] = []
    waiting = threading.Thread(target=lambda: received.append(context.next_event()))
    waiting.start()
    context.deliver(failures[0])
    waiting.join(0.05)
    assert waiting.is_alive()
    context.deliver(failures[1])
    waiting.join(5)
    assert [*received, context.next_event()] == failures[:2]
    context.expect_outcomes(2)
    context.deliver(failures[2])
    context.deliver(failures[3])
    assert [context.next_event(), context.next_event()] == failures[2:]


def test_outcomes_before_the_deadline_are_returned_after_it() -> None:
    context = RequestContext(make_spec(timeout_s=0.05))
    failure = BranchFailure(0, "broken", "")
    context.deliver(failure)
    assert context.next_event() is failure
    assert context.is_over
    assert context.next_event() is None


def test_an_event_that_arrives_within_the_grace_is_returned() -> None:
    context = RequestContext(make_spec(timeout_s=-MARGINS.collect_s / 2))
    context.deliver(TOKENS)
    assert context.next_event() is not None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_queue_that_is_never_empty_ends_with_the_deadline(is_streamed: bool) -> None:
    context = RequestContext(make_spec(timeout_s=0.2, is_streamed=is_streamed))
    context.deliver(TOKENS)
    while context.next_event() is not None:
        context.deliver(TOKENS)
    assert time.monotonic() >= context.spec.deadline + MARGINS.collect_s
    context.deliver(TOKENS)
    assert context.next_event() is None


def test_cancellation_wakes_every_waiting_thread() -> None:
    context = RequestContext(make_spec(timeout_s=60))
    with ThreadPoolExecutor() as threads:
        reading, pausing = threads.submit(context.next_event), threads.submit(context.pause, 60)
        context.cancel()
        reading.result(5)
        pausing.result(5)


def test_a_cancelled_request_returns_no_events() -> None:
    context = RequestContext(make_spec())
    context.deliver(TOKENS)
    context.cancel()
    assert context.next_event() is None
    assert context.is_over


@pytest.mark.parametrize("first", [Superseded("first"), None])
def test_the_first_reason_is_kept(first: Superseded | None) -> None:
    context = RequestContext(make_spec())
    context.cancel(first)
    context.cancel(ClientGone("second"))
    assert context.cancel_reason is first


def test_callbacks_run_on_cancellation_while_their_block_runs() -> None:
    context = RequestContext(make_spec())
    calls: list[str] = []
    with context.on_cancel(lambda: calls.append("ended")):
        pass
    with context.on_cancel(lambda: calls.append("running")):
        context.cancel()
        assert calls == ["running"]
    with context.on_cancel(lambda: calls.append("late")):
        assert calls == ["running", "late"]
