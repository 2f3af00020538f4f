"""Log-probabilities of prompts, from the engine's own prefill, are those of a forward pass by transformers."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.engine.helpers import (
    CHECKPOINT,
    PROSE,
    generate,
    random_ids,
    running_engine,
)
from workers.engine.engine import Engine
from workers.engine.loader import LoadedModel, load_model
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput

LENGTHS = (1, 2, 17, 300, 1000)
NUM_TOPS = 5
PARAMS = SamplingParams(1, temperature=0, top_logprobs=NUM_TOPS)


@pytest.fixture(scope="module")
def prompts() -> dict[int, list[int]]:
    """Token ids at random, by their number."""
    rng = random.Random(4)
    return {length: random_ids(rng, length, 8192) for length in LENGTHS}


@torch.inference_mode()
def log_probabilities(reference: Any, ids: list[int]) -> torch.Tensor:
    """After each token, [tokens, vocab]."""
    logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: dict[int, list[int]]) -> dict[int, torch.Tensor]:
    return {length: log_probabilities(reference, ids) for length, ids in prompts.items()}


@pytest.fixture(scope="module", params=["cpu", "cpu:0"], ids=["CpuRunner", "CudaRunner"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine on each path; "cpu:0" selects that of the GPU."""
    with running_engine(load_model(CHECKPOINT, device=request.param, dtype="fp32")) as engine:
        yield engine


def of_prompt(expected: torch.Tensor, prompt: list[int]) -> torch.Tensor:
    """The log-probability of each token of `prompt` but the first."""
    return expected[:-1].gather(1, torch.tensor(prompt[1:], dtype=torch.long)[:, None])[:, 0]


def assert_is(output: SequenceOutput, prompt: list[int], expected: torch.Tensor, num_tops: int = NUM_TOPS) -> None:
    """Within 1e-3 the log-probabilities of `prompt`, and the likeliest tokens at its positions and at the next."""
    assert len(output.prompt_logprobs) == len(output.prompt_tops) == len(prompt)
    assert output.prompt_logprobs[0] is None
    assert output.prompt_tops[0] is None
    assert list(output.prompt_logprobs[1:]) == pytest.approx(of_prompt(expected, prompt).tolist(), abs=1e-3)
    best = expected.topk(NUM_TOPS).values
    tops = [*output.prompt_tops[1:], *output.tops]
    assert len(tops) == len(prompt) - (num_tops == 0)
    for position, top in enumerate(tops):
        assert top is not None
        assert len({token for token, _ in top}) == len(top) == num_tops
        # Compared by their log-probabilities: two tokens may be equally likely, up to rounding.
        assert [logprob for _, logprob in top] == pytest.approx(best[position, :num_tops].tolist(), abs=1e-3)
        assert [float(expected[position, token]) for token, _ in top] == pytest.approx(
            best[position, :num_tops].tolist(), abs=1e-3
        )


@pytest.mark.parametrize("length", LENGTHS)
def test_they_are_transformers_whether_the_prompt_is_cached_or_not(
    engine: Engine, prompts: dict[int, list[int]], expected: dict[int, torch.Tensor], length: int
) -> None:
    prompt = prompts[length]
    for _ in range(2):
        assert_is(generate(engine, prompt, PARAMS, echo_logprobs=True), prompt, expected[length])
    cached = generate(engine, prompt, SamplingParams(1, temperature=0))
    assert cached.cached_tokens >= length - 1
    assert (cached.prompt_logprobs, cached.prompt_tops) == ((), ())
    assert_is(generate(engine, prompt, PARAMS, echo_logprobs=True), prompt, expected[length])


def test_they_are_transformers_beside_other_sequences(
    engine: Engine, prompts: dict[int, list[int]], expected: dict[int, torch.Tensor]
) -> None:
    """Decoding sequences, siblings without echo, and all lengths at once, some without likeliest tokens."""
    rng = random.Random(2)
    others = [
        engine.submit(EngineRequest(tuple(prompts[length][:300]), SamplingParams(60), seed))
        for seed, length in enumerate((17, 300, 1000))
    ]
    lengths = [*LENGTHS, *LENGTHS]
    rng.shuffle(lengths)
    streams = []
    for seed, length in enumerate(lengths):
        params = SamplingParams(1, temperature=0, top_logprobs=NUM_TOPS * (seed % 2))
        streams.append(engine.submit(EngineRequest(tuple(prompts[length]), params, seed, echo_logprobs=True)))
        others.append(engine.submit(EngineRequest(tuple(prompts[length]), SamplingParams(5), seed)))
    for seed, (length, stream) in enumerate(zip(lengths, streams, strict=True)):
        assert_is(stream.result(), prompts[length], expected[length], NUM_TOPS * (seed % 2))
    assert all(stream.result().finish_reason in ("length", "eos") for stream in others)


def test_in_prose_they_are_as_exact_as_those_of_transformers(
    engine: Engine, embedded: LoadedModel, reference: Any
) -> None:
    """This checkpoint amplifies rounding in repeated prose, so that transformers' own float32 can be off by 1e-3."""
    assert embedded.tokenizer is not None
    prompt = embedded.tokenizer.encode(PROSE * 40)[:1000]
    output = generate(engine, prompt, PARAMS, echo_logprobs=True)
    exact = of_prompt(log_probabilities(copy.deepcopy(reference).double(), prompt), prompt)
    their_error = (of_prompt(log_probabilities(reference, prompt), prompt) - exact).abs()
    our_error = (torch.tensor(output.prompt_logprobs[1:], dtype=torch.float64) - exact).abs()
    assert our_error.median() < 1e-4
    assert our_error.max() < 3 * their_error.max()


def test_forced_ids_are_not_part_of_the_prompt(
    engine: Engine, embedded: LoadedModel, prompts: dict[int, list[int]], expected: dict[int, torch.Tensor]
) -> None:
    assert embedded.tokenizer is not None
    typed = " because"
    forced_ids = tuple(embedded.tokenizer.encode(typed))
    output = generate(
        engine,
        prompts[17],
        SamplingParams(1, temperature=0),
        echo_logprobs=True,
        forced_prefix=typed.encode(),
        forced_ids=forced_ids,
    )
    assert_is(replace(output, tops=()), prompts[17], expected[17], 0)


@pytest.mark.parametrize("length", [17, 300, 1000])
@pytest.mark.parametrize("num_scored", [1, 9])
def test_those_of_the_end_of_a_prompt_use_what_is_cached_of_its_beginning(
    engine: Engine, prompts: dict[int, list[int]], expected: dict[int, torch.Tensor], length: int, num_scored: int
) -> None:
    prompt = prompts[length]
    fields = {"echo_logprobs": True, "echo_from": length - num_scored}
    generate(engine, prompt[:-num_scored], SamplingParams(3, temperature=0), cache_scope=(length, num_scored))
    cached = generate(engine, prompt, PARAMS, cache_scope=(length, num_scored), **fields)
    assert cached.cached_tokens == length - num_scored - 1
    alone = generate(engine, prompt, PARAMS, cache_scope="nothing cached", **fields)
    wanted = of_prompt(expected[length], prompt)[-num_scored:].tolist()
    for output in (cached, alone):
        assert list(output.prompt_logprobs) == pytest.approx(wanted, abs=1e-3)
        assert len(output.prompt_tops) == num_scored


@pytest.mark.parametrize("num_tops", [0, NUM_TOPS])
def test_a_prompt_that_fills_the_context_is_scored_and_nothing_is_generated(
    engine: Engine, reference: Any, num_tops: int
) -> None:
    """Beside others, whether it is cached or not, with what follows the draw of a token."""
    prompt = random_ids(random.Random(9), 1024, 8192)
    expected = log_probabilities(reference, prompt)
    params = SamplingParams(0, temperature=0, top_logprobs=num_tops)
    other = engine.submit(EngineRequest(tuple(prompt[:300]), SamplingParams(60), 1))
    for fields in ({"echo_logprobs": True}, {}, {}, {"echo_logprobs": True}):
        output = generate(engine, prompt, params, **fields)
        assert (output.token_ids, output.num_kept, output.finish_reason) == ((), 0, "length")
        if fields:
            assert list(output.prompt_logprobs[1:]) == pytest.approx(of_prompt(expected, prompt).tolist(), abs=1e-3)
            assert {len(top or ()) for top in output.prompt_tops[1:]} == {num_tops}
    end = generate(engine, prompt, params, echo_logprobs=True, echo_from=1020)
    assert list(end.prompt_logprobs) == pytest.approx(of_prompt(expected, prompt)[-4:].tolist(), abs=1e-3)
    assert other.result().finish_reason in ("length", "eos")
