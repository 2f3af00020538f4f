"""The prefix cache saves work and changes nothing: every bit is the same as without it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from tests.workers.engine.helpers import CPU_DTYPES, generate, random_ids, results, running_engine
from workers.engine.batch import Copy, EntryRelease, PrefillGroup
from workers.engine.cpu.kv_cache import CacheShape
from workers.engine.engine import Engine
from workers.engine.loader import LoadedModel
from workers.engine.prefix_cache import CachedPrefix, PrefixCache
from workers.engine.request import EngineRequest, SamplingParams, SequenceOutput
from workers.engine.sequence import ResultStream


def uncached(engine: Engine, requests: list[EngineRequest]) -> list[SequenceOutput]:
    """What the requests give without the cache: a prompt whose log-probabilities are echoed is prefilled whole."""
    outputs = results(engine, [replace(request, echo_logprobs=True) for request in requests])
    assert all(output.cached_tokens == 0 for output in outputs)
    return outputs


@dataclass
class Editor:
    """A document of token ids, edited at random; what is before the cursor is the prompt."""

    rng: random.Random
    vocab_size: int
    max_tokens: int
    text: list[int] = field(default_factory=list)
    cursor: int = 0
    past: list[tuple[list[int], int]] = field(default_factory=list)

    def edit(self, suggestions: list[tuple[int, ...]]) -> None:
        """One change; most often at the cursor, as people type."""
        action = self.rng.choice(["type"] * 6 + ["accept"] * 3 + ["delete", "replace", "undo", "undo", "jump", "paste"])
        if action == "undo" and self.past:
            self.text, self.cursor = self.past.pop()
            return
        self.past.append((list(self.text), self.cursor))
        if action == "jump":
            self.cursor = self.rng.randint(0, len(self.text))
        elif action == "delete":
            first = max(0, self.cursor - self.rng.randint(1, 20))
            del self.text[first : self.cursor]
            self.cursor = first
        elif action == "replace" and self.cursor:
            place = self.rng.randrange(self.cursor)
            self.text[place] = self.rng.randrange(self.vocab_size)
        else:
            new = random_ids(self.rng, self.rng.randint(1, 3), self.vocab_size)
            if action == "accept" and suggestions:
                new = list(self.rng.choice(suggestions))
                new = new[: self.rng.randint(1, len(new))]
            elif action == "paste":
                new = random_ids(self.rng, self.rng.randint(20, 120), self.vocab_size)
            self.text[self.cursor : self.cursor] = new
            self.cursor += len(new)

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.text[: self.cursor][-self.max_tokens :])


def requests_of(editor: Editor, rng: random.Random) -> list[EngineRequest]:
    """Three siblings, one of them greedy."""
    number = rng.choice([1, 4, 9, 20])
    seed = rng.randrange(2**60)
    return [
        EngineRequest(
            editor.prompt,
            SamplingParams(number, temperature=temperature, top_k=20),
            seed + index,
            group_size=3,
        )
        for index, temperature in enumerate((0, 1.0, 1.0))
    ]


def same(ours: SequenceOutput, theirs: SequenceOutput) -> bool:
    return (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_random_edits_give_the_text_of_uncached_prompts(tiny_of: dict[str, LoadedModel], dtype: str) -> None:
    """150 edits in fp32 and 60 in the others; insert, delete, replace, undo, accept, anywhere."""
    loaded = tiny_of[dtype]
    rng = random.Random(1)
    editor = Editor(rng, loaded.config.vocab_size, max_tokens=500)
    num_cached = num_prompt = 0
    with running_engine(loaded) as engine:
        asked: list[tuple[list[EngineRequest], list[SequenceOutput]]] = []
        suggestions: list[tuple[int, ...]] = []
        for _ in range(150 if dtype == "fp32" else 60):
            editor.edit(suggestions)
            requests = requests_of(editor, rng)
            finished = results(engine, requests)
            suggestions = [one.token_ids for one in finished]
            asked.append((requests, finished))
            num_cached += finished[0].cached_tokens
            num_prompt += len(editor.prompt)
        for requests, finished in asked:
            assert all(map(same, finished, uncached(engine, requests)))
    assert num_cached > 0.4 * num_prompt  # most keystrokes are cheap


def overlapping_edits(engine: Engine, rng: random.Random, number: int) -> list[tuple[EngineRequest, SequenceOutput]]:
    """Requests of three editors that overlap, and some of which are cancelled."""
    editors = [Editor(random.Random(seed), 512, 500) for seed in range(3)]
    asked: list[tuple[EngineRequest, SequenceOutput]] = []
    running: list[tuple[list[EngineRequest], list[ResultStream]]] = []
    for _ in range(number):
        editor = rng.choice(editors)
        editor.edit([(1, 2, 3, 4)])
        requests = requests_of(editor, rng)
        running.append((requests, [engine.submit(one) for one in requests]))
        if rng.random() < 0.3:
            rng.choice(running[-1][1]).cancel()
        while len(running) > rng.randint(0, 7):
            requests, streams = running.pop(rng.randrange(len(running)))
            asked += [(one, stream.result()) for one, stream in zip(requests, streams, strict=True)]
    return asked


@pytest.mark.parametrize("num_entries", [1, 2, 5])
def test_overlapping_edits_give_the_text_of_uncached_prompts(
    tiny: LoadedModel, num_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is that of few entries."""
    monkeypatch.setattr(CacheShape, "max_entry_tokens", lambda shape, *_: num_entries * shape.entry_positions)
    with running_engine(tiny, max_batch=30) as engine:
        for request, ours in overlapping_edits(engine, random.Random(num_entries), 120):
            [theirs] = uncached(engine, [request])
            number = len(ours.token_ids)
            assert ours.token_ids == theirs.token_ids[:number]
            assert ours.logprobs == theirs.logprobs[:number]


def test_texts_longer_than_a_kv_suffix_continue_in_an_entry(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SUFFIX_TOKENS tokens a sequence needs an entry; if memory is short, the sequences take turns."""
    params = SamplingParams(400, top_k=20)
    prompt = random_ids(random.Random(3), 200, tiny.config.vocab_size)
    requests = [EngineRequest(tuple(prompt), params, seed) for seed in range(3)]
    with running_engine(tiny) as engine:
        alone = [engine.submit(one).result() for one in requests]
        together = results(engine, requests)
        assert all(map(same, together, alone))
        typed = [*prompt, *alone[0].token_ids[:390]]
        rest = generate(engine, typed, SamplingParams(10, top_k=20), 0)
        assert rest.cached_tokens > 200
    monkeypatch.setattr(CacheShape, "max_entry_tokens", lambda shape, *_: shape.entry_positions)
    with running_engine(tiny) as engine:
        crowded = results(engine, requests)
        assert all(map(same, crowded, alone))


def test_memory_of_entries_that_were_not_used_lately_is_released_for_new_prompts() -> None:
    cache = PrefixCache(8, 8, max_entry_tokens=256)
    copies: list[Copy] = []
    entries = []
    for first in range(8):
        tokens = tuple(range(1000 * first, 1000 * first + 60))  # 64 with what is rounded up
        entry = cache.place(cache.find(tokens, None), tokens, None, copies)
        assert entry is not None
        entry.tokens[:] = tokens
        cache.mark_used(entry)
        entries.append(entry)
    assert copies == [EntryRelease(entry.index) for entry in entries[:4]]
    assert [cache.find(tuple(range(1000 * first, 1000 * first + 60)), None).length for first in range(8)] == [
        *(0, 0, 0, 0),
        *(60, 60, 60, 60),
    ]


def test_a_prompt_waits_while_all_memory_is_in_use() -> None:
    cache = PrefixCache(2, 2, max_entry_tokens=128)
    entry = cache.place(CachedPrefix(0), (1,) * 100, None, [])
    assert entry is not None
    cache.mark_used(entry)
    group = PrefillGroup((1,) * 100, [], None, 1, 0.0, is_echoed=False, entry=entry)
    entry.writers.append(group)
    copies: list[Copy] = []
    assert cache.place(CachedPrefix(0), (2,) * 40, None, copies) is None
    assert copies == []
    entry.writers.clear()
    assert cache.place(CachedPrefix(0), (2,) * 40, None, copies) is not None
    assert copies == [EntryRelease(entry.index)]
