"""Predictions at the positions of texts, as a worker makes them, and which of their words the text confirms.

The engine runs in this process. Knows how a worker predicts; does not know what is fitted to the result.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.calibrate.fit import Outcome
from deploy.load.passages import Passage
from deploy.load.prompts import tokenizer_of
from deploy.load.run import progress
from gateway.api.autocompletion import DEFAULT_MAX_TOKENS
from shared.cpu_features import num_cores
from shared.errors import StartError
from shared.protocol import Failed, GenerateRequest, Group, Prediction
from shared.settings import ModelSpec
from workers.checkpoints.resolve import resolve
from workers.codec import Codec
from workers.text.predicted_words import PredictedWords, predict_words
from workers.text.token_healing import TokenHealing

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.predictor import Predictor

MAX_WRITERS = 16  # positions that are searched at once
MAX_BRANCHES = 8  # of a request
# More than the eight tokens of a prediction.
NUM_FOLLOWING_CHARS = 200
DEADLINE_MS = 1e9
# A word's end in text that consists of whole words, and text that would continue it.
_WORD = re.compile(r"\w+(?:['’]\w+)*")
_CONTINUED = re.compile(r"\w|['’]\w")


@dataclass(frozen=True, slots=True)
class Continuation:
    """A generated continuation: the arguments of `predict_words`."""

    text: str
    ends: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_complete: bool

    def words(self, temperature: float) -> PredictedWords | None:
        """What would be shown of it."""
        return predict_words(self.text, self.ends, self.logprobs, is_complete=self.is_complete, temperature=temperature)


@dataclass(frozen=True, slots=True)
class Moment:
    """A position of a text: the predictions there, as a worker ranks them, and the text that follows."""

    following: str
    continuations: tuple[Continuation, ...]


def judge(words: PredictedWords, following: str) -> list[Outcome]:
    """The words of a prediction, compared with the text that follows. A word is right only as a whole."""
    judged = []
    for logprob, match in zip(words.logprobs, _WORD.finditer(words.text), strict=True):
        end = match.end()
        is_right = following.startswith(words.text[:end]) and not _CONTINUED.match(following, end)
        judged.append(Outcome(logprob, is_right, end))
    return judged


def read_moments(
    spec: ModelSpec, passages: Sequence[Passage], num_predictions: int, console: Console, cache: Path | None = None
) -> list[Moment]:
    """The moments at every character of the passages, in their order.

    Args:
        num_predictions: largest number of predictions at each position.

    Raises:
        StartError: the model is not on this machine, or the engine fails.
    """
    positions = [(passage, position) for passage in passages for position in range(passage.start, passage.end)]
    # It imports torch, which the command line does without.
    from workers.predictor import Predictor

    with running_engine(spec, cache) as (engine, codec), progress(console, "Positions", len(positions)) as turn:
        predictor = Predictor(engine)

        def predict(place: tuple[Passage, int]) -> Moment:
            passage, position = place
            following = passage.text[position : position + NUM_FOLLOWING_CHARS]
            return Moment(following, _predict(predictor, codec, passage.context(position), num_predictions))

        pool = ThreadPoolExecutor(MAX_WRITERS)
        try:
            moments = []
            for (passage, _), moment in zip(positions, pool.map(predict, positions), strict=True):
                turn(passage.file)
                moments.append(moment)
            return moments
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def running_engine(spec: ModelSpec, cache: Path | None) -> Iterator[tuple[Engine, Codec]]:
    """A warm engine in this process, with room for `MAX_WRITERS` requests of `MAX_BRANCHES` branches."""
    # These import torch.
    from workers.engine.engine import Engine, EngineConfig
    from workers.engine.loader import load_model

    checkpoint = resolve(spec.name, spec.source, cache=cache)
    tokenizer = tokenizer_of(checkpoint)
    loaded = load_model(Path(checkpoint.directory), dtype="int8", tokenizer=tokenizer)
    config = EngineConfig(max_batch=MAX_WRITERS * MAX_BRANCHES, num_threads=num_cores(), hang_s=0)
    engine = Engine(config, lambda _: loaded, on_fatal=lambda _: None)
    engine.start()
    while engine.status().state not in {"warm", "failed"}:
        time.sleep(0.01)
    try:
        yield engine, Codec(TokenHealing(tokenizer), loaded.config.n_positions)
    finally:
        engine.stop(0)


def _predict(predictor: Predictor, codec: Codec, context: str, num_predictions: int) -> tuple[Continuation, ...]:
    group = Group(id=str(threading.get_ident()), size=num_predictions)  # a thread has one search at a time
    branches = [
        predictor.join(
            GenerateRequest(
                prompt=context,
                max_prompt_tokens=DEFAULT_MAX_TOKENS,
                heal=True,
                deadline_ms=DEADLINE_MS,
                group=group,
                predict=Prediction(rank=rank, is_verbatim=True),
            ),
            codec,
            time.monotonic(),
        )
        for rank in range(num_predictions)
    ]
    try:
        lines = [branch.last_line() for branch in branches]
    finally:
        for branch in branches:
            branch.cancel()
    continuations = []
    for line in lines:
        if isinstance(line, Failed):
            raise StartError(f"The engine failed: {line.detail}")
        if line.text:
            first = line.num_typed_tokens
            is_complete = line.finish_reason in {"eos", "stop"}
            continuations.append(
                Continuation(line.text, tuple(line.ends[first:]), tuple(line.logprobs[first:]), is_complete)
            )
    return tuple(continuations)
