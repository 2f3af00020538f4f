"""Same seed, same text, same log-probabilities: alone or in a crowd, in one piece or in chunks."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest
import torch

from tests.workers.engine.helpers import generate, random_ids, running_engine
from workers.engine import scheduler
from workers.engine.cpu import runner as model_runner
from workers.engine.cpu.forward import ForwardPass
from workers.engine.cpu.kernels import HAS_DOT_PRODUCTS
from workers.engine.cpu.linear import ROW_COUNTS, LinearMaker
from workers.engine.model.loader import LoadedModel
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams, SequenceOutput
from workers.engine.sampling import Draw
from workers.engine.scheduler_output import BatchRow

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
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
    )
    length = rng.choice([1, 2, 5, 16, 33, 64, 90, n_ctx - number])
    return EngineRequest(tuple(random_ids(rng, length, vocab_size)), params, rng.randrange(2**63))


def in_a_crowd(model: LoadedModel, requests: list[EngineRequest], rng: random.Random) -> list[Outcome | None]:
    """What requests give that eight clients make at random."""
    with running_engine(model, max_batch=64) as engine:
        crowd: list[Outcome | None] = [None] * len(requests)
        pause = threading.Event()

        def client(numbers: list[int], pauses: list[float]) -> None:
            for number, pause_s in zip(numbers, pauses, strict=True):
                pause.wait(pause_s)
                crowd[number] = outcome(engine.submit(requests[number]).result())

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
    return crowd


@pytest.mark.parametrize("seed", range(6))
def test_a_crowd_changes_nothing(tiny: LoadedModel, seed: int) -> None:
    """Sequences that come and go at random beside it leave a sequence's every bit as it was."""
    rng = random.Random(seed)
    config = tiny.config
    requests = [random_request(rng, config.vocab_size, config.n_positions) for _ in range(24)]
    with running_engine(tiny, max_batch=6) as engine:
        alone = [outcome(engine.submit(request).result()) for request in requests]
    assert in_a_crowd(tiny, requests, rng) == alone


@pytest.mark.skipif(not HAS_DOT_PRODUCTS, reason="this CPU has no AVX-512 VNNI, so every step is computed by itself")
@pytest.mark.parametrize("seed", range(3))
def test_steps_computed_ahead_change_nothing(
    embedded_int8: LoadedModel, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    requests = [random_request(rng, embedded_int8.config.vocab_size, 120) for _ in range(24)]
    usual = [replace(request.sampling, top_k=rng.choice([5, 50]), repetition_penalty=1) for request in requests]
    requests[2:] = [replace(request, sampling=one) for request, one in zip(requests, usual, strict=True)][2:]
    stops = [replace(request.sampling, stop=(" the", ".")) for request in requests]
    requests += [replace(request, sampling=stop) for request, stop in zip(requests[:8], stops, strict=False)]
    monkeypatch.setattr(model_runner, "MAX_STEPS_PER_CALL", 1)
    with running_engine(embedded_int8, max_batch=6) as engine:
        alone = [outcome(engine.submit(request).result()) for request in requests]
    numbers = set()

    def steps(self: ForwardPass, rows: list[BatchRow], draws: list[Draw], number: int) -> list[list[GeneratedToken]]:
        numbers.add(number)
        return one_after_another(self, rows, draws, number)

    one_after_another = ForwardPass.decode
    monkeypatch.setattr(ForwardPass, "decode", steps)
    monkeypatch.setattr(model_runner, "MAX_STEPS_PER_CALL", 8)
    monkeypatch.setattr(model_runner, "MAX_CALL_S", 1.0)
    with running_engine(embedded_int8, max_batch=6) as engine:
        assert [outcome(engine.submit(request).result()) for request in requests] == alone
    assert 8 in numbers
    assert in_a_crowd(embedded_int8, requests, rng) == alone


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_chunks_change_nothing(tiny: LoadedModel, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(chunk)
    prompts = [random_ids(rng, length, tiny.config.vocab_size) for length in (1, 8, 50, 100)]
    params = SamplingParams(max_new_tokens=12, top_k=20)
    with running_engine(tiny) as engine:
        whole = [outcome(generate(engine, prompt, params, 7)) for prompt in prompts]
    monkeypatch.setattr(scheduler, "MAX_CHUNK", chunk)
    with running_engine(tiny) as engine:
        assert [outcome(generate(engine, prompt, params, 7)) for prompt in prompts] == whole


def test_prompt_and_text_are_computed_alike(embedded: LoadedModel) -> None:
    """A token's bits do not tell whether it was typed or generated: the cache may hold either."""
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
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
