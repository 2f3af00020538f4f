"""Same seed, same text, same log-probabilities: alone or in a batch, prefilled in one chunk or in many."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

from tests.workers.engine.helpers import CPU_DTYPES, add, generate, make_core, random_ids, run_to_end, running_engine
from workers.engine.batch import RunnerOutput, SchedulerOutput
from workers.engine.cpu.linear import ROW_COUNTS, LinearMaker
from workers.engine.cpu.runner import CpuRunner
from workers.engine.cpu.team import Interrupt
from workers.engine.loader import LoadedModel
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput

PLAIN: dict[str, Any] = {
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "logit_bias": (),
}
Outcome = tuple[tuple[int, ...], tuple[float, ...]]


def outcome(finished: SequenceOutput) -> Outcome:
    return finished.token_ids, finished.logprobs


def random_request(rng: random.Random, vocab_size: int, n_ctx: int) -> EngineRequest:
    number = rng.randint(1, 24)
    params = SamplingParams(
        max_new_tokens=number,
        temperature=rng.choice([0, 0.7, 1.0, 1.3]),
        top_k=rng.choice([0, 5, 50, 200]),
        top_p=rng.choice([0, 0.5, 0.95, 1]),
        typical_p=rng.choice([1.0, 1.0, 0.4]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.8]),
        presence_penalty=rng.choice([0.0, 0.0, 0.8]),
        logit_bias=rng.choice([(), (), ((5, 3.0), (9, -100.0))]),
    )
    length = rng.choice([1, 2, 5, 16, 33, 64, 90, n_ctx - number])
    return EngineRequest(tuple(random_ids(rng, length, vocab_size)), params, rng.randrange(2**63))


def concurrently(model: LoadedModel, requests: list[EngineRequest], rng: random.Random) -> list[Outcome | None]:
    """The outcomes of requests that eight clients make at random times."""
    with running_engine(model, max_batch=64) as engine:
        outcomes: list[Outcome | None] = [None] * len(requests)
        pause = threading.Event()

        def client(numbers: list[int], pauses: list[float]) -> None:
            for number, pause_s in zip(numbers, pauses, strict=True):
                pause.wait(pause_s)
                outcomes[number] = outcome(engine.submit(requests[number]).result())

        numbers = rng.sample(range(len(requests)), len(requests))
        clients = []
        for first in range(8):
            mine = numbers[first::8]
            pauses = [rng.choice([0, 0, 0.002, 0.01]) for _ in mine]
            clients.append(threading.Thread(target=client, args=(mine, pauses)))
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
    return outcomes


@pytest.mark.parametrize("seed", range(3))
def test_other_sequences_change_nothing(tiny: LoadedModel, seed: int) -> None:
    """Not a bit of a sequence depends on the sequences that are computed at the same time."""
    rng = random.Random(seed)
    config = tiny.config
    requests = [random_request(rng, config.vocab_size, config.n_positions) for _ in range(24)]
    with running_engine(tiny, max_batch=6) as engine:
        alone = [outcome(engine.submit(request).result()) for request in requests]
    assert concurrently(tiny, requests, rng) == alone


@pytest.mark.parametrize("seed", range(2))
def test_multi_step_decode_changes_nothing(
    embedded_int8: LoadedModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng, embedded_int8.config.vocab_size, 120) for _ in range(24)]
    usual = [structs.replace(request.sampling, top_k=rng.choice([5, 50]), **PLAIN) for request in requests]
    requests[2:] = [replace(request, sampling=one) for request, one in zip(requests, usual, strict=True)][2:]
    stops = [structs.replace(request.sampling, stop=(" the", ".")) for request in requests]
    requests += [replace(request, sampling=stop) for request, stop in zip(requests[:8], stops, strict=False)]
    with running_engine(embedded_int8, max_batch=6, step_delay_s=1e-9) as engine:  # single decode steps
        alone = [outcome(engine.submit(request).result()) for request in requests]
    run = CpuRunner.run
    numbers = set()

    def counting(self: CpuRunner, scheduled: SchedulerOutput) -> RunnerOutput:
        output = run(self, scheduled)
        numbers.add(output.num_steps)
        return output

    monkeypatch.setattr(CpuRunner, "run", counting)
    with running_engine(embedded_int8, max_batch=6) as engine:
        assert [outcome(engine.submit(request).result()) for request in requests] == alone
    assert max(numbers) > 1
    assert concurrently(embedded_int8, requests, rng) == alone


def in_chunks(runner: CpuRunner, request: EngineRequest, max_chunk: int) -> Outcome:
    """What a request gives if its prompt is prefilled in chunks."""
    core = make_core(runner, max_chunk=max_chunk)
    stream = add(core, request)
    run_to_end(core)
    return outcome(stream.result())


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_chunked_prefill_changes_nothing(tiny: LoadedModel, chunk: int) -> None:
    rng = random.Random(chunk)
    prompts = [random_ids(rng, length, tiny.config.vocab_size) for length in (1, 8, 50, 100)]
    params = SamplingParams(max_new_tokens=12, top_k=20)
    with running_engine(tiny) as engine:
        whole = [outcome(generate(engine, prompt, params, 7)) for prompt in prompts]
    runner = CpuRunner(tiny, 4, Interrupt())
    assert [in_chunks(runner, EngineRequest(tuple(prompt), params, 7), chunk) for prompt in prompts] == whole


def test_prefill_and_decode_give_the_same_bits(embedded: LoadedModel) -> None:
    """Keys and values of a token are the same whether it was prefilled or decoded: the cache holds both."""
    assert embedded.tokenizer is not None
    prompt = embedded.tokenizer.encode("I have often thought that the sea, in winter, is")
    params = SamplingParams(max_new_tokens=40)
    with running_engine(embedded) as engine:
        text = generate(engine, prompt, params, 3)
        for number in (1, 13, 39):
            typed = [*prompt, *text.token_ids[:number]]
            rest = SamplingParams(40 - number, temperature=0)
            echoed = generate(engine, typed, rest, echo_logprobs=True)
            assert echoed.prompt_logprobs[len(prompt) :] == text.logprobs[:number]


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("shape", [(64, 192), (256, 64), (768, 2304), (3072, 768)])
def test_a_row_of_a_linear_layer_has_one_value(shape: tuple[int, int], dtype: str) -> None:
    """Whatever rows are computed with it, and wherever it stands among them."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape[1], shape[0], generator=generator)
    linear = LinearMaker(dtype)(weight, torch.randn(shape[1], generator=generator))
    x = torch.randn(300, shape[0], generator=generator)
    reference = linear(x)
    for start in (0, 5):
        for rows in (*range(1, 40), *ROW_COUNTS, 65, 200, 257):
            assert torch.equal(linear(x[start : start + rows]), reference[start : start + rows])
