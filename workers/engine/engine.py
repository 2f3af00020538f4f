"""The engine: one thread that owns the device, and a door that any thread may knock at.

`schedule → run → postprocess` is the whole loop. Knows sequences and time. Refuses to know text
(a stop string is bytes to it), HTTP, and why a request was made.
"""

from __future__ import annotations

import enum
import faulthandler
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from workers.engine.cpu.runner import CpuRunner
from workers.engine.cuda.runner import CudaRunner
from workers.engine.interrupt import Interrupt
from workers.engine.model.loader import LoadedModel, ProgressFn
from workers.engine.request import (
    EngineError,
    EngineFull,
    EngineNotReady,
    EngineRequest,
    InvalidPrompt,
    SamplingParams,
)
from workers.engine.result_stream import ResultStream
from workers.engine.runner import RunnerOutput
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Sequence

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineError",
    "EngineFull",
    "EngineNotReady",
    "EngineState",
    "EngineStatus",
    "InvalidPrompt",
    "ResultStream",
]

log = logging.getLogger(__name__)

Runner = CpuRunner | CudaRunner

MAX_BACKOFF_S = 30.0
WARM_UP_TOKENS = 4
# Weight of the newest step in the moving average of a step's time: some 20 steps are remembered.
SMOOTHING = 0.1
# A step may end so long after a sequence's deadline, which whoever asks sets some milliseconds before its own.
LATE_S = 0.01
# Arming the watchdog starts a thread; an eighth of its time is exact enough.
REARM_FRACTION = 8


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs; validated by whoever makes it."""

    device: str = "cpu"
    dtype: str = "auto"  # auto, fp32, bf16, fp16 or int8
    max_batch: int = 48  # sequences running and waiting, together
    hang_s: float = 10.0  # a step that takes longer ends the process; 0 is never
    num_threads: int | None = None  # of torch; None leaves it as it is
    step_delay_s: float = 0.0  # for tests: makes every step slower


class EngineState(enum.StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    WARM = "warm"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine as of now."""

    state: EngineState
    reason: str | None  # why it failed
    progress: float  # of loading, 0 to 1
    num_running: int
    num_waiting: int
    ms_per_token: float  # wall time of a step, moving average; 0 until warm
    max_batch: int
    n_ctx: int
    dtype: str  # the one in effect; the one asked for until loaded


class Engine:
    """One model on one device, behind a queue."""

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[ProgressFn], LoadedModel],
        *,
        on_change: Callable[[], None] = lambda: None,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            load: makes the model; called in the engine's thread, again after a pause if it raises.
            on_change: called, from the engine's thread, when the state or the progress changes.
            on_fatal: called once if the device fails; the engine serves nothing after that.
        """
        self._config = config
        self._load = load
        self._on_change = on_change
        self._on_fatal = on_fatal
        self._lock = threading.Condition()
        # Guarded by the lock; the rest belongs to the engine's thread.
        self._incoming: deque[Sequence] = deque()
        self._num_in_flight = 0
        self._num_running = 0
        self._state = EngineState.STARTING
        self._reason: str | None = None
        self._progress = 0.0
        self._drain_until: float | None = None
        self._loaded: LoadedModel | None = None
        self._ms_per_token = 0.0
        self._decode_run_s = 0.0  # the newest step that computed no prompt
        self._armed_at = float("-inf")
        self._scheduler = Scheduler(1, 1)
        self._interrupt = Interrupt()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the engine's thread, which loads the model."""
        self._thread.start()

    def submit(self, request: EngineRequest) -> ResultStream:
        """Takes a sequence in.

        Raises:
            EngineNotReady: if no model is warm, or the engine drains.
            InvalidPrompt: if this model can never serve the request.
            EngineFull: if `max_batch` sequences are in the engine.
        """
        loaded = self._loaded
        if loaded is None or self._state is not EngineState.WARM:
            raise EngineNotReady(f"the engine is {self._state}")
        problem = _problem(request, loaded)
        if problem is not None:
            raise InvalidPrompt(problem)
        generation = ResultStream(self._wake)
        start_id = loaded.eos_id or 0
        sequence = Sequence(request, generation, start_id=start_id, tokenizer=loaded.tokenizer)
        with self._lock:
            if self._state is not EngineState.WARM:
                raise EngineNotReady(f"the engine is {self._state}")
            if self._num_in_flight >= self._config.max_batch:
                raise EngineFull(f"all {self._config.max_batch} places are taken")
            self._num_in_flight += 1
            self._incoming.append(sequence)
            self._knock()
        return generation

    def status(self) -> EngineStatus:
        loaded = self._loaded
        with self._lock:
            return EngineStatus(
                state=self._state,
                reason=self._reason,
                progress=self._progress,
                num_running=self._num_running,
                num_waiting=self._num_in_flight - self._num_running,
                ms_per_token=self._ms_per_token,
                max_batch=self._config.max_batch,
                n_ctx=loaded.config.n_positions if loaded else 0,
                dtype=loaded.dtype if loaded else self._config.dtype,
            )

    def stop(self, grace_s: float) -> None:
        """Takes nothing new; what runs may finish for `grace_s`, then it is cancelled.

        Returns when the engine's thread has ended, or cannot be waited for (it is in `load`).
        """
        with self._lock:
            self._drain_until = time.monotonic() + grace_s
            was_loading = self._state in (EngineState.STARTING, EngineState.LOADING)
            self._knock()
        if self._state is not EngineState.FAILED or not was_loading:
            self._set_state(EngineState.DRAINING, self._reason)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(0 if was_loading else None)

    def _wake(self) -> None:
        with self._lock:
            self._knock()

    def _knock(self) -> None:
        """The engine's thread is to look after this step what there is; the lock is held."""
        self._interrupt.set()
        self._lock.notify()

    # Below: the engine's thread.

    def _main(self) -> None:
        try:
            runner = self._load_until_it_works()
            if runner is not None:
                self._loop(runner)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the callers must hear of it
            self._fail(error)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._finish_all("error", "the engine has stopped")

    def _load_until_it_works(self) -> Runner | None:
        """A warm runner, or None if the engine is stopped before it has one."""
        if self._config.num_threads is not None:
            torch.set_num_threads(self._config.num_threads)
        pause_s = 1.0
        while not self._is_stopping:
            self._set_state(EngineState.LOADING)
            try:
                loaded = self._load(self._report_progress)
                runner = make_runner(loaded, self._config.max_batch, self._interrupt)
                self._warm_up(runner)
                self._scheduler = Scheduler(runner.num_entries, self._config.max_batch)
            except Exception as error:  # noqa: BLE001 - the caller's code, and any kind of broken file
                log.warning("loading failed; next try in %g s: %s", pause_s, error)
                self._set_state(EngineState.FAILED, f"{type(error).__name__}: {error}")
                with self._lock:
                    self._lock.wait_for(lambda: self._is_stopping, pause_s)
                pause_s = min(2 * pause_s, MAX_BACKOFF_S)
                continue
            self._loaded = loaded
            self._report_progress(1.0)
            self._set_state(EngineState.WARM)
            return runner
        return None

    def _warm_up(self, runner: Runner) -> None:
        """Runs three short siblings: what is done on first use is done, a step's time is known."""
        scheduler = Scheduler(runner.num_entries, self._config.max_batch)
        request = EngineRequest((0,) * 16, SamplingParams(WARM_UP_TOKENS), seed=0)
        sequences = [
            Sequence(request, ResultStream(), start_id=0, tokenizer=None) for _ in range(min(3, self._config.max_batch))
        ]
        for sequence in sequences:
            scheduler.add(sequence)
        while not all(sequence.finish_reason for sequence in sequences):
            start = time.monotonic()
            plan = scheduler.schedule(start)
            output = runner.run(plan)
            scheduler.complete(plan, output.num_steps)
            for sequence, step in output.steps:
                sequence.append(step, None, start)
            self._ms_per_token = 1e3 * (time.monotonic() - start) / output.num_steps

    def _loop(self, runner: Runner) -> None:
        assert self._loaded is not None
        eos_id = self._loaded.eos_id
        while self._take_in():
            start = time.monotonic()
            self._end_interrupted(start)
            plan = self._scheduler.schedule(start)
            if not plan:
                self._wait_for_siblings()
                continue
            self._arm_watchdog(start)
            if self._config.step_delay_s:
                plan = replace(plan, allows_multi_step=False)
                time.sleep(self._config.step_delay_s)
            output = runner.run(plan)
            self._scheduler.complete(plan, output.num_steps)
            self._postprocess(output, eos_id)
            run_s = time.monotonic() - start
            if not plan.chunks:
                self._decode_run_s = run_s / output.num_steps
            weight = 1 - (1 - SMOOTHING) ** output.num_steps
            self._ms_per_token += weight * (1e3 * run_s / output.num_steps - self._ms_per_token)

    def _take_in(self) -> bool:
        """Waits until there is something to do; False once the engine has drained."""
        with self._lock:
            while not self._incoming and not self._scheduler.sequences:
                if self._is_stopping:
                    return False
                self._disarm_watchdog()
                self._num_running = 0
                self._lock.wait()
            while self._incoming:
                self._scheduler.add(self._incoming.popleft())
            self._interrupt.clear()
            self._num_running = self._scheduler.num_running
            return True

    def _wait_for_siblings(self) -> None:
        """Waits for the siblings of what is in here, until they come or have had their time."""
        pause_s = self._scheduler.wake_at - time.monotonic()
        with self._lock:
            if not self._incoming and 0 < pause_s < float("inf"):
                self._lock.wait(pause_s)

    def _end_interrupted(self, now: float) -> None:
        """Ends what was cancelled, would be too late, or has outlived the draining's grace."""
        is_over = self._drain_until is not None and now >= self._drain_until
        for sequence in self._scheduler.sequences:
            # What is there must come in time: a long step that would end past the deadline would keep it back.
            by = now + max(0.0, self._decode_run_s - LATE_S) if sequence.token_ids else now
            reason = "cancelled" if is_over else sequence.interruption(by)
            if reason is not None:
                self._finish(sequence, reason)

    def _postprocess(self, output: RunnerOutput, eos_id: int | None) -> None:
        """Hands out what a step gave, and ends what has come to its end."""
        now = time.monotonic()
        for sequence, logprobs in output.echoes:
            sequence.add_prompt_logprobs(logprobs)
        failed = set()
        for sequence, step in output.steps:
            if sequence.finish_reason is not None or sequence in failed:
                continue
            try:
                sequence.append(step, eos_id, now)
            except Exception as error:  # this sequence's own trouble; the others go on
                log.exception("a sequence failed")
                self._finish(sequence, "error", f"{type(error).__name__}: {error}")
                failed.add(sequence)
                continue
            if sequence.request.stream:
                sequence.result_stream.put(step)
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)

    def _finish(self, sequence: Sequence, reason: str, error: str | None = None) -> None:
        self._scheduler.remove(sequence)
        with self._lock:
            self._num_in_flight -= 1
        sequence.result_stream.put(sequence.finished(reason, time.monotonic(), error))

    def _finish_all(self, reason: str, error: str | None) -> None:
        with self._lock:
            while self._incoming:
                self._scheduler.add(self._incoming.popleft())
        for sequence in self._scheduler.sequences:
            self._finish(sequence, reason, error)

    def _fail(self, error: BaseException) -> None:
        """The device, or the engine itself, is broken: nothing is served from here on."""
        log.critical("the engine failed", exc_info=error)
        text = f"{type(error).__name__}: {error}"
        self._set_state(EngineState.FAILED, text)
        self._finish_all("error", text)
        self._on_fatal(error)

    @property
    def _is_stopping(self) -> bool:
        return self._drain_until is not None

    def _set_state(self, state: EngineState, reason: str | None = None) -> None:
        with self._lock:
            # A failure stays one; a draining engine does not become warm.
            if self._is_stopping and state in (EngineState.LOADING, EngineState.WARM):
                return
            self._state, self._reason = state, reason
        self._on_change()

    def _report_progress(self, done: float) -> None:
        # In steps of a hundredth: whoever listens need not hear of every tensor.
        if done >= 1 or done >= self._progress + 0.01 or done < self._progress:
            self._progress = done
            self._on_change()

    def _arm_watchdog(self, now: float) -> None:
        hang_s = self._config.hang_s
        if hang_s > 0 and now - self._armed_at > hang_s / REARM_FRACTION:
            faulthandler.dump_traceback_later(hang_s, exit=True)
            self._armed_at = now

    def _disarm_watchdog(self) -> None:
        if self._armed_at > float("-inf"):
            faulthandler.cancel_dump_traceback_later()
            self._armed_at = float("-inf")


def make_runner(loaded: LoadedModel, max_sequences: int, interrupt: Interrupt) -> Runner:
    """The runner for the model's device. A GPU's hears no interrupt: what has been sent off cannot be called back."""
    is_cpu = loaded.device == "cpu"
    return CpuRunner(loaded, max_sequences, interrupt) if is_cpu else CudaRunner(loaded, max_sequences)


def _problem(request: EngineRequest, loaded: LoadedModel) -> str | None:
    """Why `loaded` can never serve `request`, or None."""
    config, params = loaded.config, request.sampling
    num_tokens = max(1, len(request.prompt_ids)) + len(request.forced_prefix) + params.max_new_tokens
    if params.max_new_tokens < 1:
        return "max_new_tokens must be at least 1"
    if num_tokens > config.n_positions:
        return f"prompt and new tokens are {num_tokens}, the context holds {config.n_positions}"
    ids = request.prompt_ids + request.forced_ids
    if ids and (min(ids) < 0 or max(ids) >= config.vocab_size):
        return f"token ids must be between 0 and {config.vocab_size - 1}"
    if not 0 <= params.temperature < float("inf"):
        return "temperature must be finite and not negative"
    if params.top_k < 0:
        return "top_k must not be negative"
    if not 0 <= params.top_p <= 1:
        return "top_p must be between 0 and 1"
    if not 0 < params.repetition_penalty < float("inf"):
        return "repetition_penalty must be finite and positive"
    if not 0 <= params.first_rank < config.vocab_size:
        return f"first_rank must be between 0 and {config.vocab_size - 1}"
    if not 0 <= params.top_logprobs <= config.vocab_size:
        return f"top_logprobs must be between 0 and {config.vocab_size}"
    if not all(params.stop):
        return "a stop string must not be empty"
    if (params.stop or params.single_line or request.forced_prefix) and loaded.tokenizer is None:
        return "stop strings and typed text need a tokenizer, and this model was loaded without one"
    return None
