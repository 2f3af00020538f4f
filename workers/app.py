"""A slot's HTTP face: `POST /generate`, `GET /state`, `GET /metrics` on a private socket.

Knows nothing of gunicorn: `workers.gunicorn_worker` starts and drains what `create_app` makes. `build` alone reads the
environment. Text and token ids belong to `workers.codec`.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import falcon
import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shared.errors import PROBLEM_JSON, InvalidRequest, NotReady, SlotFull, TercetError
from shared.hangups import HangupWatcher
from shared.metrics import SlotCollector
from shared.plan import Model, Slot, read_plan
from shared.protocol import Accepted, GenerateLine, GenerateRequest, State, parse_generate_request
from shared.settings import Settings
from shared.telemetry import configure_structlog
from workers.checkpoints.int8_check import choose_cpu_dtype
from workers.codec import Codec
from workers.engine.engine import Engine, EngineConfig, EngineFull, EngineNotReady, InvalidPrompt
from workers.engine.model.loader import LoadedModel, load_model, random_model
from workers.engine.request import EngineRequest, SequenceOutput
from workers.engine.result_stream import ResultStream
from workers.text.tokenizer import Tokenizer

STATE_PERIOD_S = 0.5
MAX_BACKOFF_S = 30.0
# A device that answered with an error may answer the next request wrongly: the process goes, its master makes
# another. Not 3 or 4, which halt the master.
FATAL_EXIT_CODE = 70
log = structlog.get_logger()


class SlotApp(falcon.App[falcon.Request, falcon.Response]):
    """The WSGI app of one slot, with the engine behind it."""

    def __init__(self, slot: Slot, model: Model, config: EngineConfig, verdicts: Path) -> None:
        super().__init__()
        self._verdicts = verdicts
        self._slot = slot
        self._model = model
        self._config = config
        self._age = 0
        self._num_failures = 0
        self._changed = threading.Condition()
        self._version = 0
        self._on_change: Callable[[], None] = lambda: None
        self._is_draining = threading.Event()
        self._counters: Counter[str] = Counter()
        self.hangups = HangupWatcher()
        self._translator: Codec | None = None
        self.engine = Engine(config, self._load, on_change=self._announce, on_fatal=_exit_process)
        self.add_error_handler(TercetError, _render_error)
        self.add_error_handler(Exception, _render_unknown)
        self.add_route("/generate", GenerateResource(self))
        self.add_route("/state", StateResource(self))
        self.add_route("/metrics", MetricsResource(self))

    def start(self, *, age: int, num_failures: int, on_change: Callable[[], None]) -> None:
        """Begin to load, in the engine's thread.

        Args:
            age: the worker's gunicorn age.
            num_failures: workers of this slot that died before they were warm, in a row.
            on_change: called, from any thread, when the state has changed.
        """
        self._age, self._num_failures, self._on_change = age, num_failures, on_change
        self.engine.start()

    @property
    def codec(self) -> Codec:
        """
        Raises:
            NotReady: the model is not loaded yet.
        """
        if self._translator is None:
            raise NotReady("The slot's model is not loaded yet.", retry_after_s=1)
        return self._translator

    @property
    def is_warm(self) -> bool:
        return self.engine.status().state == "warm"

    def drain(self, grace_s: float) -> None:
        """Take nothing new; end the state streams after a last line, so that the gateway looks elsewhere."""
        self._is_draining.set()
        self._announce()
        threading.Thread(target=self.engine.stop, args=(grace_s,), name="drain", daemon=True).start()

    def close(self) -> None:
        """End the engine's thread, or the process where that thread cannot be ended (it is loading).

        An interpreter that exits while a thread is inside torch aborts.
        """
        self.engine.stop(0.0)
        if any(thread.name == "engine" for thread in threading.enumerate()):
            logging.shutdown()
            os._exit(0)

    def state(self) -> State:
        status = self.engine.status()
        return State(
            state="draining" if self._is_draining.is_set() else status.state.value,
            reason=status.reason,
            progress=status.progress,
            model=self._model.name,
            device=self._slot.device,
            dtype=status.dtype,
            max_batch=self._slot.max_batch,
            n_ctx=status.n_ctx,
            in_flight=status.num_running + status.num_waiting,
            ms_per_token=status.ms_per_token,
            pid=os.getpid(),
            age=self._age,
            counters=dict(self._counters),
        )

    def states(self) -> Iterator[State]:
        """The state now, at each change of it, and at least twice a second; ends when the worker drains."""
        version = -1
        while True:
            with self._changed:
                if self._version == version and not self._is_draining.is_set():
                    self._changed.wait(STATE_PERIOD_S)
                version = self._version
            state = self.state()
            yield state
            if state.state == "draining":
                return

    def count(self, finished: SequenceOutput, num_prompt_tokens: int) -> None:
        with self._changed:
            self._counters[f"sequences.{finished.finish_reason}"] += 1
            self._counters["prompt_tokens"] += num_prompt_tokens
            self._counters["cached_tokens"] += finished.cached_tokens
            self._counters["generated_tokens"] += len(finished.token_ids)

    def _announce(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()
        self._on_change()

    def _load(self, progress: Callable[[float], None]) -> LoadedModel:
        if self._num_failures:
            # The process before this one died while loading (out of memory, a driver fault). gunicorn
            # respawns without pause, so the pause is here.
            pause_s = min(MAX_BACKOFF_S, 2.0 ** (self._num_failures - 1))
            log.warning("load_delayed", slot=self._slot.index, failures=self._num_failures, pause_s=pause_s)
            self._is_draining.wait(pause_s)
        start = time.monotonic()
        # Here and not earlier: a worker that cannot even start would halt its master.
        tokenizer = Tokenizer.from_directory(Path(self._model.directory), self._model.vocab_size)
        make = (
            partial(random_model, "medium" if self._model.name == "synthetic:medium" else "small")
            if self._model.source == "synthetic"
            else partial(load_model, Path(self._model.directory))
        )
        loaded = make(device=self._config.device, dtype=self._dtype(tokenizer), progress=progress, tokenizer=tokenizer)
        self._translator = Codec(tokenizer, loaded.config.n_positions)
        log.info(
            "model_loaded", slot=self._slot.index, model=self._model.name, seconds=round(time.monotonic() - start, 2)
        )
        return loaded

    def _dtype(self, tokenizer: Tokenizer) -> str:
        """The dtype asked for; for `auto` on a CPU, the fastest that keeps this checkpoint's quality."""
        is_open = self._config.dtype == "auto" and self._config.device == "cpu"
        # The embedded checkpoint is measured by a test, and random weights have no quality to lose.
        if not is_open or self._model.source in {"embedded", "synthetic"}:
            return self._config.dtype
        verdict = choose_cpu_dtype(Path(self._model.directory), tokenizer, self._verdicts)
        if verdict.dtype != "int8":
            log.warning("int8_refused", model=self._model.name, ratio=round(verdict.ratio, 4), dtype=verdict.dtype)
        return verdict.dtype


class GenerateResource:
    def __init__(self, app: SlotApp) -> None:
        self._app = app

    def on_post(self, req: falcon.Request, resp: falcon.Response) -> None:
        started_at = time.time()
        start = time.monotonic()
        ask = parse_generate_request(req.bounded_stream.read())
        request = self._app.codec.request(ask, start)
        try:
            generation = self._app.engine.submit(request)
        except EngineFull as error:
            raise SlotFull(str(error), retry_after_s=1) from error
        except EngineNotReady as error:
            raise NotReady(str(error), retry_after_s=1) from error
        except InvalidPrompt as error:
            raise InvalidRequest(str(error)) from error
        resp.content_type = "application/x-ndjson"
        resp.stream = _Answer(self._app, req.env.get("gunicorn.socket"), ask, request, generation, started_at)


class _Answer:
    """A branch's lines, as they come. `close`, which the server calls whatever happens, ends the work and counts it."""

    def __init__(
        self,
        app: SlotApp,
        client: socket.socket | None,
        ask: GenerateRequest,
        request: EngineRequest,
        generation: ResultStream,
        started_at: float,
    ) -> None:
        self._app = app
        self._ask = ask
        self._request = request
        self._generation = generation
        self._started_at = started_at
        self._stack = ExitStack()
        self._stack.enter_context(app.hangups.watching(client, generation.cancel))
        # `workers.gunicorn_worker` gives sockets that can wait with what they are to send.
        self._hold: Callable[[], None] = getattr(client, "hold", lambda: None)

    def __iter__(self) -> Iterator[bytes]:
        yield _line(Accepted())
        codec = self._app.codec
        tokens = codec.tokens(self._request)
        lines = b""
        for step in self._generation.outputs():
            if isinstance(step, SequenceOutput):
                self._hold()  # the end of the answer is sent with its last line
                yield lines + _line(codec.last_line(self._ask, self._request, step))
                return
            lines += b"".join(map(_line, tokens.feed(step)))
            if lines and not self._generation.has_more:
                yield lines
                lines = b""

    def close(self) -> None:
        self._stack.close()
        self._generation.cancel()
        finished = self._generation.result()
        num_prompt_tokens = len(self._request.prompt_ids)
        self._app.count(finished, num_prompt_tokens)
        log.info(
            "branch_finished",
            slot=self._app._slot.index,
            request_id=self._ask.request_id,
            seed=self._ask.seed,
            started_at=round(self._started_at, 4),
            first_token_at=_wall(finished.first_token_at),
            ended_at=_wall(finished.ended_at),
            prompt_tokens=num_prompt_tokens,
            cached_tokens=finished.cached_tokens,
            tokens=len(finished.token_ids),
            finish_reason=finished.finish_reason,
        )


class StateResource:
    def __init__(self, app: SlotApp) -> None:
        self._app = app

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = "application/x-ndjson"
        resp.stream = (msgspec.json.encode(state) + b"\n" for state in self._app.states())


class MetricsResource:
    def __init__(self, app: SlotApp) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(SlotCollector(lambda: [(app._slot.index, app.state())]))

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = CONTENT_TYPE_LATEST
        resp.data = generate_latest(self._registry)


def _wall(monotonic_s: float | None) -> float | None:
    """A time of `time.monotonic()` as one of `time.time()`."""
    return None if monotonic_s is None else round(time.time() - time.monotonic() + monotonic_s, 4)


def _line(line: GenerateLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _render_error(req: falcon.Request, resp: falcon.Response, error: TercetError, _params: object) -> None:
    resp.status = falcon.code_to_http_status(error.status)
    resp.content_type = PROBLEM_JSON
    resp.data = error.problem(req.get_header("X-Request-Id"))
    resp.set_headers(error.headers)


def _render_unknown(req: falcon.Request, resp: falcon.Response, error: Exception, params: object) -> None:
    if isinstance(error, falcon.HTTPError | falcon.HTTPStatus):
        raise error
    log.error("unhandled_exception", path=req.path, exc_info=error)
    _render_error(req, resp, TercetError("The worker failed; its log has the reason."), params)


def _exit_process(error: BaseException) -> None:
    log.error("engine_failed", exc_info=error)
    os._exit(FATAL_EXIT_CODE)


def create_app(slot: Slot, model: Model, config: EngineConfig, verdicts: Path) -> SlotApp:
    """The slot's app; nothing is loaded, and no thread computes, before its `start`.

    Args:
        verdicts: where `workers.checkpoints.int8_check` keeps what it measured.
    """
    return SlotApp(slot, model, config, verdicts)


def build() -> SlotApp:
    """The app as this process's environment asks for it (`TERCET_SLOT` is set by `gunicorn.conf.py`)."""
    settings = Settings.load(os.environ)
    configure_structlog("workers", settings.log)
    plan = read_plan(settings.run_path)
    slot = plan.slots[int(os.environ["TERCET_SLOT"])]
    is_on_cpu = slot.device == "cpu" or settings.compute == "cpu"
    config = EngineConfig(
        # The environment shows this process one GPU, whatever number the plan knows it by.
        device="cpu" if is_on_cpu else "cuda",
        dtype=settings.dtype,
        max_batch=slot.max_batch,
        hang_s=settings.hang_s,
        num_threads=int(os.environ["OMP_NUM_THREADS"]) if is_on_cpu else None,
        step_delay_s=settings.test_step_delay_ms.get(slot.index, 0.0) / 1e3,
    )
    log.info(
        "worker_started",
        slot=slot.index,
        device=slot.device,
        model=slot.model,
        cuda_visible_devices=os.environ["CUDA_VISIBLE_DEVICES"],
        omp_num_threads=os.environ["OMP_NUM_THREADS"],
        pid=os.getpid(),
    )
    return create_app(slot, plan.model(slot.model), config, Path.home() / ".cache" / "tercet" / "int8")
