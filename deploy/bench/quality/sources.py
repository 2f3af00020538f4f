"""Where `tercet bench typist` gets suggestions from: the gateway, or an engine in this process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

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
from shared.plan import Model, Slot
from shared.protocol import Done, GenerateRequest, Group, Prediction
from shared.settings import Settings
from shared.telemetry import configure_structlog
from workers.checkpoints.resolve import resolve

if TYPE_CHECKING:
    from workers.service import SlotService

MAX_WRITERS = 16  # contexts that the engine gets at once
NUM_WARM_UPS = 10
# A connection that was idle, or a machine with other load. The latency is that of the last attempt.
RETRIED = {0, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
RETRY_WAITS_S = (0.0, 1.0, 2.0, 4.0, 8.0)
NOMINAL_LATENCY_MS = 1.0  # of the engine's answers: they arrive after the key that requested them, before the next
MAX_BRANCHES = 8  # of a request
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
        return Answer(tuple(sentence["value"] for sentence in sentences), done.ms)

    def close(self) -> None:
        """Close the calling thread's connection."""
        self._thread.connection.__exit__()


class EngineSource:
    """A worker's service in this process, and the gateway's selection; no HTTP, measured latencies or top-up branches.

    Without top-ups, samples differ from the gateway's where it replaces a rejected one; predictions never do.
    """

    def __init__(self, service: SlotService, settings: Settings, fields: Mapping[str, Any]) -> None:
        """
        Args:
            service: warm.
            settings: of the gateway that this stands for.
            fields: of each request, as in `POST /autocomplete`.
        """
        self._service = service
        self._settings = settings
        self._request = msgspec.convert({"context": "", **fields}, AutocompleteRequest)
        self._is_predicting = self._request.strategy == "predict"
        self._group_numbers = count()

    def suggest(self, context: str, seed: int) -> Answer:
        selection = Selection(self._policy(context))
        asks = self._asks(context, seed)
        with ExitStack() as stack:
            # All are submitted before the first is awaited: siblings share their prompt, and predictions their search.
            branches = [stack.enter_context(closing(self._service.submit(ask))) for ask in asks]
            for number, (ask, branch) in enumerate(zip(asks, branches, strict=True)):
                *_, [done] = branch
                if not isinstance(done, Done):
                    raise StartError(f"A branch failed in the engine: {done}.")
                selection.add(BranchResult(number, ask.seed, 0, "", done, 0.0))
        return Answer(tuple(suggestion.text for suggestion in selection.result().suggestions), NOMINAL_LATENCY_MS)

    def _asks(self, context: str, seed: int) -> list[GenerateRequest]:
        request, sampling = self._request, sampling_of(self._request)
        group = Group(id=str(next(self._group_numbers)), size=request.n_samples)
        temperature = self._settings.predict_temperature
        return [
            GenerateRequest(
                prompt=context,
                max_prompt_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
                heal=request.clean,
                sampling=rank_first_token(sampling, number),
                predict=Prediction(rank=number, temperature=temperature, is_verbatim=not request.clean)
                if self._is_predicting
                else None,
                seed=seed + number,
                deadline_ms=DEADLINE_MS,
                group=group,
            )
            for number in range(request.n_samples)
        ]

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
    """An engine in this process, on the CPU.

    Raises:
        StartError: it does not get warm.
    """
    from workers.engine.engine import EngineConfig  # imports torch, which the gateway's source does without
    from workers.service import SlotService

    settings = options.load_settings()
    [spec] = settings.models
    checkpoint = resolve(spec.name, spec.source)
    model = Model(checkpoint.name, checkpoint.directory, checkpoint.source, checkpoint.n_ctx, checkpoint.vocab_size)
    max_batch = MAX_WRITERS * MAX_BRANCHES
    config = EngineConfig(dtype=settings.dtype, max_batch=max_batch, num_threads=options.num_threads, hang_s=0)
    slot = Slot(index=0, device="cpu", model=model.name, socket="", max_batch=max_batch)
    configure_structlog("bench", "error")  # the service logs every branch
    service = SlotService(slot, model, config, int8_results=None, on_fatal=lambda _: None)
    service.start()
    while (state := service.state()).state not in {"warm", "failed"}:
        time.sleep(0.01)
    if state.state == "failed":
        raise StartError(f"The engine could not load its model: {state.reason}")
    try:
        yield EngineSource(service, settings, fields)
    finally:
        service.close()
