"""`tercet bench predict`: what the strategy `predict` costs besides the model's work, and what it adds to W.

`request`, in this process: predictions against greedy continuations of the same number and length, and the parts of the
difference; contexts are those of a live writer, key by key. `W`, through a gateway: the benchmark workload with new
prompts by both strategies. All contenders take turns. Knows engine, predictor and HTTP; does not know quality.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from rich.console import Console

from deploy.bench.harness.writer import NUM_WARM_UPS, QUICK_SHARE, Part, latency_figures
from deploy.bench.speed.engine import EngineAlone
from deploy.load.clients import LOOPBACK, Connection
from deploy.load.options import Options
from deploy.load.prompts import PromptGenerator
from deploy.load.report import Document
from deploy.load.run import progress, start_server
from deploy.load.workload import W
from gateway.api.autocompletion import DEFAULT_MAX_TOKENS
from shared.errors import StartError
from shared.protocol import Done, GenerateRequest, Group, Prediction, Sampling
from workers.codec import Codec
from workers.engine.engine import Engine
from workers.engine.paths import PathRanking
from workers.engine.request import EngineRequest
from workers.engine.result_stream import ResultStream
from workers.engine.sequence import Sequence
from workers.predictor import MAX_TOKENS, NUM_PATHS, Predictor, Search
from workers.text.tokenizer import Tokenizer

NUM_KEYS = 400
NUM_W = 100
CONTEXT_CHARS = 1200
MAX_BATCH = 48  # the default of a slot
DEADLINE_MS = 1e9  # none
STRATEGIES = ("sample", "predict")


class PredictBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, texts: Items[str], console: Console) -> None:
        self._options, self._texts, self._console = options, texts, console
        self._share = QUICK_SHARE if options.is_quick else 1.0

    def run(self, document: Document) -> None:
        """
        Raises:
            StartError: a request failed, so its time means nothing.
        """
        document.rows = [*self._measure_requests(), *self._measure_w()]

    def _measure_requests(self) -> list[Part]:
        """The parts of a request in this process."""
        settings, subject = self._options.load_settings(), self._options.subject()
        alone = EngineAlone(subject, self._options.device, settings.dtype, MAX_BATCH, self._options.num_threads)
        meter = _Meter(alone.engine, subject.tokenizer(), subject.n_ctx, subject.vocab_size, self._options.device)
        contexts = self._contexts(int(NUM_KEYS * self._share))
        try:
            with progress(self._console, "Keys", len(contexts)) as turn:
                for number, context in enumerate(contexts):
                    turn("predictions and greedy continuations")
                    meter.measure(context, number, is_counted=number >= NUM_WARM_UPS)
        finally:
            alone.engine.stop(0.0)
        return [Part(part="request", what=what, figures=latency_figures(ms)) for what, ms in meter.samples_ms.items()]

    def _contexts(self, num_keys: int) -> list[str]:
        """The text before each of the writer's keys, after `NUM_WARM_UPS` keys more."""
        rng = random.Random(self._options.seed)
        text = rng.choice(self._texts)
        num_keys += NUM_WARM_UPS
        start = rng.randrange(max(1, len(text) - CONTEXT_CHARS - num_keys))
        return [text[start : start + CONTEXT_CHARS + key] for key in range(num_keys)]

    def _measure_w(self) -> list[Part]:
        """W by each strategy: every prompt is new."""
        prompts = PromptGenerator(self._options.subject().tokenizer(), self._options.seed)
        samples_ms: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
        num_rounds = max(1, int(NUM_W * self._share))
        with (
            start_server(self._console, self._options.models, self._options.server_settings) as server,
            Connection(LOOPBACK, server.port) as connection,
            progress(self._console, "W", NUM_WARM_UPS + num_rounds) as turn,
        ):
            for number in range(-NUM_WARM_UPS, num_rounds):
                turn("by both strategies")
                for strategy in STRATEGIES if number % 2 else reversed(STRATEGIES):
                    body = W.body(prompts.text(W.num_prompt_tokens), prompts.seed(), strategy=strategy)
                    done = connection.exchange(body)
                    if done.status != 200:
                        raise StartError(f"The server answered with status {done.status} (0: connection lost).")
                    if number >= 0:
                        samples_ms[strategy].append(done.ms)
        rows = [
            Part(part="W through the gateway, cold", what=strategy, figures=latency_figures(ms))
            for strategy, ms in samples_ms.items()
        ]
        added_ms = statistics.median(samples_ms["predict"]) - statistics.median(samples_ms["sample"])
        return [*rows, Part(part="W: predict − sample", what="difference of medians", figures={"ms": added_ms})]


class _Meter:
    """Milliseconds of a request's parts, by description."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, n_ctx: int, vocab_size: int, device: str) -> None:
        self.samples_ms: dict[str, list[float]] = {}
        self._engine = engine
        self._tokenizer = tokenizer
        self._codec = Codec(tokenizer, n_ctx)
        self._vocab_size = vocab_size
        self._device = device
        self._predictor = Predictor(engine)

    def measure(self, context: str, number: int, *, is_counted: bool) -> None:
        """
        Args:
            number: of the context; the contender that begins alternates with it.
            is_counted: keep the samples.
        """
        if number % 2:
            predict_ms = self._predict(context, number)
        greedy_ms, request, streams = self._continue_greedily(context, number)
        if not number % 2:
            predict_ms = self._predict(context, number)
        found = {
            f"predictions: {W.num_samples} branches of {NUM_PATHS} paths, {MAX_TOKENS} tokens": predict_ms,
            f"greedy: {NUM_PATHS} sequences, {MAX_TOKENS} tokens, no text": greedy_ms,
            "predictions − greedy": predict_ms - greedy_ms,
            "of it: ranking paths": self._rank_paths(request),
            "of it: text, and ranking words": self._rank_words(_ask(context, number), request, streams),
        }
        for what, ms in found.items() if is_counted else ():
            self.samples_ms.setdefault(what, []).append(ms)

    def _predict(self, context: str, number: int) -> float:
        start = time.perf_counter()
        branches = [
            self._predictor.join(_ask(context, number, rank), self._codec, time.monotonic())
            for rank in range(W.num_samples)
        ]
        lines = [branch.last_line() for branch in branches]
        ms = _ms_since(start)
        for branch in branches:
            branch.cancel()
        if not all(isinstance(line, Done) for line in lines):
            raise StartError(f"A branch failed in the engine: {lines}.")
        return ms

    def _continue_greedily(self, context: str, number: int) -> tuple[float, EngineRequest, list[ResultStream]]:
        """As many sequences of as many tokens as a prediction has; the first token of each has another rank."""
        start = time.perf_counter()
        ask = GenerateRequest(
            prompt=context,
            max_prompt_tokens=DEFAULT_MAX_TOKENS,
            heal=True,
            sampling=Sampling(max_new_tokens=MAX_TOKENS, temperature=0.0),
            deadline_ms=DEADLINE_MS,
            group=Group(id=str(number), size=NUM_PATHS),
            session="greedy",
        )
        request = self._codec.request(ask, time.monotonic())
        streams = self._engine.submit_group(
            [replace(request, sampling=replace(request.sampling, first_rank=rank)) for rank in range(NUM_PATHS)]
        )
        for stream in streams:
            stream.result()
        return _ms_since(start), request, streams

    def _rank_paths(self, request: EngineRequest) -> float:
        sequence = Sequence(
            replace(request, sampling=replace(request.sampling, path_rank=0)),
            ResultStream(), start_id=self._tokenizer.eos_id or 0, tokenizer=self._tokenizer,
        )  # fmt: skip
        # Ranking takes as long whatever the values are.
        logits = torch.randn(len(request.forced_ids) + 1, self._vocab_size, device=self._device)
        start = time.perf_counter()
        PathRanking(logits).tokens(sequence, 0)
        return _ms_since(start)

    def _rank_words(self, ask: GenerateRequest, request: EngineRequest, streams: Items[ResultStream]) -> float:
        start = time.perf_counter()
        Search(ask, request, streams).result(self._codec)
        return _ms_since(start)


def _ask(context: str, number: int, rank: int = 0) -> GenerateRequest:
    """The branch of a request from the editor."""
    return GenerateRequest(
        prompt=context,
        max_prompt_tokens=DEFAULT_MAX_TOKENS,
        heal=True,
        predict=Prediction(rank=rank),
        deadline_ms=DEADLINE_MS,
        group=Group(id=str(number), size=W.num_samples),
        session="predict",
    )


def _ms_since(start_s: float) -> float:
    return 1e3 * (time.perf_counter() - start_s)
