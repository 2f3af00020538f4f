"""One slot's service: a model with its engine and codec, from loading to draining.

`SlotService` takes a `GenerateRequest`, returns the protocol's lines for it, and publishes the slot's `State`. It knows
no HTTP, no gunicorn and no environment: `workers.app` is its HTTP face, and any other host process can hold it as well.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
from msgspec import structs

from shared.errors import InvalidRequest, NotReady, PromptTooLong, SlotFull, StartError
from shared.masters.leases import MANY_FAILURES
from shared.plan import Model, Slot
from shared.process import proportional_set_size
from shared.protocol import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    Accepted,
    GenerateLine,
    GenerateRequest,
    State,
    TokenizeRequest,
)
from shared.tracing import Tracing
from shared.version import tercet_version
from workers.checkpoints.files import check_revision, inspect
from workers.checkpoints.int8_check import cached_int8_check
from workers.checkpoints.typography_check import measured_typography
from workers.codec import Codec
from workers.engine.core import ScoreFn
from workers.engine.cpu.weight_file import shared_model
from workers.engine.cpu_kernels import load_kernels
from workers.engine.devices import device_bytes
from workers.engine.engine import DEVICE_RUNNERS, Engine, EngineConfig, RunnerFactory
from workers.engine.failure_policy import restart_pause_s
from workers.engine.failures import (
    ContextExceeded,
    EngineFailure,
    EngineFull,
    EngineNotReady,
    InvalidPrompt,
    LoadFailure,
)
from workers.engine.loader import LoadedModel, load_model, random_model
from workers.engine.request import EngineRequest, SequenceOutput
from workers.engine.sequence import ResultStream
from workers.gap_filler import GapBranch, GapFiller
from workers.predictor import Predictor
from workers.prompt_score import AnyBranch, PriorBranch, scored
from workers.respelling import RespelledBranch, plain_request
from workers.text.tokenizer import Tokenizer
from workers.text.typography import MARK, Typography
from workers.tokenizing import Tokenization, TokenizingTurn

STATE_PERIOD_S = 0.5
# `accepted` waits so long for the first output that both leave in one send: each send wakes the gateway's thread.
ACCEPTED_DELAY_S = 0.05
# The memory is read again after this time, while the model is loading and later. The kernel walks the process's page
# tables for it, which takes milliseconds where the process has some GB.
MEMORY_PERIOD_S, WARM_MEMORY_PERIOD_S = 0.5, 10.0
_DIED = (
    "{} workers in a row ended before they had loaded {}; the log of the workers says how. One that was killed "
    "(SIGKILL) probably lacked memory: serve fewer or smaller models, or lower TERCET_MAX_BATCH."
)
log = structlog.get_logger()


class SlotService:
    """The model of one slot, ready to generate once `start` has loaded it. Thread-safe."""

    def __init__(
        self,
        slot: Slot,
        model: Model,
        config: EngineConfig,
        measurements: Path | None,
        *,
        weights: Path | None = None,
        is_only_worker: bool = True,
        runners: RunnerFactory = DEVICE_RUNNERS,
        on_fatal: Callable[[EngineFailure], None],
        tracing: Tracing | None = None,
        accepted_delay_s: float = ACCEPTED_DELAY_S,
    ) -> None:
        """Loads nothing and starts no thread.

        Args:
            measurements: the directory in which `workers.checkpoints.measured` keeps its results; None keeps none.
            weights: the directory of the file with which workers of this model share int8 weights on a CPU; None keeps
                them in private memory.
            is_only_worker: no other worker has this model.
            runners: makes the engine's runner.
            on_fatal: called once, from any thread, with a failure from which the service cannot recover: a device that
                returned an error may compute the next request wrongly, so the host ends the process.
            tracing: records requests that have a `traceparent`. None: none.
            accepted_delay_s: how long `Accepted` may wait for the first output; the gateway must wait longer for it.
        """
        self.slot = slot
        self._model = model
        self._config = config
        self._measurements = measurements
        self._weights, self._is_only_worker = weights, is_only_worker
        self._tracing = tracing
        self._accepted_delay_s = accepted_delay_s
        self._age = 0
        self._read_counts: Callable[[], dict[str, float]] = dict
        self._read_certificate_expiry: Callable[[], float] = float
        self._on_change: Callable[[], None] = lambda: None
        self._is_draining = threading.Event()
        self._codec: Codec | None = None
        self._changed = threading.Condition()
        # Guarded by `_changed`.
        self._version = 0
        self._counters: Counter[str] = Counter()
        self._num_state_streams = 0
        self._memory_bytes = 0
        self._memory_read_at = float("-inf")
        self._memory_is_of_warm = False
        self._typography = Typography()
        self._engine = Engine(
            config,
            self._load,
            runners=runners,
            on_warm_up=self._measure,
            on_change=self._announce,
            on_fatal=on_fatal,
        )
        self._predictor = Predictor(self._engine)
        self._tokenizing = TokenizingTurn()

    def start(
        self,
        *,
        age: int = 0,
        num_failures: int = 0,
        read_counts: Callable[[], dict[str, float]] = dict,
        read_certificate_expiry: Callable[[], float] = float,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Start loading, in the engine's thread.

        Args:
            age: the worker's gunicorn age; reported in `State`.
            num_failures: workers of this slot that died before they were warm, in a row; loading backs off accordingly.
            read_counts: what the host counts of this slot over all its processes; reported in `State.counters`.
            read_certificate_expiry: the value of `State.certificate_expires_at`.
            on_change: called, from any thread, when the state has changed.
        """
        self._age = age
        self._read_counts, self._on_change = read_counts, on_change
        self._read_certificate_expiry = read_certificate_expiry
        pause_s = restart_pause_s(num_failures)
        if pause_s:
            # Earlier processes died while loading (out of memory, a driver fault). gunicorn respawns without pause.
            log.warning("load_delayed", slot=self.slot.index, failures=num_failures, pause_s=pause_s)
        has_failed = num_failures >= MANY_FAILURES
        self._engine.start(pause_s, _DIED.format(num_failures, self._model.name) if has_failed else "")

    def submit(self, request: GenerateRequest) -> AnyBranch:
        """Queue a sequence; its deadline counts from this call.

        Raises:
            InvalidRequest: this model can never serve the request; `PromptTooLong` if its context is too short for it.
            NotReady: the model is not loaded yet, or the slot drains.
            SlotFull: `max_batch` sequences are in the engine.
        """
        started_at, now = time.time(), time.monotonic()
        codec = self._loaded_codec()
        has_marks = MARK.search(request.prompt or "") or MARK.search(request.suffix)
        plain = plain_request(request, self._typography) if has_marks else request
        try:
            branch = self._branch(plain, codec, started_at, now)
            if plain.score_last:
                branch = scored(branch, plain, self._engine, codec, now)
        except EngineFull as error:
            raise SlotFull(str(error)) from error
        except EngineNotReady as error:
            raise NotReady(str(error)) from error
        except ContextExceeded as error:
            remedy = "shorten the prompt" + ", or lower max_new_tokens" * (request.sampling.max_new_tokens > 0)
            raise PromptTooLong(f"Too many tokens: {error}; {remedy}.") from error
        except InvalidPrompt as error:
            raise InvalidRequest(str(error)) from error
        if plain is request:
            return branch
        before = request.prompt or ""
        return RespelledBranch(branch, self._typography.spelling(before + request.suffix), before)

    def _branch(self, request: GenerateRequest, codec: Codec, started_at: float, now: float) -> AnyBranch:
        if request.predict is not None:
            return self._predictor.join(request, codec, now, partial(self._finish, request, started_at))
        if request.suffix:
            request = structs.replace(request, stream=False)
        engine_request = codec.request(request, now)
        results = self._engine.submit(engine_request)
        on_finish = partial(self._finish, request, started_at, engine_request)
        if request.suffix:
            filler = GapFiller(self._engine, codec, request, engine_request)
            return GapBranch(request, engine_request, results, codec, filler, on_finish)
        branch = Branch(request, engine_request, results, codec, on_finish, self._accepted_delay_s)
        return PriorBranch(branch, self._engine, engine_request) if request.score_prior else branch

    def tokenize(self, request: TokenizeRequest) -> Tokenization:
        """Begin to tokenize a text of any length. Its result is computed in the caller's thread, beside the engine.

        Raises:
            NotReady: the model is not loaded yet.
            SlotFull: another text is being tokenized.
        """
        return self._tokenizing.take(self._loaded_codec(), request.text)

    def _loaded_codec(self) -> Codec:
        if self._codec is None:
            raise NotReady("The slot's model is not loaded yet.")
        return self._codec

    @property
    def is_warm(self) -> bool:
        return self._engine.status().state == "warm"

    def state(self) -> State:
        status = self._engine.status()
        self._read_memory(is_warm=status.state == "warm")
        return State(
            state="draining" if self._is_draining.is_set() else status.state.value,
            reason=status.reason,
            progress=status.progress,
            model=self._model.name,
            device=self.slot.device,
            dtype=status.dtype,
            kernels=status.kernels,
            revision=self._model.revision,
            max_batch=self.slot.max_batch,
            n_ctx=status.n_ctx,
            vocab_size=self._model.vocab_size,
            num_gateways=self._num_state_streams,
            in_flight=status.num_running + status.num_waiting,
            ms_per_token=status.ms_per_token,
            memory_bytes=self._memory_bytes,
            pid=os.getpid(),
            age=self._age,
            version=tercet_version(),
            protocol=PROTOCOL,
            oldest_protocol=OLDEST_PROTOCOL,
            certificate_expires_at=self._read_certificate_expiry(),
            counters={
                **self._counters,
                **{f"failures.{kind}": number for kind, number in status.failures.items()},
                **self._read_counts(),
            },
        )

    def _read_memory(self, *, is_warm: bool) -> None:
        now = time.monotonic()
        period_s = WARM_MEMORY_PERIOD_S if is_warm else MEMORY_PERIOD_S
        if is_warm != self._memory_is_of_warm or now - self._memory_read_at >= period_s:
            self._memory_is_of_warm, self._memory_read_at = is_warm, now
            with suppress(OSError):  # macOS does not say
                self._memory_bytes = proportional_set_size() if self._config.device == "cpu" else device_bytes()

    def states(self) -> Iterator[State]:
        """The current state, then each change of it, and at least one line per 0.5 s; ends with `draining`."""
        version = -1
        self._count_state_stream(1)
        try:
            while True:
                with self._changed:
                    if self._version == version and not self._is_draining.is_set():
                        self._changed.wait(STATE_PERIOD_S)
                    version = self._version
                state = self.state()
                yield state
                if state.state == "draining":
                    return
        finally:
            self._count_state_stream(-1)

    def _count_state_stream(self, change: int) -> None:
        """Each gateway has one, so the others get to know that they share the batch with one more, or one less."""
        with self._changed:
            self._num_state_streams += change
        self._announce()

    def announce_drain(self) -> None:
        """Report `draining`, so that the gateway places no more branches here. Requests are still accepted."""
        self._is_draining.set()
        self._announce()

    def drain(self, grace_s: float) -> None:
        """Refuse new requests, end the state streams, and give running sequences `grace_s` to finish.

        Returns at once.
        """
        self.announce_drain()
        self._engine.stop(grace_s, waits=False)

    def close(self) -> bool:
        """Cancel what still runs and stop the engine's thread.

        Returns:
            False if the thread still runs, because it is loading the model. An interpreter that exits while a thread is
            inside torch aborts, so the host then has to end the process with `os._exit`.
        """
        self._engine.stop(0.0)
        return not self._engine.is_running

    def _finish(
        self, request: GenerateRequest, started_at: float, engine_request: EngineRequest, output: SequenceOutput
    ) -> None:
        """Count and log a branch that has ended."""
        num_prompt_tokens = len(engine_request.prompt_ids)
        with self._changed:
            self._counters[f"sequences.{output.finish_reason}"] += 1
            self._counters["prompt_tokens"] += num_prompt_tokens
            self._counters["cached_tokens"] += output.cached_tokens
            self._counters["generated_tokens"] += len(output.token_ids)
        log.debug(
            "branch_finished",
            slot=self.slot.index,
            request_id=request.request_id,
            seed=request.seed,
            started_at=round(started_at, 4),
            first_token_at=_to_wall_clock(output.first_token_at),
            ended_at=_to_wall_clock(output.ended_at),
            prompt_tokens=num_prompt_tokens,
            cached_tokens=output.cached_tokens,
            tokens=len(output.token_ids),
            finish_reason=output.finish_reason,
        )
        self._trace(request, started_at, num_prompt_tokens, output)

    def _trace(
        self, request: GenerateRequest, started_at: float, num_prompt_tokens: int, output: SequenceOutput
    ) -> None:
        """Record a branch that has ended: a span for it, and one for each of its phases that began."""
        if self._tracing is None or not request.traceparent:
            return
        span = self._tracing.start(
            "generate",
            request.traceparent,
            "server",
            at_s=started_at,
            slot=self.slot.index,
            device=self.slot.device,
            prompt_tokens=num_prompt_tokens,
            cached_tokens=output.cached_tokens,
            tokens=len(output.token_ids),
            finish_reason=output.finish_reason,
        )
        phases = {"queue": output.queue_ms, "prefill": output.prefill_ms, "decode": output.decode_ms}
        ends_at = time.time() if output.ended_at is None else time.time() - time.monotonic() + output.ended_at
        begins_at = ends_at - sum(phases.values()) / 1e3
        for name, ms in phases.items():
            phase = self._tracing.start(name, span.traceparent, at_s=begins_at)
            begins_at += ms / 1e3
            phase.end(at_s=begins_at)
        span.end(output.failure.kind if output.failure else None)

    def _announce(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()
        self._on_change()

    def _load(self, progress: Callable[[float], None]) -> LoadedModel:
        start = time.monotonic()
        # In the engine's thread, which retries: an exception at the start of a worker would halt its master.
        self._check_files()
        tokenizer = Tokenizer.from_directory(Path(self._model.directory), self._model.vocab_size)
        make = (
            partial(random_model, "medium" if self._model.name == "synthetic:medium" else "small")
            if self._model.source == "synthetic"
            else partial(load_model, Path(self._model.directory))
        )
        dtype = self._choose_dtype(tokenizer)
        is_on_cpu = self._config.device == "cpu"
        kernels = load_kernels(self._config.instruction_set) if is_on_cpu else None
        load = partial(
            make, device=self._config.device, dtype=dtype, progress=progress, tokenizer=tokenizer, kernels=kernels
        )
        if self._weights is not None and is_on_cpu and dtype in {"auto", "int8"}:
            name, revision = self._model.name, self._weights_revision(tokenizer)
            shared = shared_model(self._weights, name, revision, load, kernels, is_only_worker=self._is_only_worker)
            loaded = replace(shared, tokenizer=tokenizer)
        else:
            loaded = load()
        assert loaded.healing is not None
        self._codec = Codec(loaded.healing, loaded.config.n_positions)
        log.info(
            "model_loaded", slot=self.slot.index, model=self._model.name, seconds=round(time.monotonic() - start, 2)
        )
        return loaded

    def _measure(self, score: ScoreFn) -> None:
        """Before the engine serves, in its thread: what has to be known of the model."""
        if self._model.source != "synthetic":  # random weights know nothing
            directory, tokenizer = Path(self._model.directory), self._loaded_codec().tokenizer
            self._typography = measured_typography(directory, tokenizer, score, self._measurements)

    def _weights_revision(self, tokenizer: Tokenizer) -> str:
        """What the weights are made from: the checkpoint's weights, `config.json`, and the ids without a token."""
        if self._model.source == "synthetic":
            return self._model.name
        config = (Path(self._model.directory) / "config.json").read_bytes()
        return f"{self._model.revision} {hashlib.sha256(config).hexdigest()} {tokenizer.unused_ids or ''}"

    def _check_files(self) -> None:
        """Check the checkpoint again: its files may have changed since the plan was made."""
        if self._model.source == "synthetic":
            return
        directory = Path(self._model.directory)
        try:
            inspect(directory)
            check_revision(directory, self._model.revision)
        except StartError as error:
            raise LoadFailure(str(error)) from error

    def _choose_dtype(self, tokenizer: Tokenizer) -> str:
        """The configured dtype; for `auto` on a CPU, the one that `int8_check` chooses for this checkpoint."""
        is_open = self._config.dtype == "auto" and self._config.device == "cpu"
        # A test measures the embedded checkpoint in int8, whose bits are the same on every CPU; random weights have no
        # quality to lose.
        if not is_open or self._model.source in {"embedded", "synthetic"}:
            return self._config.dtype
        check = cached_int8_check(Path(self._model.directory), tokenizer, self._measurements)
        dtype, bf16_problem = check.choose_dtype()
        if dtype != "int8":
            ratio = round(check.ratio, 4)
            log.warning("int8_rejected", model=self._model.name, ratio=ratio, dtype=dtype, bf16_problem=bf16_problem)
        return dtype


@dataclass(slots=True, eq=False)
class Branch:
    """A submitted request. Iterate over it, then `close` it; `cancel` may be called from any thread."""

    request: GenerateRequest
    engine_request: EngineRequest
    results: ResultStream
    codec: Codec
    on_finish: Callable[[SequenceOutput], None]
    accepted_delay_s: float

    def __iter__(self) -> Iterator[list[GenerateLine]]:
        """Batches of lines: first `Accepted`, then tokens as they are generated, last `Done` or `Failed`.

        Lines that are there at the same time are one batch, so that they cost their reader one send. `Accepted` is in a
        batch of its own only if nothing follows within the delay that the service allows.
        """
        lines: list[GenerateLine] = [Accepted()]
        output = self.results.next(self.accepted_delay_s)
        if output is None:
            yield lines
            lines = []
            output = self.results.next()
        stream = self.codec.token_stream(self.request, self.engine_request) if self.request.stream else None
        while not isinstance(output, SequenceOutput):
            assert output is not None  # without a timeout
            assert stream is not None  # tokens are delivered of streamed requests only
            if (line := stream.feed(output)) is not None:
                lines.append(line)
            if lines and not self.results.has_more:
                yield lines
                lines = []
            output = self.results.next()
        yield [*lines, self.codec.last_line(self.request, self.engine_request, output)]

    def cancel(self) -> None:
        """End the sequence after at most one more decode step."""
        self.results.cancel()

    def close(self) -> None:
        """Cancel the sequence if it still runs, wait for its end, count it and log it. To be called once."""
        self.results.cancel()
        self.on_finish(self.results.result())


def _to_wall_clock(monotonic_s: float | None) -> float | None:
    """A time of `time.monotonic()` as a time of `time.time()`, in seconds."""
    return None if monotonic_s is None else round(time.time() - time.monotonic() + monotonic_s, 4)
