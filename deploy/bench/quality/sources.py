"""Where `tercet bench typist` gets suggestions from: the gateway, or an engine in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
from rich.console import Console

from deploy.bench.harness.clients import LOOPBACK, Connection
from deploy.bench.harness.options import Options
from deploy.bench.harness.run import start_server
from deploy.bench.quality.keystrokes import Answer
from gateway.api.autocomplete import DEFAULT_MAX_TOKENS, sampling_of
from gateway.api.schema import AutocompleteRequest
from gateway.generation.request import BranchResult, rank_first_token
from gateway.generation.selection import Selection, SelectionPolicy
from shared.errors import StartError
from shared.protocol import Failed, GenerateRequest
from shared.settings import Settings
from workers.checkpoints.resolve import resolve
from workers.codec import Codec
from workers.engine.request import EngineRequest
from workers.engine.result_stream import ResultStream
from workers.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from workers.engine.engine import Engine

MAX_WRITERS = 16  # contexts that the engine gets at once
NUM_WARM_UPS = 10
# A connection that was idle, or a machine with other load. The latency is that of the last attempt.
RETRIED = {0, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
RETRY_WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0)
NOMINAL_LATENCY_MS = 1.0  # of the engine's answers: they arrive after the key that requested them, before the next
MAX_BRANCHES = 8  # of a request
_Branch: TypeAlias = tuple[GenerateRequest, EngineRequest, ResultStream]


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
        return Answer(tuple(sentence["value"] for sentence in sentences), done.ms)

    def close(self) -> None:
        """Close the calling thread's connection."""
        self._thread.connection.__exit__()


class EngineSource:
    """An engine and the gateway's selection; no HTTP, measured latencies or top-up branches."""

    def __init__(self, engine: Engine, codec: Codec, fields: Mapping[str, Any]) -> None:
        self._engine = engine
        self._codec = codec
        self._request = msgspec.convert({"context": "", **fields}, AutocompleteRequest)

    def suggest(self, context: str, seed: int) -> Answer:
        return Answer(tuple(self._select(context, self._submit(context, seed))), NOMINAL_LATENCY_MS)

    def _submit(self, context: str, seed: int) -> list[_Branch]:
        request = self._request
        branches = []
        for number in range(request.n_samples):
            ask = GenerateRequest(
                prompt=context, max_prompt_tokens=request.max_tokens or DEFAULT_MAX_TOKENS, heal=True,
                sampling=rank_first_token(sampling_of(request), number), seed=seed + number, deadline_ms=1e9,
            )  # fmt: skip
            engine_request = self._codec.request(ask, time.monotonic())
            branches.append((ask, engine_request, self._engine.submit(engine_request)))
        return branches

    def _select(self, context: str, branches: Sequence[_Branch]) -> list[str]:
        request = self._request
        selection = Selection(
            SelectionPolicy(
                context, request.n_samples, request.length, Settings.load({}).similarity, request.temperature == 0
            )
        )
        for number, (ask, engine_request, stream) in enumerate(branches):
            done = self._codec.last_line(ask, engine_request, stream.result())
            if isinstance(done, Failed):
                raise StartError(done.detail)
            selection.add(BranchResult(number, ask.seed, 0, "", done, 0.0))
        return [suggestion.text for suggestion in selection.result().suggestions]


@contextmanager
def gateway_source(options: Options, fields: Mapping[str, Any], console: Console) -> Iterator[SuggestionSource]:
    """A server of its own, warmed up."""
    with start_server(console, options.models, options.server_settings) as server:
        source = GatewaySource(server.port, fields)
        for seed in range(NUM_WARM_UPS):
            source.suggest("Once upon a time there was", seed)
        yield source


@contextmanager
def engine_source(options: Options, fields: Mapping[str, Any]) -> Iterator[SuggestionSource]:
    """An engine in this process."""
    with running_engine(options) as (engine, codec):
        yield EngineSource(engine, codec, fields)


@contextmanager
def running_engine(options: Options) -> Iterator[tuple[Engine, Codec]]:
    """A warm engine in this process, with room for `MAX_WRITERS` requests of `MAX_BRANCHES` branches."""
    from workers.engine.engine import Engine, EngineConfig  # imports torch, which the gateway's source does without
    from workers.engine.loader import load_model

    [spec] = options.load_settings().models
    checkpoint = resolve(spec.name, spec.source)
    directory = Path(checkpoint.directory)
    tokenizer = Tokenizer.from_directory(directory, checkpoint.vocab_size)
    loaded = load_model(directory, dtype=options.settings.get("dtype", "int8"), tokenizer=tokenizer)
    fatal: list[BaseException] = []
    config = EngineConfig(max_batch=MAX_WRITERS * MAX_BRANCHES, num_threads=options.num_threads, hang_s=0)
    engine = Engine(config, lambda _: loaded, on_fatal=fatal.append)
    engine.start()
    while engine.status().state not in {"warm", "failed"}:
        time.sleep(0.01)
    try:
        yield engine, Codec(tokenizer, loaded.config.n_positions)
    finally:
        engine.stop(0)
