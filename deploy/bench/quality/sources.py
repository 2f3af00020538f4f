"""Where `tercet bench typist` gets suggestions from: the gateway, or an engine in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import httpx
import msgspec
from rich.console import Console

from deploy.bench.harness.options import Options
from deploy.bench.harness.run import start_server
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

BATCH = 16  # contexts that the engine gets at once
MAX_BRANCHES = 8  # of a request
_Branch: TypeAlias = tuple[GenerateRequest, EngineRequest, ResultStream]


class SuggestionSource(Protocol):
    """Suggests continuations."""

    def suggest(self, contexts: Sequence[str], seeds: Sequence[int]) -> list[tuple[list[str], float]]:
        """For each context: its sentences, best first, and the latency in milliseconds."""


class GatewaySource:
    """The gateway, one request after another, so that the latencies are those of a single writer."""

    def __init__(self, client: httpx.Client, fields: Mapping[str, Any]) -> None:
        """
        Args:
            fields: of each request, as in `POST /autocomplete`.
        """
        self._client = client
        self._fields = fields

    def suggest(self, contexts: Sequence[str], seeds: Sequence[int]) -> list[tuple[list[str], float]]:
        answers = []
        for context, seed in zip(contexts, seeds, strict=True):
            start = time.perf_counter()
            response = self._client.post("/autocomplete", json={"context": context, "seed": seed, **self._fields})
            ms = 1e3 * (time.perf_counter() - start)
            answers.append(([found["value"] for found in response.json().get("sentences", [])], ms))
        return answers


class EngineSource:
    """An engine with many contexts in its batch, and the gateway's selection; no HTTP, latencies or top-up branches."""

    def __init__(self, engine: Engine, codec: Codec, fields: Mapping[str, Any]) -> None:
        self._engine = engine
        self._codec = codec
        self._request = msgspec.convert({"context": "", **fields}, AutocompleteRequest)

    def suggest(self, contexts: Sequence[str], seeds: Sequence[int]) -> list[tuple[list[str], float]]:
        submitted = [self._submit(context, seed) for context, seed in zip(contexts, seeds, strict=True)]
        return [(self._select(context, branches), 0.0) for context, branches in zip(contexts, submitted, strict=True)]

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
    with (
        start_server(console, options.models, options.server_settings) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        source = GatewaySource(client, fields)
        source.suggest(["Once upon a time there was"] * 10, range(10))
        yield source


@contextmanager
def engine_source(options: Options, fields: Mapping[str, Any]) -> Iterator[SuggestionSource]:
    """An engine in this process."""
    from workers.engine.engine import Engine, EngineConfig  # imports torch, which the gateway's source does without
    from workers.engine.loader import load_model

    [spec] = options.load_settings().models
    checkpoint = resolve(spec.name, spec.source)
    directory = Path(checkpoint.directory)
    tokenizer = Tokenizer.from_directory(directory, checkpoint.vocab_size)
    loaded = load_model(directory, dtype=options.settings.get("dtype", "int8"), tokenizer=tokenizer)
    fatal: list[BaseException] = []
    config = EngineConfig(max_batch=BATCH * MAX_BRANCHES, num_threads=options.num_threads, hang_s=0)
    engine = Engine(config, lambda _: loaded, on_fatal=fatal.append)
    engine.start()
    while engine.status().state not in {"warm", "failed"}:
        time.sleep(0.01)
    try:
        yield EngineSource(engine, Codec(tokenizer, loaded.config.n_positions), fields)
    finally:
        engine.stop(0)
