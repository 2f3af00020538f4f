"""Predictions at the positions of texts, as a worker makes them, and which of their words the text confirms.

The engine runs in this process. Knows how a worker predicts; does not know what is fitted to the result.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from deploy.load.local_engine import MAX_WRITERS, running_engine
from deploy.load.options import Options
from deploy.load.passages import Passage
from deploy.load.run import progress
from gateway.api.autocompletion import DEFAULT_MAX_TOKENS
from shared.errors import StartError
from shared.protocol import Failed, GenerateRequest, Group, Prediction
from workers.codec import Codec
from workers.text.predicted_words import PredictedWords, predict_words

if TYPE_CHECKING:
    from workers.predictor import Predictor

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
    """A position of a text: the predictions there, the likeliest first word first, and the text that follows."""

    following: str
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True, slots=True)
class JudgedWord:
    """A word of a prediction.

    Attributes:
        number: the word's position in the prediction, from 0.
        logprob: log-probability of the word and all words before it.
        end: where the word ends, in characters of the prediction.
        is_right: the text continues with it and all words before it.
    """

    number: int
    logprob: float
    end: int
    is_right: bool


def judge(words: PredictedWords, following: str) -> list[JudgedWord]:
    """The words of a prediction, compared with the text that follows. A word is right only as a whole."""
    judged = []
    matches = _WORD.finditer(words.text)
    for number, (logprob, match) in enumerate(zip(words.logprobs, matches, strict=True)):
        end = match.end()
        is_right = following.startswith(words.text[:end]) and not _CONTINUED.match(following, end)
        judged.append(JudgedWord(number, logprob, end, is_right))
    return judged


def read_moments(options: Options, passages: Sequence[Passage], num_predictions: int, console: Console) -> list[Moment]:
    """The moments at every character of the passages, in their order.

    Args:
        num_predictions: largest number of predictions at each position.

    Raises:
        StartError: the model is not on this machine, or the engine fails.
    """
    from workers.predictor import Predictor  # imports torch, which the command line does without

    moments: list[Moment] = []
    with ExitStack() as stack:
        engine, codec = stack.enter_context(running_engine(options))
        turn = stack.enter_context(progress(console, "Passages", len(passages)))
        pool = ThreadPoolExecutor(MAX_WRITERS)
        stack.callback(pool.shutdown, cancel_futures=True)
        is_over = threading.Event()  # after Ctrl-C or a failure, no thread starts another search
        stack.callback(is_over.set)
        predict = partial(_predict_passage, Predictor(engine), codec, num_predictions, is_over)
        done = pool.map(predict, passages)
        for passage in passages:
            turn(passage.file)
            moments += next(done)
    return moments


def _predict_passage(
    predictor: Predictor, codec: Codec, num_predictions: int, is_over: threading.Event, passage: Passage
) -> list[Moment]:
    moments = []
    for position in range(passage.start, passage.end):
        if is_over.is_set():
            break
        continuations = _predict(predictor, codec, passage.context(position), num_predictions)
        moments.append(Moment(passage.text[position : position + NUM_FOLLOWING_CHARS], continuations))
    return moments


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
