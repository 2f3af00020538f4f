"""A slot's HTTP face: `POST /generate`, `POST /tokenize`, `GET /state`, `GET /metrics` and two health checks.

Turns HTTP into calls of a `SlotService` and its errors into problem details. Knows nothing of models, and of gunicorn
only the socket in the WSGI environment. `build` alone reads the process environment.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import falcon
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from shared import wire
from shared.cancellation import HangupWatcher
from shared.errors import PROBLEM_JSON, ClientGone, TercetError
from shared.masters.run_directory import holding_device
from shared.metrics import SlotCollector
from shared.plan import Plan, Slot, read_plan
from shared.protocol import Done, Failed
from shared.settings import Settings
from shared.telemetry import configure_structlog, finish_log
from shared.tracing import start_tracing
from shared.worker_environment import cache_directory
from workers.engine.engine import DEVICE_RUNNERS, EngineConfig, RunnerFactory
from workers.engine.failures import EngineFailure
from workers.prompt_score import AnyBranch
from workers.service import SlotService
from workers.tokenizing import Tokenization

# gunicorn replaces a process that exits, but halts the whole pool on exit codes 3 and 4.
FATAL_EXIT_CODE = 70
# Time from a fatal failure to the process's end, in which threads send the failed state and the sequences' last lines.
LAST_WORDS_S = 0.1
# The same before the model is loaded: nothing waits for the process's end, and the supervisor, which asks the gateway
# ten times a second, must see the reason.
LOAD_LAST_WORDS_S = 0.5
# Share of the time in which the gateway wants a branch to be accepted.
ACCEPTED_DELAY_SHARE = 0.2
log = structlog.get_logger()


class SlotApp(falcon.App[falcon.Request, falcon.Response]):
    """The WSGI app of one slot; it is also the resource of its routes, whose names are the suffixes of the responders.

    Attributes:
        service: public for the process that starts and drains it.
    """

    def __init__(self, service: SlotService, hangups: HangupWatcher) -> None:
        super().__init__()
        self.service = service
        self._hangups = hangups
        self._registry = CollectorRegistry()
        self._registry.register(SlotCollector(lambda: [(service.slot.index, service.state())]))
        self.add_error_handler(TercetError, _render_error)
        self.add_error_handler(Exception, _render_unknown)
        for path in ("/generate", "/tokenize", "/state", "/metrics", "/health/live", "/health/ready"):
            self.add_route(path, self, suffix=path.rpartition("/")[2])

    def generate(self, content: bytes, client: socket.socket | None) -> BranchLines:
        """Start the branch of a `POST /generate`.

        Args:
            client: the connection; None: it is not watched for a hang-up.

        Raises:
            TercetError: the request is invalid, or refused.
        """
        try:
            return BranchLines(self.service.submit(wire.parse_generate_request(content)), self._hangups, client)
        except Exception:
            raise
        except BaseException as error:  # Falcon has no handler for a panic in Rust
            raise RuntimeError("A branch was not started.") from error

    def on_post_generate(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.stream = self.generate(req.bounded_stream.read(), req.env.get("gunicorn.socket"))
        resp.content_type = wire.NDJSON

    def on_post_tokenize(self, req: falcon.Request, resp: falcon.Response) -> None:
        tokenization = self.service.tokenize(wire.parse_tokenize_request(req.bounded_stream.read()))
        resp.content_type = falcon.MEDIA_JSON
        resp.stream = TokenParts(tokenization, self._hangups, req.env.get("gunicorn.socket"))

    def on_get_state(self, req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = wire.NDJSON
        if req.query_string == wire.ONCE:
            resp.data = wire.encode_line(self.service.state())
            return
        resp.stream = (wire.encode_line(state) for state in self.service.states())

    def on_get_metrics(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = CONTENT_TYPE_LATEST
        resp.data = generate_latest(self._registry)

    def on_get_live(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """Answer a probe of an orchestrator on the TCP port: the process lives."""
        resp.media = {"state": "live"}

    def on_get_ready(self, _req: falcon.Request, resp: falcon.Response) -> None:
        """As `on_get_live`: 200 where the slot is warm."""
        state = self.service.state().state
        resp.status = falcon.HTTP_200 if state == "warm" else falcon.HTTP_503
        resp.media = {"state": state}


class BranchLines:
    """A branch's lines in NDJSON, as WSGI chunks. The server calls `close` in every case, which ends the branch.

    Attributes:
        is_complete: the chunk that came last is the last one.
    """

    def __init__(self, branch: AnyBranch, hangups: HangupWatcher, client: socket.socket | None) -> None:
        self._branch = branch
        self._hangups = hangups
        self._client = client
        self._watching: AbstractContextManager[None] | None = None
        self.is_complete = False

    def __iter__(self) -> Iterator[bytes]:
        for lines in self._branch:
            if isinstance(lines[-1], Done | Failed):
                self.is_complete = True
            elif self._watching is None:
                # Most branches end with their first batch, and watching costs as much as a send.
                self._watching = self._hangups.watching(self._client, self._branch.cancel)
                self._watching.__enter__()
            yield wire.encode_lines(lines)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.__exit__(None, None, None)
        self._branch.close()


class TokenParts:
    """The tokens of a text in JSON, as WSGI chunks. The server calls `close` in every case, which ends the turn."""

    def __init__(self, tokenization: Tokenization, hangups: HangupWatcher, client: socket.socket | None) -> None:
        self._tokenization = tokenization
        self._hangups = hangups
        self._client = client

    def __iter__(self) -> Iterator[bytes]:
        with self._hangups.watching(self._client, self._tokenization.cancel):
            try:
                response = self._tokenization.result()
            except ClientGone:  # so there is nothing to send
                return
        self.close()  # sending does not need the turn
        yield from wire.encode_tokens(response)

    def close(self) -> None:
        self._tokenization.close()


def _render_error(req: falcon.Request, resp: falcon.Response, error: TercetError, _params: object) -> None:
    resp.status = falcon.code_to_http_status(error.status)
    resp.content_type = PROBLEM_JSON
    resp.data = error.problem(req.get_header("X-Request-Id"))
    resp.set_headers(error.headers)


def _render_unknown(req: falcon.Request, resp: falcon.Response, error: Exception, params: object) -> None:
    log.error("unhandled_exception", path=req.path, exc_info=error)
    _render_error(req, resp, TercetError("The worker failed; its log has the reason."), params)


def build(runners: RunnerFactory = DEVICE_RUNNERS, instruction_set: str | None = None) -> SlotApp:
    """The app for this process's environment (`gunicorn.conf.py` sets `TERCET_SLOT`).

    Args:
        runners: makes the engine's runner. A test's app passes a factory of its own (`tests/faulty_workers.py`).
        instruction_set: of the CPU kernels; by default this CPU's best. A test's app can force a lower one.
    """
    settings = Settings.load(os.environ)
    configure_structlog("workers", settings.server.log)
    plan = read_plan(settings.run_path)
    slot = plan.slots[int(os.environ["TERCET_SLOT"])]
    return SlotApp(make_service(plan, slot, settings, runners, instruction_set), HangupWatcher())


def make_service(
    plan: Plan,
    slot: Slot,
    settings: Settings,
    runners: RunnerFactory = DEVICE_RUNNERS,
    instruction_set: str | None = None,
) -> SlotService:
    """The service of one slot of `plan`, which its caller starts. It ends this process where a device has failed.

    The process's variables are those of `shared.worker_environment.worker_environment`.

    Args:
        runners: makes the engine's runner.
        instruction_set: of the CPU kernels; by default this CPU's best.
    """
    cache = cache_directory(settings)
    is_on_cpu = slot.device == "cpu" or settings.pool.compute == "cpu"
    config = EngineConfig(
        # CUDA_VISIBLE_DEVICES leaves this process one GPU, whatever its number in the plan.
        device="cpu" if is_on_cpu else "cuda",
        dtype=settings.model.dtype,
        max_batch=slot.max_batch,
        cache_bytes=slot.cache_bytes if is_on_cpu else slot.memory.cache_bytes if slot.memory is not None else None,
        allocation_lock=nullcontext if slot.device == "cpu" else partial(holding_device, settings, slot.device),
        hang_s=settings.pool.hang_s,
        load_s=settings.pool.load_s,
        num_threads=int(os.environ["OMP_NUM_THREADS"]) if is_on_cpu else None,
        instruction_set=instruction_set,
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

    def end(failure: EngineFailure) -> None:
        is_loaded = service.state().n_ctx > 0
        _exit_process(failure, LAST_WORDS_S if is_loaded else LOAD_LAST_WORDS_S)

    measurements = None if cache is None else cache / "int8"
    tracing = start_tracing("tercet-worker") if settings.server.traces else None
    service = SlotService(
        slot,
        plan.model(slot.model),
        config,
        measurements,
        weights=None if cache is None or not is_on_cpu else cache / "weights",
        is_only_worker=sum(other.model == slot.model for other in plan.slots) == 1,
        runners=runners,
        on_fatal=end,
        accepted_delay_s=ACCEPTED_DELAY_SHARE * settings.pool.ack_ms / 1e3,
        tracing=tracing,
    )
    return service


def _exit_process(failure: EngineFailure, last_words_s: float) -> None:
    time.sleep(last_words_s)
    log.error("worker_ended", reason=failure.detail, exit_code=FATAL_EXIT_CODE)
    finish_log()
    os._exit(FATAL_EXIT_CODE)
