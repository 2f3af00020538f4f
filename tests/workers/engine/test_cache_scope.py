"""The prefix cache is scoped: no request reads, or can measure, what requests of another scope have written."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.protocol import GenerateRequest
from tests.workers.engine.helpers import make_sequence, random_ids, running_engine
from workers.codec import Codec
from workers.engine.batch import EntryCopy, SchedulerOutput, SuffixCopy, SuffixMove
from workers.engine.loader import LoadedModel
from workers.engine.request import EngineRequest, GeneratedToken, SamplingParams, SequenceOutput
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence

MAX_SEQUENCES = 4
# A small alphabet, so that most prompts have a prefix in common.
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=60).map(tuple)
REQUESTS = st.tuples(st.sampled_from("abc"), PROMPTS, st.sampled_from([1, 2, 5]), st.integers(0, 3))
Written = tuple[Hashable, int]  # scope and token


class ShadowMemory:
    """A device that records who wrote which token where, and checks each read."""

    def __init__(self, num_entries: int) -> None:
        self._entries: list[list[Written]] = [[] for _ in range(num_entries)]
        self._suffixes: list[list[Written]] = [[] for _ in range(MAX_SEQUENCES)]
        self._kept: dict[int, list[Written]] = {}  # entry → the tokens that its kept logits follow

    def run(self, scheduled: SchedulerOutput) -> None:
        entries, suffixes = self._entries, self._suffixes
        for copy in scheduled.copies:
            match copy:
                case EntryCopy(source, target, length):
                    entries[target] = entries[source][:length]
                case SuffixCopy(suffix, entry, start, length):
                    entries[entry] = entries[entry][:start] + suffixes[suffix][:length]
                case SuffixMove(source, target, length):
                    suffixes[target] = suffixes[source][:length]
        for row in scheduled.rows:
            scope = row.sequence.request.cache_scope
            own = suffixes[row.suffix]
            own[row.suffix_length :] = [(scope, row.sequence.token_ids[-1])]
            self._check(row.sequence, entries[row.entry.index][: row.start] + own)
        for ready in scheduled.prefilled_rows:
            self._check(ready.sequence, self._kept[ready.entry.index])
        for chunk in scheduled.chunks:
            group, memory = chunk.group, entries[chunk.entry.index]
            assert len(memory) >= chunk.start
            tokens = group.tokens[chunk.start : chunk.stop]
            memory[chunk.start : chunk.stop] = [(group.scope, token) for token in tokens]
            for member in group.sequences:
                self._check(member, memory[: chunk.stop])
            if chunk.is_last:
                self._kept[chunk.entry.index] = memory[: chunk.stop]

    @staticmethod
    def _check(sequence: Sequence, read: list[Written]) -> None:
        scope, tokens = sequence.request.cache_scope, sequence.tokens(0, len(read))
        assert read == [(scope, token) for token in tokens]


def run_all(num_entries: int, requests: list[tuple[str, tuple[int, ...], int, int]]) -> list[SequenceOutput]:
    """Adds each request after its number of steps, and runs all to their end."""
    scheduler, memory = Scheduler(num_entries, MAX_SEQUENCES, max_chunk=16), ShadowMemory(num_entries)
    outputs: dict[int, SequenceOutput] = {}
    numbers: dict[Sequence, int] = {}

    def step() -> None:
        scheduled = scheduler.schedule(float("inf"))
        memory.run(scheduled)
        scheduler.complete(scheduled)
        for drawn in scheduled.sampled_sequences:
            drawn.append(GeneratedToken(len(drawn.token_ids) % 3, 0.0), (), 0.0)
            if drawn.finish_reason is not None:
                scheduler.remove(drawn)
                outputs[numbers[drawn]] = drawn.output(drawn.finish_reason, 0.0)

    for number, (scope, prompt, num_tokens, num_steps) in enumerate(requests):
        for _ in range(num_steps):
            step()
        while len(scheduler.sequences) == MAX_SEQUENCES:
            step()
        request = EngineRequest(prompt, SamplingParams(num_tokens), 0, cache_scope=scope)
        sequence = make_sequence(request)
        numbers[sequence] = number
        scheduler.add(sequence)
    while scheduler.sequences:
        step()
    return [outputs[number] for number in range(len(requests))]


@settings(derandomize=True)
@given(st.integers(1, 6), st.lists(REQUESTS, min_size=2, max_size=14))
def test_a_sequence_reads_only_what_its_scope_has_written(
    num_entries: int, requests: list[tuple[str, tuple[int, ...], int, int]]
) -> None:
    run_all(num_entries, requests)


@settings(derandomize=True)
@given(st.lists(REQUESTS, min_size=2, max_size=8), PROMPTS)
def test_cached_tokens_do_not_depend_on_other_scopes(
    requests: list[tuple[str, tuple[int, ...], int, int]], other: tuple[int, ...]
) -> None:
    """As long as nothing is evicted: whatever the others write, scope a measures the same."""

    def cached(foreign_prompt: tuple[int, ...] | None) -> list[int]:
        changed = [
            (scope, prompt if scope == "a" or foreign_prompt is None else foreign_prompt, num_tokens, num_steps)
            for scope, prompt, num_tokens, num_steps in requests
        ]
        outputs = run_all(3 * len(requests), changed)
        return [output.cached_tokens for output, (scope, *_) in zip(outputs, changed, strict=True) if scope == "a"]

    own = [prompt for scope, prompt, *_ in requests if scope == "a"]
    assert cached(None) == cached(other) == (cached(own[-1]) if own else [])


def test_right_and_wrong_guesses_of_anothers_text_cannot_be_told_apart(tiny: LoadedModel) -> None:
    """20 texts, guessed while they are generated, and after; the guesser sees the same for each."""
    rng = random.Random(14)
    victim, seen = ("key-1", "draft"), []
    with running_engine(tiny, max_batch=24) as engine:
        for number in range(20):
            text = tuple(random_ids(rng, 40, tiny.config.vocab_size))
            secret = engine.submit(EngineRequest(text, SamplingParams(8), 0, cache_scope=victim))
            if number % 2:
                secret.result()
            for scope in (("key-2", "draft"), ("key-1", "other"), ("key-1", None)):
                for guess in (text, (*text[:20], *random_ids(rng, 20, 512))):
                    own = (*scope, number, guess == text)  # the guesser's own texts are no hint either
                    output = engine.submit(EngineRequest(guess, SamplingParams(2), 1, cache_scope=own)).result()
                    seen.append((guess == text, output.cached_tokens))
            secret.result()
    assert {cached for _, cached in seen} == {0}
    assert len(seen) == 120


@pytest.mark.parametrize(
    ("first", "second", "is_shared"),
    [
        (("a", None), ("a", None), True),
        (("a", "s"), ("a", "s"), True),
        (("a", "s"), ("b", "s"), False),
        (("a", "s"), ("a", "t"), False),
        (("a", "s"), ("a", None), False),
        (("", None), ("", None), True),
        (("", "s"), ("", "t"), False),
    ],
)
def test_the_scope_is_the_owner_and_the_session(
    embedded: LoadedModel, first: tuple[str, str | None], second: tuple[str, str | None], is_shared: bool
) -> None:
    assert embedded.healing is not None
    codec = Codec(embedded.healing, embedded.config.n_positions)
    scopes = [
        codec.request(GenerateRequest(prompt="The sea", owner=owner, session=session), 0.0).cache_scope
        for owner, session in (first, second)
    ]
    assert (scopes[0] == scopes[1]) is is_shared
