"""Where `tercet bench typist` gets suggestions from: the gateway, or an engine in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from rich.console import Console

from deploy.bench.quality.keystrokes import Answer
from deploy.load.clients import LOOPBACK, Connection
from deploy.load.local_engine import running_engine
from deploy.load.options import Options
from deploy.load.run import start_server
from gateway.api.autocompletion import DEFAULT_MAX_TOKENS, sampling_of
from gateway.api.schema import AutocompleteRequest
from gateway.generation.request import BranchResult, rank_first_token
from gateway.generation.selection import Selection, SelectionPolicy
from shared.errors import StartError
from shared.protocol import Done, Failed, GenerateRequest, Group, Prediction
from shared.settings import Settings
from workers.codec import Codec

if TYPE_CHECKING:
    from workers.engine.engine import Engine

NUM_WARM_UPS = 10
# A connection that was idle, or a machine with other load. The latency is that of the last attempt.
RETRIED = {0, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
RETRY_WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0)
NOMINAL_LATENCY_MS = 1.0  # of the engine's answers: they arrive after the key that requested them, before the next
DEADLINE_MS = 1e9  # none


class SuggestionSource(Protocol):
    """Suggests continuations. Any thread may call it."""

    def suggest(self, context: str, seed: int) -> Answer:
        """
        Raises:
            StartError: the request failed, so that savings would be too low.
        """


class GatewaySource:
    """The gateway, over a connection of each thread's own."""

    def __init__(self, port: int, fields: Mapping[str, Any]) -> None:
        """
        Args:
            port: the gateway's, on the loopback interface.
            fields: of each request, as in `POST /autocomplete`.
        """
        self._port = port
        self._fields = fields
        self._thread = threading.local()

    def suggest(self, context: str, seed: int) -> Answer:
        if not hasattr(self._thread, "connection"):
            self._thread.connection = Connection(LOOPBACK, self._port)
        body = {"context": context, "seed": seed, **self._fields}
        done = self._thread.connection.exchange(body)
        for wait_s in RETRY_WAITS_S:
            if done.status not in RETRIED:
                break
            time.sleep(wait_s)
            done = self._thread.connection.exchange(body)
        if done.status != HTTPStatus.OK:
            raise StartError(f"The server under test answered with status {done.status} (0: connection lost).")
        sentences = json.loads(done.answer)["sentences"]
        usefulness = tuple(sentence["usefulness"] for sentence in sentences if "usefulness" in sentence)
        return Answer(tuple(sentence["value"] for sentence in sentences), done.ms, usefulness)

    def close(self) -> None:
        """Close the calling thread's connection."""
        self._thread.connection.__exit__()


class EngineSource:
    """An engine, predictions as a worker makes them, and the gateway's selection; no HTTP and no measured latencies.

    There are no top-up branches: samples differ from the gateway's where it replaces a rejected one. Predictions are
    those of a server with the same settings.
    """

    def __init__(self, engine: Engine, codec: Codec, settings: Settings, fields: Mapping[str, Any]) -> None:
        """
        Args:
            settings: of the gateway that this stands for.
            fields: of each request, as in `POST /autocomplete`.
        """
        from workers.predictor import Predictor  # imports torch

        self._engine = engine
        self._codec = codec
        self._settings = settings
        self._request = msgspec.convert({"context": "", **fields}, AutocompleteRequest)
        self._is_predicting = self._request.strategy == "predict"
        self._predictor = Predictor(engine)
        self._group_numbers = count()

    def suggest(self, context: str, seed: int) -> Answer:
        selection = Selection(self._policy(context))
        seeds = range(seed, seed + self._request.n_samples)
        found = self._predict(context, seeds) if self._is_predicting else self._sample(context, seeds)
        for number, done in enumerate(found):
            selection.add(BranchResult(number, seeds[number], 0, "", done, 0.0))
        suggestions = selection.result().suggestions
        return Answer(
            tuple(suggestion.text for suggestion in suggestions),
            NOMINAL_LATENCY_MS,
            tuple(keys for suggestion in suggestions if (keys := suggestion.result.done.usefulness) is not None),
        )

    def continuations(self, context: str, seeds: Sequence[int]) -> list[str]:
        """The text of each seed, as a worker returns it.

        Raises:
            StartError: the engine failed.
        """
        return [done.text for done in self._sample(context, seeds)]

    def _sample(self, context: str, seeds: Sequence[int]) -> list[Done]:
        branches = []
        for number, seed in enumerate(seeds):
            ask = self._ask(context, number, seed)
            engine_request = self._codec.request(ask, time.monotonic())
            branches.append((ask, engine_request, self._engine.submit(engine_request)))
        return [
            _check(self._codec.last_line(ask, engine_request, stream.result()))
            for ask, engine_request, stream in branches
        ]

    def _predict(self, context: str, seeds: Sequence[int]) -> list[Done]:
        group = Group(id=str(next(self._group_numbers)), size=len(seeds))
        with ExitStack() as stack:
            branches = []
            for number, seed in enumerate(seeds):
                prediction = Prediction(
                    rank=number,
                    temperature=self._settings.predict_temperature,
                    is_verbatim=not self._request.clean,
                )
                ask = msgspec.structs.replace(self._ask(context, number, seed), predict=prediction, group=group)
                branches.append(self._predictor.join(ask, self._codec, time.monotonic()))
                stack.callback(branches[-1].cancel)
            return [_check(branch.last_line()) for branch in branches]

    def _ask(self, context: str, number: int, seed: int) -> GenerateRequest:
        request = self._request
        return GenerateRequest(
            prompt=context,
            max_prompt_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
            heal=request.clean,
            sampling=rank_first_token(sampling_of(request), number),
            seed=seed,
            deadline_ms=DEADLINE_MS,
        )

    def _policy(self, context: str) -> SelectionPolicy:
        return SelectionPolicy(
            prompt=context,
            num_suggestions=self._request.n_samples,
            length=self._request.length,
            similarity=self._settings.similarity,
            keeps_greedy_text=self._request.temperature == 0,
            is_verbatim=not self._request.clean,
            min_usefulness=self._settings.min_usefulness if self._is_predicting else None,
        )


def _check(line: Done | Failed) -> Done:
    """
    Raises:
        StartError: the branch failed.
    """
    if isinstance(line, Failed):
        raise StartError(line.detail)
    return line


@contextmanager
def gateway_source(options: Options, fields: Mapping[str, Any], console: Console) -> Iterator[SuggestionSource]:
    """A server of its own, warmed up."""
    with start_server(console, options.models, options.server_settings) as server:
        source = GatewaySource(server.port, fields)
        for seed in range(NUM_WARM_UPS):
            source.suggest("Once upon a time there was", seed)
        yield source


@contextmanager
def engine_source(options: Options, fields: Mapping[str, Any]) -> Iterator[EngineSource]:
    """An engine in this process."""
    with running_engine(options) as (engine, codec):
        yield EngineSource(engine, codec, options.load_settings(), fields)
