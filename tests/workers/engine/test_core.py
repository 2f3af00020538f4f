"""One step at a time, in the test's own thread: what a step delivers, and how sequences end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.workers.engine.helpers import (
    CHECKPOINT,
    add,
    make_core,
    run_to_end,
)
from workers.engine.batch import RunnerOutput, SchedulerOutput
from workers.engine.failures import InvalidOutput, OutOfMemory, SequenceFailure
from workers.engine.request import EngineRequest, GeneratedToken, PromptLogprobs, SamplingParams, SequenceOutput
from workers.engine.sequence import Sequence
from workers.text.token_healing import TokenHealing
from workers.text.tokenizer import Tokenizer

TokenFn = Callable[[Sequence, int], int]


class FakeRunner:
    """Stands for a device: computes nothing, so that a test sees scheduling and postprocessing alone."""

    num_entries = 2
    num_drops = 0

    def __init__(self, token: TokenFn = lambda _, position: 100 + position, num_steps: int = 1) -> None:
        """
        Args:
            token: the token that a sequence generates at a position.
            num_steps: decode steps computed per call, where a step has rows only.
        """
        self.steps: list[SchedulerOutput] = []
        self._token = token
        self._num_steps = num_steps

    def run(self, scheduled: SchedulerOutput) -> RunnerOutput:
        self.steps.append(scheduled)
        num_steps = 1 if scheduled.chunks or scheduled.prefilled_rows else self._num_steps
        steps = [
            (one, GeneratedToken(self._token(one, len(one.token_ids) + ahead), -1.0))
            for ahead in range(num_steps)
            for one in scheduled.sampled_sequences
        ]
        echoes = [
            (member, PromptLogprobs([-2.0] * len(chunk.following_ids), [((1, -2.0),)] * len(chunk.following_ids)))
            for chunk in scheduled.chunks
            if chunk.group.is_echoed
            for member in chunk.group.sequences
        ]
        return RunnerOutput(steps, echoes, num_steps)

    def drop_caches(self) -> None:
        self.num_drops += 1


def request(max_new_tokens: int = 4, prompt: tuple[int, ...] = (1, 2, 3), **more: object) -> EngineRequest:
    return EngineRequest(prompt, SamplingParams(max_new_tokens), 0, **more)  # type: ignore[arg-type]


def test_a_step_prefills_and_delivers_the_first_token_then_one_token_each() -> None:
    runner, finished = FakeRunner(), list[Sequence]()
    core = make_core(runner, on_finish=finished.append)
    stream = add(core, request(3, stream=True))
    for number in range(3):
        assert finished == []
        timing = core.step()
        assert timing is not None
        assert timing.num_steps == 1
        assert stream.next(0) == GeneratedToken(100 + number, -1.0)
    assert [len(scheduled.chunks) for scheduled in runner.steps] == [1, 0, 0]
    assert [len(scheduled.rows) for scheduled in runner.steps] == [0, 1, 1]
    result = stream.result()
    assert (result.token_ids, result.finish_reason, len(finished)) == ((100, 101, 102), "length", 1)
    assert min(result.prefill_ms, result.decode_ms) > 0
    assert core.scheduler.sequences == []
    assert core.step() is None


def test_only_streamed_sequences_deliver_single_tokens() -> None:
    core = make_core(FakeRunner())
    stream = add(core, request(3))
    core.step()
    assert stream.next(0) is None
    run_to_end(core)
    assert isinstance(stream.next(0), SequenceOutput)


def test_tokens_of_a_multi_step_decode_that_follow_the_end_are_dropped() -> None:
    runner = FakeRunner(num_steps=4)
    core = make_core(runner, eos_ids=(102,))
    ended, longer = add(core, request(20)), add(core, request(4))
    core.step()
    timing = core.step()
    assert timing is not None
    assert timing.num_steps == 4
    assert timing.s_per_step == pytest.approx(timing.duration_s / 4)
    assert (ended.result().token_ids, ended.result().finish_reason) == ((100, 101, 102), "eos")
    assert ended.result().num_kept == 2
    assert longer.result().finish_reason == "eos"
    assert core.step() is None


def test_a_fault_of_one_sequence_ends_that_sequence_only() -> None:
    """The tokenizer raises for an id that it does not have."""
    healing = TokenHealing(Tokenizer.from_directory(CHECKPOINT, 8192))
    core = make_core(FakeRunner(lambda one, _: 10**6 if one.request.seed == 13 else 40))
    params = SamplingParams(5, stop=("☃",))
    good, bad = (add(core, EngineRequest((1, 2), params, seed), healing) for seed in (12, 13))
    run_to_end(core)
    assert good.result().finish_reason == "length"
    assert bad.result().finish_reason == "error"
    assert isinstance(bad.result().failure, SequenceFailure)
    assert len(bad.result().token_ids) == 1
    after = add(core, request(2))
    run_to_end(core)
    assert after.result().finish_reason == "length"


def test_after_a_failed_step_the_scheduled_sequences_end_and_the_waiting_continue_without_a_cache() -> None:
    runner = FakeRunner(lambda one, position: 1 // (1 - one.request.seed) + position)
    core = make_core(runner)
    params = SamplingParams(3)
    cached = add(core, EngineRequest((1, 2, 3), params, 0))
    run_to_end(core)
    prompts = [((4, 5), 1), ((6, 7), 0), ((8, 9), 0)]  # two entries: the third waits
    streams = [add(core, EngineRequest(prompt, params, seed)) for prompt, seed in prompts]
    with pytest.raises(ZeroDivisionError):
        core.step()
    failure = OutOfMemory()
    core.recover(failure)
    assert [stream.result().failure for stream in streams[:2]] == [failure] * 2
    run_to_end(core)
    assert streams[2].result().finish_reason == "length"
    assert runner.num_drops == 1
    again = add(core, EngineRequest((1, 2, 3), params, 0))
    run_to_end(core)
    assert (again.result().token_ids, again.result().cached_tokens) == (cached.result().token_ids, 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("is_of_prompt", [True, False])
def test_a_log_probability_that_is_no_number_fails_the_step(is_of_prompt: bool, number: float) -> None:
    class InvalidRunner(FakeRunner):
        def run(self, scheduled: SchedulerOutput) -> RunnerOutput:
            output = super().run(scheduled)
            if is_of_prompt:
                return replace(
                    output, prompt_logprobs=[(one, PromptLogprobs([number], [()])) for one, _ in output.tokens]
                )
            return replace(output, tokens=[(one, GeneratedToken(5, number)) for one, _ in output.tokens])

    core = make_core(InvalidRunner())
    stream = add(core, request(stream=True, echo_logprobs=True))
    with pytest.raises(InvalidOutput):
        core.step()
    assert stream.next(0) is None


def test_finish_all_ends_running_and_waiting_sequences() -> None:
    finished: list[Sequence] = []
    core = make_core(FakeRunner(), on_finish=finished.append)
    running = add(core, request(50))
    core.step()
    waiting = add(core, request(50, prompt=(9, 9)))
    core.finish_all("cancelled")
    assert [stream.result().finish_reason for stream in (running, waiting)] == ["cancelled"] * 2
    assert len(finished) == 2
    assert core.scheduler.sequences == []
