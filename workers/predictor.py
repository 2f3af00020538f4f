"""Predictions: for each branch of a request, the continuation that begins with another of the likeliest next words.

Branches do not talk to each other, so each computes the same `NUM_PATHS` greedy continuations, which start with the
likeliest paths (`engine.paths`), ranks their first words, and answers the one of its own rank. Before a `suffix` they
are cut and ranked by how well they fill the gap (`workers.gap_filler`). A misspelled word has none, but may have a
correction. Branches of a request that meet in one worker share the computation; the result does not depend on it. Knows
the engine and the codec; does not know HTTP.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from shared.protocol import Accepted, Done, Failed, GenerateLine, GenerateRequest, PredictedWord
from shared.sampling import Sampling
from workers.codec import Codec
from workers.engine.engine import Engine
from workers.engine.request import EngineRequest, SequenceOutput
from workers.engine.sequence import ResultStream
from workers.gap_filler import GapFiller
from workers.text.predicted_words import (
    PredictedWords,
    distinct_first_words,
    predict_words,
    rank_predictions,
)
from workers.text.spelling import respellings, unknown_word

# More paths find no more of the right words (docs/TRIED.md).
NUM_PATHS = 8
# A word or two beyond the first: the probability that all are right falls fast. On a CPU, a large model predicts fewer
# tokens, so that it can answer at every key: one step for each, which reads all its weights (135 million: 5 ms at 30
# GB/s). It follows from the model alone, not from a measured time: every worker must find the same words.
MAX_TOKENS = 8
MIN_TOKENS = 3
MAX_WEIGHTS_READ = 1_200_000_000
# A continuation that is less likely than this is not continued: its next word would save next to nothing.
MIN_PROBABILITY = 0.003
# The same for the paths beyond the branches of the request: they compete by their first word, and few are answered.
MIN_OTHER_PROBABILITY = 0.01
# In a gap, the words after it tell which continuation is right, so unlikely ones are continued, and longer ones found.
GAP_TOKENS = 2
MIN_GAP_PROBABILITY = 1e-5
# A word is misspelled if one of its respellings is this much likelier than it, in nats, and as likely as this at all
# (`make bench BENCH=typist ARGS=--misspellings`). Those of the fewest tokens are scored: the commonest words.
MIN_RESPELLING_LEAD, MIN_RESPELLING_LOGPROB, MAX_RESPELLINGS = 2.0, -13.0, 12


def max_predicted_tokens(num_weights_read: int) -> int:
    """The longest prediction.

    Args:
        num_weights_read: by a step, on a CPU; 0 on a GPU, which is fast enough for all.
    """
    return max(MIN_TOKENS, min(MAX_TOKENS, MAX_WEIGHTS_READ // max(num_weights_read, 1)))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A continuation; `words` is None if it has no whole word, or is a correction (`Done.replaces`)."""

    output: SequenceOutput
    line: Done | Failed
    words: PredictedWords | None


class Search:
    """The continuations of one prompt. Any thread may wait for the result; the last member to leave cancels it."""

    def __init__(
        self,
        request: GenerateRequest,
        engine_request: EngineRequest,
        streams: Sequence[ResultStream],
        filler: GapFiller,
    ) -> None:
        self.request = request
        self.engine_request = engine_request
        self.num_members = 0
        self._streams = streams
        self._filler = filler
        self._lock = threading.Lock()
        self._ranked: list[Prediction] = []

    def cancel(self) -> None:
        """End the sequences after at most one more decode step."""
        for stream in self._streams:
            stream.cancel()
        self._filler.cancel()

    def result(self, codec: Codec) -> list[Prediction]:
        """Best first; waits for all sequences. Not empty: if there is no whole word, the first has none."""
        with self._lock:
            if not self._ranked:
                self._ranked = self._rank(codec, [stream.result() for stream in self._streams])
            return self._ranked

    def _rank(self, codec: Codec, outputs: Sequence[SequenceOutput]) -> list[Prediction]:
        assert self.request.predict is not None
        temperature = self.request.predict.temperature
        lines = [codec.last_line(self.request, self.engine_request, output) for output in outputs]
        if self.request.suffix:
            lines, words = self._filler.predict(lines)
            order = distinct_first_words(sorted(range(len(lines)), key=lambda index: -_fit(lines[index])), words)
        else:
            words = [_words(line, temperature) for line in lines]
            order = rank_predictions(words)
        predictions = [Prediction(*each) for each in zip(outputs, lines, words, strict=True)]
        # Without one of the paths, the ranks would differ from those of a sibling on another worker.
        failed = [prediction for prediction in predictions if isinstance(prediction.line, Failed)]
        ranked = failed[:1] or [predictions[index] for index in order] or predictions[:1]
        return self._correction(codec, ranked) or ranked

    def _correction(self, codec: Codec, ranked: Sequence[Prediction]) -> list[Prediction]:
        """Of a misspelled word, without text if several spellings may be right; empty if it is none."""
        typed, line = self.engine_request.forced_prefix, ranked[0].line
        word = unknown_word("" if self.request.suffix else self.request.prompt or "")
        if not word or not typed.endswith(word.encode()) or isinstance(line, Failed):
            return []
        stem = typed.decode().removesuffix(word)
        tokens = {each: codec.tokenize(stem + each).ids for each in respellings(word)}
        # Tokens of the commoner texts have the smaller ids.
        spellings = sorted(tokens, key=lambda each: (len(tokens[each]), max(tokens[each])))[:MAX_RESPELLINGS]
        own = [word, *(word + each.words.first_word for each in ranked[:3] if each.words)]
        scores = self._filler.score(stem + each for each in [*own, *spellings]) if spellings else {}
        if isinstance(scores, Failed) or len(scores) <= len(own):
            return []
        logprobs = {text.removeprefix(stem): sum(logprob for _, logprob in found) for text, found in scores.items()}
        lead = max(logprobs.pop(each, -math.inf) for each in own) + MIN_RESPELLING_LEAD
        best = max(logprobs, key=logprobs.__getitem__)
        if logprobs[best] < max(lead, MIN_RESPELLING_LOGPROB):
            return []
        is_clear = sum(math.exp(logprob - logprobs[best]) for logprob in logprobs.values()) < 1.5  # odds of 2 to 1
        return [Prediction(ranked[0].output, _with_text(line, best if is_clear else "", len(word)), None)]


class Predictor:
    """The searches of one engine. Thread-safe."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._searches: dict[tuple[object, ...], Search] = {}

    def join(
        self,
        request: GenerateRequest,
        codec: Codec,
        now: float,
        on_finish: Callable[[EngineRequest, SequenceOutput], None] = lambda *_: None,
    ) -> PredictedBranch:
        """The branch of `request`: of the search of its group, which the first branch starts.

        Args:
            now: when the request arrived, in seconds of `time.monotonic()`.
            on_finish: called when the branch is closed.

        Raises:
            EngineError: as `Engine.submit_group`.
            InvalidRequest, PromptTooLong: as `Codec.request`.
        """
        key = _key(request)
        with self._lock:
            search = self._searches.get(key)
            if search is None:
                search = self._searches[key] = self._start(request, codec, now)
            search.num_members += 1
        return PredictedBranch(request, search, codec, partial(self._leave, key, search), on_finish)

    def _leave(self, key: tuple[object, ...], search: Search) -> None:
        with self._lock:
            search.num_members -= 1
            is_last = search.num_members == 0
            if is_last:
                del self._searches[key]
        if is_last:
            search.cancel()

    def _start(self, request: GenerateRequest, codec: Codec, now: float) -> Search:
        max_tokens = max_predicted_tokens(self._engine.num_weights_read) + GAP_TOKENS * bool(request.suffix)
        sampling = Sampling(
            max_new_tokens=min(request.sampling.max_new_tokens, max_tokens),
            temperature=0.0,
            stop=request.sampling.stop,
            single_line=bool(request.suffix),  # other predictions end with their line, too
        )
        request = msgspec.structs.replace(request, sampling=sampling, stream=False)
        engine_request = replace(codec.request(request, now), group_size=NUM_PATHS)
        num_branches = request.group.size if request.group else 1
        requests = []
        for rank in range(NUM_PATHS):
            min_probability = MIN_PROBABILITY if rank < num_branches else MIN_OTHER_PROBABILITY
            if request.suffix:
                min_probability = MIN_GAP_PROBABILITY
            path = {"path_rank": rank, "min_logprob": math.log(min_probability)}
            sampling_params = msgspec.structs.replace(engine_request.sampling, **path)
            requests.append(replace(engine_request, sampling=sampling_params))
        filler = GapFiller(self._engine, codec, request, engine_request)
        return Search(request, engine_request, self._engine.submit_group(requests), filler)


@dataclass(slots=True, eq=False)
class PredictedBranch:
    """One branch of a prediction, with the interface of `workers.service.Branch`."""

    request: GenerateRequest
    search: Search
    codec: Codec
    leave: Callable[[], None]
    on_finish: Callable[[EngineRequest, SequenceOutput], None]
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _has_left: bool = field(init=False, default=False)

    def __iter__(self) -> Iterator[list[GenerateLine]]:
        yield [Accepted()]
        yield [self.last_line()]

    def last_line(self) -> Done | Failed:
        """The prediction of the request's rank; one without text if there are fewer. Waits for the search."""
        assert self.request.predict is not None
        ranked = self.search.result(self.codec)
        rank = self.request.predict.rank
        prediction = ranked[min(rank, len(ranked) - 1)]
        line, words = prediction.line, prediction.words
        if isinstance(line, Failed):
            return line
        if line.replaces:
            return line if rank == 0 and self.request.predict.corrects else _with_text(line, "", line.replaces)
        if words is None or rank >= len(ranked):
            return msgspec.structs.replace(_with_text(line, ""), usefulness=0.0)
        usefulness = round(words.usefulness, 3)
        if self.request.predict.is_verbatim:
            return msgspec.structs.replace(line, usefulness=usefulness)
        ends = [min(end, len(words.text)) for end in line.ends]
        # Calibration and rounding may take a probability above 1.
        chances = [
            PredictedWord(end, round(min(1.0, math.exp(logprob)), 4))
            for end, logprob in zip(words.ends, words.logprobs, strict=True)
        ]
        return msgspec.structs.replace(line, text=words.text, ends=ends, usefulness=usefulness, words=chances)

    def cancel(self) -> None:
        """Leave the search, which ends when no branch needs it. Idempotent."""
        with self._lock:
            has_left, self._has_left = self._has_left, True
        if not has_left:
            self.leave()

    def close(self) -> None:
        """As `workers.service.Branch.close`."""
        self.cancel()
        assert self.request.predict is not None
        ranked = self.search.result(self.codec)
        self.on_finish(self.search.engine_request, ranked[min(self.request.predict.rank, len(ranked) - 1)].output)


def _key(request: GenerateRequest) -> tuple[object, ...]:
    """Equal for branches that share a search. Clients may give several requests the same id, so it is not enough."""
    prompt = request.prompt if request.prompt_ids is None else tuple(request.prompt_ids)
    if request.group is None or request.predict is None:
        return (object(),)
    own = request.owner, request.session, request.group, prompt, request.max_prompt_tokens, request.heal
    return (*own, request.suffix, request.sampling, request.logprobs, request.predict.temperature)


def _fit(line: Done | Failed) -> float:
    return line.fit if isinstance(line, Done) and line.fit is not None else -math.inf


def _with_text(line: Done, text: str, replaces: int = 0) -> Done:
    return msgspec.structs.replace(line, text=text, ends=[len(text)] * len(line.ends), replaces=replaces)


def _words(line: Done | Failed, temperature: float) -> PredictedWords | None:
    if isinstance(line, Failed):
        return None
    first = line.num_typed_tokens
    return predict_words(
        line.text,
        line.ends[first:],
        line.logprobs[first:],
        is_complete=line.finish_reason in {"eos", "stop"},
        temperature=temperature,
    )
