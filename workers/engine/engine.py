"""The engine: a thread that owns the device, and a queue that any thread may submit requests to.

Loads the model, runs `EngineCore.step` while there are sequences, and watches that neither hangs. Knows threads, time
and states. Does not know how a step is scheduled or computed, which failures it survives (`failure_policy` decides),
text (stop strings and forced prefixes are the sequences' business), HTTP, or what a request is for.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from workers.engine.core import EngineCore, Runner, ScoreFn, prompt_logprobs
from workers.engine.cpu.runner import CpuRunner
from workers.engine.cpu.team import Interrupt
from workers.engine.cuda.runner import CudaRunner
from workers.engine.devices import release_memory
from workers.engine.failure_policy import StepFailures, Watchdog, load_hang, load_pauses
from workers.engine.failures import (
    EngineFailure,
    EngineFull,
    EngineNotReady,
    EngineStopped,
    Hang,
)
from workers.engine.foreign_errors import load_failure, step_failure
from workers.engine.loader import LoadedModel, ProgressFn
from workers.engine.request import EngineRequest, SamplingParams
from workers.engine.scheduler import MAX_CHUNK_WITH_ROWS, MAX_CPU_CHUNK_WITH_ROWS, Scheduler
from workers.engine.sequence import ResultStream, Sequence

log = structlog.get_logger()

WARM_UP_PROMPT_TOKENS = 16
WARM_UP_TOKENS = 4
# Weight of the latest step in the moving average of the time per step: about 20 steps contribute.
SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs. Validated by the caller."""

    device: str = "cpu"
    dtype: str = "auto"  # auto, fp32, bf16, fp16 or int8
    max_batch: int = 48  # sequences running and waiting, together
    cache_bytes: int | None = None  # of the KV cache; None takes a share of the free memory
    # Held while a worker allocates and captures, so that workers of a GPU do not measure each other's halves.
    allocation_lock: Callable[[], AbstractContextManager[object]] = nullcontext
    hang_s: float = 10.0  # a step that takes longer ends the process; 0 disables the watchdog
    load_s: float = 0.0  # loading and warming up that take longer end the process; 0 disables this deadline
    num_threads: int | None = None  # of torch; None leaves torch's setting unchanged
    instruction_set: str | None = None  # of the CPU kernels (`shared.cpu_features`); None: the CPU's best


class EngineState(enum.StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    WARM = "warm"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot of the engine."""

    state: EngineState
    reason: str | None  # of a failure: one sentence
    progress: float  # of loading, 0 to 1
    num_running: int
    num_waiting: int
    ms_per_token: float  # wall time per decode step, moving average; 0 until warm
    n_ctx: int
    dtype: str  # of the loaded model; the configured one until then
    kernels: str  # of a GPU, and whether steps are CUDA graphs; empty on a CPU and until loaded
    failures: dict[str, int]  # since the start, by `EngineFailure.kind`


class RunnerFactory:
    """Makes an engine's runner. Tests pass a factory whose runners are slow or fail."""

    def make(self, loaded: LoadedModel, config: EngineConfig, interrupt: Interrupt) -> Runner:
        """The runner for the model's device. A GPU's steps cannot be interrupted: what is launched runs to its end."""
        if loaded.device == "cpu":
            return CpuRunner(loaded, config.max_batch, interrupt, config.cache_bytes)
        return CudaRunner(loaded, config.max_batch, config.cache_bytes)

    def serving(self, runner: Runner) -> Runner:
        """The runner that serves requests, once `runner` is warm."""
        return runner


DEVICE_RUNNERS = RunnerFactory()


class Engine:
    """One model on one device. Any thread may submit requests."""

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[ProgressFn], LoadedModel],
        *,
        runners: RunnerFactory = DEVICE_RUNNERS,
        on_warm_up: Callable[[ScoreFn], None] = lambda _: None,
        on_change: Callable[[], None] = lambda: None,
        on_fatal: Callable[[EngineFailure], None],
    ) -> None:
        """
        Args:
            load: makes the model; called in the engine's thread, and again after a pause if it raises. Nothing that
                an attempt has made may be referenced when the next begins.
            on_warm_up: called in the engine's thread before the engine serves; may measure the model.
            on_change: called in the engine's thread when the state or the progress changes.
            on_fatal: called once, from any thread, with a failure after which the engine serves no more requests.
        """
        self._config = config
        self._load = load
        self._runners = runners
        self._on_warm_up = on_warm_up
        self._on_change = on_change
        self._on_fatal = on_fatal
        self._lock = threading.Condition()
        # Guarded by the lock.
        self._incoming: deque[Sequence] = deque()
        self._num_left: dict[Sequence, list[int]] = {}  # unfinished sequences of its group, shared by the group
        self._num_groups = 0
        self._num_running = 0
        self._state = EngineState.STARTING
        self._reason: str | None = None
        self._progress = 0.0
        self._drain_until: float | None = None
        self._failures: Counter[str] = Counter()
        # Written by the engine's thread only.
        self._loaded: LoadedModel | None = None
        self._core: EngineCore | None = None
        self._ms_per_token = 0.0
        self._kernels = ""
        self._step_failures = StepFailures()
        self._watchdog = Watchdog(config.hang_s, lambda: self._end_hang(Hang()))
        self._load_watchdog = Watchdog(config.load_s, lambda: self._end_hang(load_hang(config.load_s)))
        self._first_pause_s, self._first_failure = 0.0, ""
        self._interrupt = Interrupt()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self, pause_s: float = 0.0, failure: str = "") -> None:
        """Starts the engine's thread, which loads the model.

        Args:
            pause_s: before the first load.
            failure: why the engine counts as failed meanwhile; "": it counts as loading.
        """
        self._first_pause_s, self._first_failure = pause_s, failure
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def start_id(self) -> int:
        """The token that stands for an empty prompt, once the model is loaded."""
        assert self._loaded is not None
        return self._loaded.start_id

    @property
    def num_weights_read(self) -> int:
        """Weights that a step reads on a CPU, once the model is loaded; 0 on a GPU."""
        assert self._loaded is not None
        return self._loaded.config.num_weights_read if self._loaded.device == "cpu" else 0

    def submit(self, request: EngineRequest) -> ResultStream:
        """Queues a request for the next step; raises as `submit_group`."""
        return self.submit_group([request])[0]

    def submit_group(self, requests: Items[EngineRequest], *, is_follow_up: bool = False) -> list[ResultStream]:
        """Queues requests that together count as one. Where there are more sequences than rows, they wait for a row.

        Args:
            is_follow_up: they continue the work of a request that was in the engine; there is room for them.

        Raises:
            EngineNotReady: if no model is warm, or the engine drains.
            InvalidPrompt: if this model can never serve a request; `ContextExceeded` if it is too long.
            EngineFull: if `max_batch` groups are in the engine.
        """
        loaded = self._loaded
        if loaded is None or self._state is not EngineState.WARM:
            raise EngineNotReady(f"the engine is {self._state}")
        config = loaded.config
        for request in requests:
            request.check(config.n_positions, config.vocab_size, has_tokenizer=loaded.tokenizer is not None)
        sequences = [
            Sequence(request, ResultStream(on_cancel=self._wake), start_id=loaded.start_id, healing=loaded.healing)
            for request in requests
        ]
        with self._lock:
            if self._state is not EngineState.WARM:
                raise EngineNotReady(f"the engine is {self._state}")
            if self._num_groups >= self._config.max_batch and not is_follow_up:
                raise EngineFull(f"the engine already has {self._config.max_batch} sequences, its maximum")
            self._num_groups += 1
            num_left = [len(sequences)]
            self._num_left |= dict.fromkeys(sequences, num_left)
            self._incoming += sequences
            self._interrupt_step()
        return [sequence.result_stream for sequence in sequences]

    def status(self) -> EngineStatus:
        loaded = self._loaded
        with self._lock:
            return EngineStatus(
                state=self._state,
                reason=self._reason,
                progress=self._progress,
                num_running=self._num_running,
                num_waiting=len(self._num_left) - self._num_running,
                ms_per_token=self._ms_per_token,
                n_ctx=loaded.config.n_positions if loaded else 0,
                dtype=loaded.dtype if loaded else self._config.dtype,
                kernels=self._kernels,
                failures=dict(self._failures),
            )

    def stop(self, grace_s: float, *, waits: bool = True) -> None:
        """Drains the engine: refuses new requests, lets sequences run for `grace_s`, then cancels the rest.

        Returns when the engine's thread has ended; at once without `waits`, or while that thread is in `load`.
        """
        with self._lock:
            self._drain_until = time.monotonic() + grace_s
            was_loading = self._state in (EngineState.STARTING, EngineState.LOADING)
            self._interrupt_step()
        if self._state is not EngineState.FAILED or not was_loading:
            self._set_state(EngineState.DRAINING, self._reason)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(None if waits and not was_loading else 0)

    def _wake(self) -> None:
        with self._lock:
            self._interrupt_step()

    def _interrupt_step(self) -> None:
        """Ends a multi-step decode after its current step, and wakes a waiting engine; the lock is held."""
        self._interrupt.set()
        self._lock.notify()

    # Below: in the engine's thread.

    def _main(self) -> None:
        try:
            core = self._load_with_backoff()
            if core is not None:
                self._serve(core)
        except BaseException as error:  # noqa: BLE001 - callers must learn of any failure
            self._fail(step_failure(error))
        finally:
            self._load_watchdog.disarm()
            self._watchdog.disarm()
            self._finish_all(EngineStopped())

    def _load_with_backoff(self) -> EngineCore | None:
        """A core whose runner is warm, or None if the engine is stopped before that.

        Raises:
            EngineFailure: a failure after which this process must not try again.
        """
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        if self._first_pause_s:
            self._set_state(EngineState.FAILED if self._first_failure else EngineState.LOADING, self._first_failure)
            self._pause_until(time.monotonic() + self._first_pause_s)
        pauses = load_pauses()
        while not self._is_stopping:
            self._set_state(EngineState.LOADING)
            pause_s = next(pauses)
            core = self._try_load(pause_s)
            if core is not None:
                return core
            retry_at = time.monotonic() + pause_s
            # Two models, or two sets of graphs, do not fit where one just fits. Before the pause: other workers of the
            # device may need the memory.
            release_memory()
            self._pause_until(retry_at)
        return None

    def _try_load(self, retry_s: float) -> EngineCore | None:
        """A core whose runner is warm. After a failure None; then this frame, which has ended, held the last references
        to the exception, whose traceback holds the model and the runner.

        Args:
            retry_s: until the next attempt; for the log.

        Raises:
            EngineFailure: as `_load_with_backoff`.
        """
        self._load_watchdog.arm(time.monotonic())
        try:
            loaded = self._load(self._report_progress)
            self._load_watchdog.disarm()  # other workers of the device have deadlines of their own
            with self._config.allocation_lock():
                self._load_watchdog.arm(time.monotonic())
                runner = self._runners.make(loaded, self._config, self._interrupt)
                kernels = runner.kernels if isinstance(runner, CudaRunner) else ""
                max_entry_tokens = runner.max_entry_tokens if isinstance(runner, CpuRunner) else None
                self._warm_up(runner)
                self._on_warm_up(partial(prompt_logprobs, runner, loaded.config.n_positions))
        except BaseException as error:  # any kind of broken file; a panic in Rust is no Exception
            failure = load_failure(error, self._config.device)
            if not failure.is_recoverable:
                raise failure from error
            self._record(failure, retry_s=retry_s)
            self._set_state(EngineState.FAILED, failure.detail)
            return None
        finally:
            self._load_watchdog.disarm()
        runner = self._runners.serving(runner)
        scheduler = Scheduler(
            runner.num_entries,
            self._config.max_batch,
            max_chunk_with_rows=MAX_CPU_CHUNK_WITH_ROWS if loaded.device == "cpu" else MAX_CHUNK_WITH_ROWS,
            max_entry_tokens=max_entry_tokens,
        )
        if loaded.device == "cpu":
            release_memory()  # what only loading needed
        self._core = EngineCore(
            scheduler, runner, eos_ids=loaded.eos_ids, on_finish=self._count_finished, on_failure=self._record
        )
        self._loaded = loaded
        self._kernels = kernels
        self._report_progress(1.0)
        self._set_state(EngineState.WARM)
        return self._core

    def _pause_until(self, time_s: float) -> None:
        """Waits until a time of `time.monotonic()`, less long if the engine is stopped."""
        with self._lock:
            self._lock.wait_for(lambda: self._is_stopping, time_s - time.monotonic())

    def _warm_up(self, runner: Runner) -> None:
        """Runs three short siblings, so that lazy initialisation is over and the time per step is known."""
        core = EngineCore(Scheduler(runner.num_entries, self._config.max_batch), runner, eos_ids=())
        request = EngineRequest((0,) * WARM_UP_PROMPT_TOKENS, SamplingParams(WARM_UP_TOKENS), seed=0)
        for _ in range(min(3, self._config.max_batch)):
            core.scheduler.add(Sequence(request, ResultStream(), start_id=0, healing=None))
        while core.scheduler.sequences:
            timing = core.step()
            assert timing is not None  # they wait for no sibling
            self._ms_per_token = 1e3 * timing.s_per_step

    def _serve(self, core: EngineCore) -> None:
        """Runs steps until the engine has drained."""
        while self._wait_for_sequences(core):
            now = time.monotonic()
            if self._drain_until is not None and now >= self._drain_until:
                core.finish_all("cancelled")
            self._watchdog.arm(now)
            try:
                timing = core.step()
            except BaseException as error:  # noqa: BLE001 - of the device, or of the engine's own code
                self._recover(core, step_failure(error))
                continue
            if timing is None:
                self._wait_for_siblings(core)
                continue
            if timing.failures:
                self._record(self._step_failures.accept_of_sequences(timing.failures, time.monotonic()))
            else:
                self._step_failures.count_first_tokens(timing.num_first_tokens)
            weight = 1 - (1 - SMOOTHING) ** timing.num_steps
            self._ms_per_token += weight * (1e3 * timing.s_per_step - self._ms_per_token)

    def _recover(self, core: EngineCore, failure: EngineFailure) -> None:
        """Continues after a step that failed, without the sequences of its batch and without caches; raises as
        `StepFailures.accept`."""
        self._step_failures.accept(failure)
        self._record(failure)
        core.recover(failure)

    def _wait_for_sequences(self, core: EngineCore) -> bool:
        """Moves submitted sequences into `core`; waits while it has none. False once the engine has drained."""
        with self._lock:
            while not self._incoming and not core.scheduler.sequences:
                if self._is_stopping:
                    return False
                self._watchdog.rest()
                self._num_running = 0
                self._lock.wait()
            self._admit(core)
            self._interrupt.clear()
            self._num_running = core.scheduler.num_running
            return True

    def _admit(self, core: EngineCore) -> None:
        """Moves submitted sequences into `core`; the lock is held."""
        while self._incoming:
            core.scheduler.add(self._incoming.popleft())

    def _wait_for_siblings(self, core: EngineCore) -> None:
        """Waits until another sequence is submitted, or no prefill group waits for siblings any longer."""
        pause_s = core.scheduler.wake_at - time.monotonic()
        with self._lock:
            if not self._incoming and 0 < pause_s < float("inf"):
                self._lock.wait(pause_s)

    def _count_finished(self, sequence: Sequence) -> None:
        with self._lock:
            num_left = self._num_left.pop(sequence)
            num_left[0] -= 1
            self._num_groups -= num_left[0] == 0

    def _finish_all(self, failure: EngineFailure) -> None:
        core = self._core
        if core is None:  # nothing is admitted before the model is loaded
            return
        with self._lock:
            self._admit(core)
        core.finish_all("error", failure)

    def _fail(self, failure: EngineFailure) -> None:
        """Ends all sequences and reports that the device, or the engine itself, can no longer be used."""
        self._record(failure, is_fatal=True)
        self._set_state(EngineState.FAILED, failure.detail)
        self._finish_all(failure)
        self._on_fatal(failure)

    def _end_hang(self, failure: Hang) -> None:
        """Record the hang, in a watchdog's thread. The sequences belong to the engine's thread and stay as they are."""
        self._record(failure, is_fatal=True)
        self._set_state(EngineState.FAILED, failure.detail)
        self._on_fatal(failure)

    def _record(self, failure: EngineFailure, *, is_fatal: bool = False, **fields: object) -> None:
        """Counts and logs a failure, of any kind."""
        with self._lock:
            self._failures[failure.kind] += 1
        log.error(
            "engine_failed", kind=failure.kind, reason=failure.detail, is_fatal=is_fatal, **fields, exc_info=failure
        )

    @property
    def _is_stopping(self) -> bool:
        return self._drain_until is not None

    def _set_state(self, state: EngineState, reason: str | None = None) -> None:
        with self._lock:
            # A draining engine never becomes warm.
            if self._is_stopping and state in (EngineState.LOADING, EngineState.WARM):
                return
            self._state, self._reason = state, reason
        self._on_change()

    def _report_progress(self, progress: float) -> None:
        # In steps of 1 %: a listener does not need every tensor.
        if progress >= 1 or progress >= self._progress + 0.01 or progress < self._progress:
            self._progress = progress
            self._on_change()
