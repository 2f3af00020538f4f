"""A started request and its suggestions, over stub workers: deltas, replacements, retries, deadline, cancellation."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from gateway.generation.request import BranchFailure, BranchResult, RequestContext
from gateway.generation.selection import SelectionPolicy, SelectionResult, Suggestion
from gateway.generation.suggestions import MAX_TOP_UPS, Output, StartedRequest, TextDelta
from shared.protocol import Accepted, Failed, GenerateRequest, Group, Token
from tests.gateway.generation.stubs import (
    Break,
    Hang,
    MakePool,
    Respond,
    Step,
    StubPool,
    completion,
    make_spec,
    token_texts,
)

FIRST_SEED = 7  # of `make_spec`


def texts_by_branch(texts: Mapping[int, str], default: str = " the sea was calm.") -> Respond:
    def respond(request: GenerateRequest) -> Iterator[Step]:
        yield from completion(request, texts.get(request.seed - FIRST_SEED, default))

    return respond


def policy_of(context: RequestContext) -> SelectionPolicy:
    return SelectionPolicy(prompt="He saw", num_suggestions=context.spec.num_completions, length=20, similarity=80)


def outputs_of(pool: StubPool, **fields: Any) -> tuple[RequestContext, list[Output]]:
    """All outputs of a request."""
    context = RequestContext(make_spec(**fields))
    pool.fanout.start(context)
    return context, list(StartedRequest(context, pool.fanout, policy_of(context)).events())


def final(outputs: list[Output]) -> SelectionResult:
    assert isinstance(outputs[-1], SelectionResult)
    return outputs[-1]


def streamed_text(outputs: list[Output], branch: int) -> str:
    deltas = [output for output in outputs if isinstance(output, TextDelta) and output.branch == branch]
    return "".join(delta.text for delta in deltas)


THREE = {0: " the sea was calm.", 1: " a gull flying over", 2: " nothing but sand"}


def streamed_outputs(
    pool: StubPool, gates: Mapping[str, threading.Event], *, is_verbatim: bool = False
) -> list[Output]:
    """All outputs of a streamed request with one branch. An event is set once its text has been received.

    Stub workers wait for it, because lines that arrive together make a single delta, and tokens that arrive with the
    last line make none.
    """
    context = RequestContext(make_spec(is_streamed=True, num_completions=1))
    pool.fanout.start(context)
    outputs: list[Output] = []
    policy = replace(policy_of(context), is_verbatim=is_verbatim)
    for output in StartedRequest(context, pool.fanout, policy).events():
        outputs.append(output)
        if gate := gates.get(streamed_text(outputs, 0)):
            gate.set()
    return outputs


def breaks_after(text: str, is_received: threading.Event) -> Respond:
    def respond(request: GenerateRequest) -> Iterator[Step]:
        yield Accepted()
        for token_text in token_texts(text):
            yield Token(text=token_text, token_id=0, logprob=-1.0)
        assert is_received.wait(5)
        yield Failed(code="device_error", detail="d")

    return respond


def test_a_retry_does_not_repeat_streamed_text(make_pool: MakePool) -> None:
    is_received, is_past_first_attempt = threading.Event(), threading.Event()

    def respond(request: GenerateRequest) -> Iterator[Step]:
        *tokens, done = completion(request, " the sea was calm and blue")
        yield from tokens
        assert is_past_first_attempt.wait(5)
        yield done

    pool = make_pool(breaks_after(" the sea was", is_received), respond)
    gates = {" the sea": is_received, " the sea was calm": is_past_first_attempt}
    outputs = streamed_outputs(pool, gates)
    [suggestion] = final(outputs).suggestions
    assert suggestion.result.slot == 1
    assert streamed_text(outputs, 0) == suggestion.text == " the sea was calm and blue"


def test_a_retry_with_another_text_than_was_streamed_fails_its_branch(make_pool: MakePool) -> None:
    is_received = threading.Event()
    pool = make_pool(breaks_after(" the sky was", is_received), texts_by_branch({}))
    outputs = streamed_outputs(pool, {" the sky": is_received})
    assert streamed_text(outputs, 0) == " the sky"
    assert [failure.code for failure in final(outputs).failures] == ["diverged"]
    assert final(outputs).suggestions == []


def test_rejected_completions_are_replaced(make_pool: MakePool) -> None:
    pool = make_pool(texts_by_branch({3: THREE[1], 4: THREE[2]}))
    context, outputs = outputs_of(pool)
    result = final(outputs)
    assert sorted(suggestion.result.branch for suggestion in result.suggestions) == [0, 3, 4]
    assert (result.failures, result.is_partial, context.num_top_ups) == ([], False, 2)
    replacements = [call for call in pool.workers[0].calls if call.seed >= FIRST_SEED + 3]
    assert [call.group for call in replacements] == [Group(id="r1+3", size=2)] * 2


def test_replacements_are_bounded(make_pool: MakePool) -> None:
    pool = make_pool(texts_by_branch({}))
    context, outputs = outputs_of(pool)
    assert len(pool.workers[0].calls) == (1 + MAX_TOP_UPS) * 3
    assert context.num_top_ups == MAX_TOP_UPS * 3
    result = final(outputs)
    assert [suggestion.text for suggestion in result.suggestions] == [" the sea was calm."]
    assert [failure.code for failure in result.failures] == ["duplicate"] * 2


def test_branches_unfinished_at_the_deadline_fail_and_their_calls_end(make_pool: MakePool) -> None:
    def respond(request: GenerateRequest) -> Iterator[Step]:
        steps: list[Step] = [Accepted(), Hang()]
        yield from steps if request.seed == FIRST_SEED else completion(request, THREE[request.seed - FIRST_SEED])

    pool = make_pool(respond)
    _, outputs = outputs_of(pool, timeout_s=1.0)
    # Suggestions of later branches wait for the first until then.
    assert [output.result.branch for output in outputs if isinstance(output, Suggestion)] == [1, 2]
    result = final(outputs)
    assert [(failure.branch, failure.code) for failure in result.failures] == [(0, "deadline_exceeded")]
    assert result.is_partial
    pool.workers[0].wait(lambda worker: worker.num_hangups == 1, timeout_s=2)  # a call's own limit would be 3 s
    pool.wait_until_idle()


def test_a_completion_rejected_after_the_deadline_is_not_replaced(make_pool: MakePool) -> None:
    pool = make_pool(texts_by_branch({}))
    context = RequestContext(make_spec(num_completions=1))
    pool.fanout.start(context)
    repetition = context.next_event()
    assert isinstance(repetition, BranchResult)
    late = RequestContext(make_spec(timeout_s=-0.001, num_completions=1))
    late.deliver(BranchFailure(0, "broken", ""))
    late.deliver(replace(repetition, branch=1))
    policy = SelectionPolicy(prompt="The sea was calm.", num_suggestions=2, length=20, similarity=80)
    [result] = StartedRequest(late, pool.fanout, policy).events()
    assert isinstance(result, SelectionResult)
    assert [failure.code for failure in result.failures] == ["broken", "loop"]
    assert late.num_top_ups == 0
    assert len(pool.workers[0].calls) == 1


def test_an_empty_verbatim_completion_is_a_suggestion(make_pool: MakePool) -> None:
    pool = make_pool(lambda request: completion(request, ""))
    [suggestion] = final(streamed_outputs(pool, {}, is_verbatim=True)).suggestions
    assert (suggestion.text, suggestion.score) == ("", None)


@pytest.mark.parametrize("is_other_text", [False, True])
def test_a_retried_verbatim_stream_repeats_no_token(make_pool: MakePool, is_other_text: bool) -> None:
    attempts: list[GenerateRequest] = []
    is_received = threading.Event()

    def respond(request: GenerateRequest) -> Iterator[Step]:
        attempts.append(request)
        is_first = len(attempts) == 1
        lines = list(completion(request, " the sea and the sky"))
        if is_first:
            yield from lines[:3]  # accepted and two tokens
            assert is_received.wait(5)
            yield Break()
        elif is_other_text:
            yield from [lines[0], *lines[2:]]
        else:
            yield from lines

    outputs = streamed_outputs(make_pool(respond, respond), {" the sea": is_received}, is_verbatim=True)
    if is_other_text:
        assert [failure.code for failure in final(outputs).failures] == ["diverged"]
    else:
        deltas = [output for output in outputs if isinstance(output, TextDelta)]
        assert [token.token_id for delta in deltas for token in delta.tokens] == [0, 1, 2, 3, 4]
        assert streamed_text(outputs, 0) == final(outputs).suggestions[0].text


@pytest.mark.parametrize(("prompt_score", "is_known"), [(-1.0, True), (-4.0, False)])
def test_no_text_is_streamed_before_it_is_known_whether_the_model_knows_the_prompt(
    make_pool: MakePool, prompt_score: float, is_known: bool
) -> None:
    """Branch 1 sends all of its text before branch 0 sends its first token, which has the score."""
    is_second_done = threading.Event()

    def respond(request: GenerateRequest) -> Iterator[Step]:
        if request.seed != FIRST_SEED:
            yield from completion(request, " a gull flying over")
            is_second_done.set()
            return
        assert request.score_last
        assert is_second_done.wait(5)
        first, *rest = completion(request, " the sea was calm.")
        assert isinstance(first, Accepted)
        token, *rest = rest
        yield first
        yield msgspec.structs.replace(token, prompt_score=prompt_score)
        yield from rest

    pool = make_pool(respond, respond)
    context = RequestContext(make_spec(is_streamed=True, num_completions=2, num_scored_tokens=32))
    pool.fanout.start(context)
    outputs = list(StartedRequest(context, pool.fanout, replace(policy_of(context), min_familiarity=-2.5)).events())
    suggestions = final(outputs).suggestions
    assert len(suggestions) == (2 if is_known else 0)
    for branch in (0, 1):
        text = {suggestion.result.branch: suggestion.text for suggestion in suggestions}.get(branch, "")
        assert streamed_text(outputs, branch) == text
    assert context.num_top_ups == 0


def test_a_worker_of_an_earlier_version_is_not_asked_for_a_score(make_pool: MakePool) -> None:
    """It would refuse the request. The suggestions are shown: nothing says that the model does not know the text."""
    asked: list[tuple[int, bool]] = []

    def respond(request: GenerateRequest) -> Iterator[Step]:
        asked.append((request.score_last, request.score_prior))
        yield from completion(request, " the sea was calm.")

    pool = make_pool(respond)
    pool.admission.update(0, msgspec.structs.replace(pool.admission.states()[0], protocol=1))
    context = RequestContext(make_spec(num_completions=1, num_scored_tokens=32, scores_prior=True))
    pool.fanout.start(context)
    outputs = list(StartedRequest(context, pool.fanout, replace(policy_of(context), min_familiarity=-2.5)).events())
    assert asked == [(0, False)]
    assert len(final(outputs).suggestions) == 1
