"""The GPU path, computed on the CPU: the same text as the CPU path.

The device "cpu:0" selects plain torch kernels and `CudaRunner`, which captures no graphs there. Tests that need a GPU
are at the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from shared.memory_plan import SUFFIX_TOKENS
from tests.workers.engine.helpers import (
    CHECKPOINT,
    PROSE,
    TINY,
    TINY_LLAMA,
    generate,
    load_peaked,
    peaked_weights,
    random_ids,
    results,
    running_engine,
)
from tests.workers.engine.test_prefix_cache import overlapping_edits
from workers.engine.arithmetic_code import MIN_WIDTH, Code, first_code, uniform
from workers.engine.batch import RunnerOutput, SchedulerOutput
from workers.engine.cuda import kv_cache as cuda_cache
from workers.engine.cuda import runner as cuda_runner
from workers.engine.cuda.forward import PLAIN_KERNELS
from workers.engine.cuda.graphs import SEGMENT_TOKENS, Batch, PrefillProgram, Program, Segment
from workers.engine.cuda.kv_cache import KVCache, SlotLayout
from workers.engine.cuda.runner import CudaRunner
from workers.engine.cuda.step_kernels import AT, ID, POINT, POSITION, START, WIDTH, draw
from workers.engine.draw import Draw
from workers.engine.loader import LoadedModel, build, load_model
from workers.engine.model.config import ModelConfig
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput
from workers.engine.sampling import sample

DEVICE = "cpu:0"
CPU = torch.device(DEVICE)


@pytest.fixture(scope="module")
def device_tiny() -> LoadedModel:
    return load_peaked(DEVICE)


@pytest.fixture(scope="module", params=[TINY, TINY_LLAMA], ids=["gpt2", "llama"])
def device_model(request: pytest.FixtureRequest) -> LoadedModel:
    return load_peaked(DEVICE, request.param)


def make_batch(loaded: LoadedModel, size: int, seed: int = 0) -> tuple[Batch, KVCache]:
    """A batch, and a cache of 3 entries and 8 suffixes, full of random numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_cache, "device_budget_bytes", lambda _: budget_for(3, 8, loaded.config))
        cache = KVCache(loaded.config, 8, torch.float32, CPU)
    cache.layers.normal_(generator=torch.Generator().manual_seed(seed))
    return Batch(loaded.model, cache, size, PLAIN_KERNELS), cache


def budget_for(num_entries: int, max_sequences: int, config: ModelConfig = TINY) -> int:
    """Bytes that hold `num_entries` entries and `max_sequences` suffixes, and no other entry."""
    slot_bytes = config.n_layer * 2 * config.kv_width * 4
    return SlotLayout(num_entries, max_sequences, config.n_positions).num_slots * slot_bytes


def assert_all_same(ours: Sequence[SequenceOutput], theirs: Sequence[SequenceOutput]) -> None:
    """The same texts and, up to rounding, the same scores."""
    for our, their in zip(ours, theirs, strict=True):
        assert our.token_ids == their.token_ids
        assert our.logprobs == pytest.approx(their.logprobs, abs=1e-3)
        assert our.prompt_logprobs[1:] == pytest.approx(their.prompt_logprobs[1:], abs=1e-3)
        assert our.prompt_tops[:1] == their.prompt_tops[:1]
        tops = (*our.tops, *our.prompt_tops[1:]), (*their.tops, *their.prompt_tops[1:])
        for our_top, their_top in zip(*tops, strict=True):
            assert our_top is not None
            assert their_top is not None
            assert dict(our_top) == pytest.approx(dict(their_top), abs=1e-3)


def kinds_of_draws() -> Iterator[SamplingParams]:
    """Those that the graph of a step draws, and those that `sample` does."""
    for number in (3, 17, 30):
        yield SamplingParams(number)
        yield SamplingParams(number, temperature=0)
        yield SamplingParams(number, temperature=0.8, top_k=5, top_p=0)
        yield SamplingParams(number, top_k=0, top_p=0.9)
        yield SamplingParams(number, temperature=1.3, top_k=200, top_p=0.9)
        yield SamplingParams(number, repetition_penalty=1.3)
        yield SamplingParams(number, frequency_penalty=0.5, presence_penalty=0.7)
        yield SamplingParams(number, temperature=0, logit_bias=((7, 100.0), (9, -100.0)), frequency_penalty=2)
        yield SamplingParams(number, temperature=0, first_rank=70, top_logprobs=3)


def test_every_kind_of_draw_gives_the_cpu_paths_tokens(tiny: LoadedModel, device_tiny: LoadedModel) -> None:
    """Prompts that are shared, cached whole or in part, echoed; in mixed batches."""
    rng = random.Random(1)
    prompts = [random_ids(rng, length, TINY.vocab_size) for length in (5, 40, 300)]
    prompts.append([*prompts[1][:30], *random_ids(rng, 90, TINY.vocab_size)])
    requests = [
        EngineRequest(tuple(rng.choice(prompts)), params, seed, echo_logprobs=seed % 4 == 0)
        for seed, params in enumerate([*kinds_of_draws(), *kinds_of_draws()])
    ]
    with running_engine(tiny) as engine:
        theirs = [generate(engine, list(r.prompt_ids), r.sampling, r.seed) for r in requests]
        echoed = [results(engine, [one])[0] for one in requests]
    with running_engine(device_tiny, max_batch=len(requests)) as engine:
        for _ in range(2):
            ours = results(engine, requests)
            assert_all_same(ours, echoed)
            assert [one.token_ids for one in ours] == [one.token_ids for one in theirs]
        assert max(one.cached_tokens for one in ours) == 300


@pytest.mark.parametrize("num_entries", [1, 4])
def test_overlapping_edits_give_the_cpu_paths_text(
    tiny: LoadedModel, device_tiny: LoadedModel, num_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are fewer entries than prompts."""
    monkeypatch.setattr(cuda_cache, "device_budget_bytes", lambda _: budget_for(num_entries, 30))
    with running_engine(device_tiny, max_batch=30) as engine:
        asked = overlapping_edits(engine, random.Random(num_entries), 40)
    assert any(ours.cached_tokens > 20 for _, ours in asked)
    with running_engine(tiny) as engine:
        for request, ours in asked:
            theirs = generate(engine, list(request.prompt_ids), request.sampling, request.seed)
            assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]


def test_texts_longer_than_a_kv_suffix_continue_in_an_entry(tiny: LoadedModel, device_tiny: LoadedModel) -> None:
    prompt = tuple(random_ids(random.Random(3), 200, TINY.vocab_size))
    requests = [EngineRequest(prompt, SamplingParams(SUFFIX_TOKENS + 30 + seed, top_k=20), seed) for seed in range(3)]
    with running_engine(tiny) as engine:
        theirs = results(engine, requests)
    with running_engine(device_tiny) as engine:
        assert_all_same(results(engine, requests), theirs)


def test_predictable_steps_are_launched_together(
    tiny: LoadedModel, device_tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ever more while the sequences stay the same, none past the end, and the same text."""
    num_steps: list[int] = []
    call = Program.__call__

    def counting(self: Program[Any]) -> Any:
        result = call(self)
        if isinstance(result, torch.Tensor):  # a step's logits
            num_steps[-1] += 1
        return result

    run = CudaRunner.run

    def one_run(self: CudaRunner, scheduled: SchedulerOutput) -> RunnerOutput:
        num_steps.append(0)
        return run(self, scheduled)

    kinds = (SamplingParams(40), SamplingParams(40, top_logprobs=1))
    asked = [[EngineRequest((5,) * 9, params, seed, group_size=3) for seed in range(3)] for params in kinds]
    with running_engine(tiny) as engine:
        theirs = [results(engine, requests) for requests in asked]
    with running_engine(device_tiny) as engine:
        monkeypatch.setattr(Program, "__call__", counting)
        monkeypatch.setattr(CudaRunner, "run", one_run)
        for params, requests, expected in zip(kinds, asked, theirs, strict=True):
            num_steps.clear()
            assert_all_same(results(engine, requests), expected)
            assert sum(num_steps) == 39  # the first token is drawn from the prompt's logits
            assert max(num_steps) == (1 if params.top_logprobs else 5)


def test_in_flight_steps_survive_the_end_of_other_sequences(tiny: LoadedModel, device_tiny: LoadedModel) -> None:
    """The sequences between are cancelled: the suffix of the last moves while steps of it are in flight."""
    requests = [EngineRequest((7, 8, 9), SamplingParams(90), seed, stream=True) for seed in range(14)]
    with running_engine(tiny) as engine:
        theirs = [one.token_ids for one in results(engine, requests)]
    with running_engine(device_tiny) as engine:
        for num_tokens in (9, 10, 12, 15):
            streams = [engine.submit(one) for one in requests]
            for _ in range(num_tokens):
                streams[-1].next()
            for one in streams[1:-1]:
                one.cancel()
            for number, one in enumerate(streams):
                token_ids = one.result().token_ids
                assert token_ids == theirs[number][: len(token_ids)]
                assert len(token_ids) == 90 or 0 < number < 13


def test_other_rows_and_padding_change_nothing(device_tiny: LoadedModel) -> None:
    """Three sequences in a batch of three and of eight; no KV slot changes but theirs and the dummy slot."""
    outs: list[tuple[torch.Tensor, torch.Tensor]] = []
    tables = []
    for size in (3, 8):
        batch, cache = make_batch(device_tiny, size)
        layout = cache.layout
        before = cache.layers.clone()
        written = {layout.dummy_slot}
        for column, (entry, start, suffix, length) in enumerate([(0, 60, 4, 3), (2, 1, 0, 0), (0, 50, 7, 12)]):
            first = layout.first_of_suffix(suffix)
            integers = (column, start, layout.first_of_entry(entry), first - start, 1, start + length)
            next_points = [uniform(column, step) for step in range(1, 17)]
            numbers = [*integers, column, 50, 0.9, *first_code(column), 0, *next_points]
            batch.table[:, column] = torch.tensor(numbers, dtype=torch.float64)
            written |= {first + length, first + length + 1}
        with torch.inference_mode():
            batch.programs[64]()
            outs.append((batch.programs[128](), batch.tokens[1].clone()))
        tables.append(batch.table[:, :3])
        changed = (cache.layers != before).flatten(2).any(2).any(0).nonzero()
        assert set(changed.flatten().tolist()) <= written
        assert (batch.table[[POSITION, AT], 3:] == 0).all()
    assert torch.allclose(outs[0][0], outs[1][0][:3], atol=1e-4)
    assert tables[0][ID].tolist() == outs[1][1][0, :3].tolist()
    codes = slice(POINT, WIDTH + 1)
    torch.testing.assert_close(tables[0][codes], tables[1][codes], rtol=0, atol=1e-4)
    tables[0][codes] = tables[1][codes]
    assert tables[0][START:].equal(tables[1][START:])
    assert tables[0][POSITION].tolist() == [65, 3, 64]


def test_too_little_memory_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_cache, "device_budget_bytes", lambda _: budget_for(1, 8) - 1)
    with pytest.raises(MemoryError, match="smaller batch"):
        KVCache(TINY, 8, torch.float32, CPU)


def test_int8_is_not_for_a_gpu() -> None:
    with pytest.raises(ValueError, match="int8"):
        build(TINY, peaked_weights(TINY), "int8", device=DEVICE)


def draw_each(logits: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[list[float]]]:
    """Token ids by the sampler of a step, and the code points and widths after it."""
    columns = [(one.params.temperature, *one.params.limits[1:3]) for one in draws]
    codes = [(*one.code, one.next_point) for one in draws]
    tables = [torch.tensor(columns, dtype=torch.float64).T for columns in (columns, codes)]
    ids, _, *after = draw(logits, *tables)
    return [int(number) for number in ids], torch.stack(after, 1).tolist()


def test_draws_are_those_of_sample() -> None:
    rng = random.Random(4)
    logits = 3 * torch.randn(400, 1000, generator=torch.Generator().manual_seed(4))
    # Ties among the likeliest, for greedy draws: `sample` leaves their order open where it samples.
    logits[::5] = logits[::5].round()
    draws = [
        Draw(
            SamplingParams(
                temperature=rng.choice([5e-324, 0.5, 1.0, 2.0]) if seed % 5 else 0,
                top_k=rng.choice([1, 7, 50, 64]),
                top_p=rng.choice([0, 0.3, 0.9, 1]),
            ),
            seed,
            rng.randint(1, 500),
            Code(rng.random(), rng.choice([1.0, 1.5 * MIN_WIDTH])),
        )
        for seed in range(400)
    ]
    token_ids, codes = draw_each(logits, draws)
    expected = sample(logits, draws)
    assert token_ids == [step.token_id for step in expected]
    for code, step in zip(codes, expected, strict=True):
        assert code == pytest.approx(step.code, abs=1e-6)


def test_of_equal_logits_at_the_last_rank_the_smaller_ids_are_candidates() -> None:
    """65 equal logits for 64 ranks: `topk` leaves open which it takes."""
    logits = torch.full((2, 1000), -1.0)
    logits[0, 7:1000:15] = 2.0
    logits[1, 900:965] = 0.5
    params = SamplingParams(top_k=64, top_p=1)
    draws = [Draw(params, seed, 1, Code(0.999, 1.0)) for seed in range(2)]
    last = [7 + 15 * 63, 900 + 63]
    assert draw_each(logits, draws)[0] == last
    assert [step.token_id for step in sample(logits, draws)] == last


def gpu_texts(loaded: LoadedModel, max_batch: int = 48) -> list[SequenceOutput]:
    """Requests one by one, then three siblings, whose steps are launched together."""
    rng = random.Random(6)
    vocab_size = loaded.config.vocab_size
    crowd = [
        EngineRequest(tuple(random_ids(rng, rng.randint(1, 300), vocab_size)), params, seed)
        for seed, params in enumerate(kinds_of_draws())
    ]
    siblings = [EngineRequest(crowd[2].prompt_ids, SamplingParams(60), seed, group_size=3) for seed in range(3)]
    with running_engine(loaded, max_batch=max_batch) as engine:
        # One by one, so that batches are the same each time.
        alone = [results(engine, [one])[0] for one in crowd]
        return [*alone, *results(engine, siblings), *results(engine, siblings)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cuda_graphs_change_nothing(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(CHECKPOINT, device="cuda", dtype=dtype)
    with capture_logs() as logs:
        captured = gpu_texts(loaded)
    assert "cuda_graphs_captured" in [entry["event"] for entry in logs]
    monkeypatch.setattr(Program, "capture", lambda *_: None)
    assert_all_same(captured, gpu_texts(loaded))


def test_a_text_is_the_same_alone_and_among_48(device_model: LoadedModel) -> None:
    """Prompts in chunks of all sizes, in all batch buckets."""
    rng = random.Random(9)
    lengths = [1, 15, 16, 17, 40, 64, 65, 130, 257, 300]
    requests = [
        EngineRequest(
            tuple(random_ids(rng, lengths[seed % len(lengths)], TINY.vocab_size)),
            SamplingParams(1 + seed % 5, temperature=0 if seed % 5 == 0 else 1.0),
            seed,
        )
        for seed in range(48)
    ]
    with running_engine(device_model) as engine:
        alone = [results(engine, [one])[0].token_ids for one in requests]
    with running_engine(device_model) as engine:  # with nothing cached
        assert [one.token_ids for one in results(engine, requests)] == alone


@torch.inference_mode()
def test_segments_have_the_same_bits_together_and_alone(device_model: LoadedModel) -> None:
    """Two whole prompts and the ends of two others; a long prompt in one program and in two."""
    rng = random.Random(2)
    prompts = [random_ids(rng, length, TINY.vocab_size) for length in (40, 16, 3, 100)]
    segments = [
        [Segment(prompt[at : at + SEGMENT_TOKENS], at, entry) for at in range(0, len(prompt), SEGMENT_TOKENS)]
        for entry, prompt in enumerate(prompts[:3])
    ]
    long = [Segment(prompts[3][at : at + 13], at, 2) for at in range(0, 91, 13)]
    divided = [Segment(prompts[3][at : at + 16], at, 2) for at in range(0, 91, 16)]
    divided[-1] = Segment(prompts[3][80:91], 80, 2)

    def compute(*programs: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all entries, and the logits of the last program's segments."""
        _, cache = make_batch(device_model, 1)
        program = PrefillProgram(device_model.model, cache)
        for one in programs:
            program.table.copy_(torch.tensor(program.numbers(one)))
            _, logits = program(max(segment.stop for segment in one))
        return cache.layers[:, : cache.layout.dummy_slot].clone(), logits[: len(programs[-1])].clone()

    together = compute([one for own in segments for one in own])
    alone = [compute(own) for own in segments]
    n_ctx = TINY.n_positions
    first = 0
    for entry, (own, (layers, logits)) in enumerate(zip(segments, alone, strict=True)):
        at = slice(entry * n_ctx, entry * n_ctx + len(prompts[entry]))
        assert together[0][:, at].equal(layers[:, at])
        assert together[1][first : first + len(own)].equal(logits)
        first += len(own)
    whole, parts = compute(long), compute(divided[:3], divided[3:])
    at = slice(2 * n_ctx, 2 * n_ctx + 91)
    assert whole[0][:, at].equal(parts[0][:, at])
    assert whole[1][-1].equal(parts[1][-1])


@pytest.mark.gpu
def test_the_text_is_the_same_with_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(CHECKPOINT, device="cuda", dtype="fp32")
    ours = gpu_texts(loaded)
    monkeypatch.setattr(cuda_runner, "make_kernels", lambda *_: PLAIN_KERNELS)
    assert_all_same(ours, gpu_texts(loaded))


@pytest.mark.gpu
def test_greedy_text_on_a_gpu_is_that_of_the_cpu() -> None:
    params = SamplingParams(40, temperature=0)
    texts = []
    for device in ("cpu", "cuda"):
        loaded = load_model(CHECKPOINT, device=device, dtype="fp32")
        assert loaded.tokenizer is not None
        prompt = tuple(loaded.tokenizer.encode(PROSE))
        requests = [EngineRequest(prompt[:length], params, 0) for length in (1, 20, 40)]
        with running_engine(loaded) as engine:
            texts.append([one.token_ids for one in results(engine, requests)])
    assert texts[0] == texts[1]
