"""The internal protocol for a pool on Ray: one URL for all workers of a model.

Checks the pool's key, passes requests to the workers, and answers `/state` and health checks itself from what workers
report, so that no state stream takes a worker's place. Knows no model, and not which worker a request goes to
(`deploy.cloud.ray.router`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakSet

import structlog
from ray import serve
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from deploy.cloud.ray.config import RayConfig
from deploy.cloud.ray.pool_state import POOL, REPORT_SILENCE_S, IngressLoad
from deploy.cloud.ray.replies import Acceptance, Refusal, refusal_of
from shared import wire
from shared.errors import (
    MethodNotAllowed,
    NotFound,
    NotReady,
    SlotFull,
    StartError,
    TercetError,
    Unauthorized,
)
from shared.pool_keys import is_pool_key, watch_pool_keys
from shared.protocol import Failed, State
from shared.settings import Settings
from shared.telemetry import configure_structlog, start_log_thread, use_log_streams

WORKER_GONE = "The worker of this branch is gone."
REPORT_PERIOD_S = 1.0
STATE_PERIOD_S = 0.5
STATE_POLL_S = 0.05
# How often a branch that waits for its worker looks whether that is still there.
FIRST_POLL_S, LOST_POLL_S = 0.1, 1.0
# A branch that no worker has accepted after this share of the time that the gateway allows, in a full pool, is refused:
# the gateway then waits for room, instead of counting a worker that does not answer.
QUEUE_SHARE = 0.6
log = structlog.get_logger()


class WorkerLost(Exception):
    """The worker of a branch has been silent for too long."""


class Ingress:
    """One of the endpoints of a pool. Each knows the state of all workers, so any of them may be lost."""

    async def __init__(self, config: RayConfig, workers: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        """
        Args:
            workers: handle of the `Worker` deployment.

        Raises:
            StartError: `TERCET_POOL_KEY` is not set, or its file is wrong. Serve shows the text in `serve status`.
        """
        settings = Settings.load(os.environ)
        use_log_streams()
        start_log_thread()
        configure_structlog("ingress", settings.server.log)
        if settings.remote.pool_key is None:
            raise StartError(
                "Workers on Ray are reached by TCP, never without a key: set TERCET_POOL_KEY to a file with a key of "
                "`openssl rand -hex 32`, the same on each node."
            )
        self._keys = watch_pool_keys(settings.remote.pool_key)
        self._generate = workers.generate.options(stream=True)
        self._tokenize = workers.tokenize
        self._queue_s = QUEUE_SHARE * settings.pool.ack_ms / 1e3
        self._model = config.model.partition("=")[0]
        self._num_streams = 0
        # Weak: what a client leaves before its response begins is never closed, only dropped.
        self._running: WeakSet[Any] = WeakSet()
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        self._peers = serve.get_deployment_handle(context.deployment, context.app_name)
        self._reporting = asyncio.create_task(self._report())

    async def report_worker(self, replica_id: str, state: bytes) -> None:
        """Called by every worker, about twice a second."""
        POOL.report_worker(replica_id, wire.decode_state(state), time.monotonic())

    async def report_ingress(self, replica_id: str, num_streams: int, num_running: int) -> None:
        """Called by every other ingress, about once a second."""
        if replica_id != self._name:  # what it knows of itself is newer
            POOL.report_ingress(replica_id, IngressLoad(num_streams, num_running), time.monotonic())

    async def check_health(self) -> None:
        """Raises if this replica has to be replaced; Serve calls it regularly."""
        if self._reporting.done():
            raise RuntimeError("This ingress reports its load no more.")

    async def __call__(self, request: Request) -> Response:
        """The response to one request of a gateway or of a probe; Serve has removed the application's prefix."""
        request_id = request.headers.get("X-Request-Id")
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        try:
            if path not in wire.ROUTES:
                raise NotFound("This path does not exist; the internal protocol has /generate, /tokenize and /state.")
            if request.method != wire.ROUTES[path]:
                raise MethodNotAllowed(f"Use {wire.ROUTES[path]}.", headers={"Allow": wire.ROUTES[path]})
            if path.startswith("/health/"):
                return self._health(path)
            if not is_pool_key(request.headers.get("Authorization", ""), self._keys.value):
                raise Unauthorized(
                    "Send `Authorization: Bearer` with a key of TERCET_POOL_KEY.",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            if path == "/state":
                return StreamingResponse(self._states(), media_type=wire.NDJSON)
            content = await request.body()
            if path == "/generate":
                return await self._start_branch(content, request)
            return _response(await self._tokenize.remote(content, request_id), "application/json")
        except TercetError as error:
            return _response(refusal_of(error, request_id))
        except BackPressureError:
            return _response(refusal_of(_full(), request_id))
        except ClientDisconnect:
            return Response(status_code=499)  # which no client reads
        except RayTaskError as error:
            log.error("unhandled_exception", path=path, exc_info=error)
            return _response(refusal_of(TercetError("The worker failed; its log has the reason."), request_id))
        except (RayError, RayServeException) as error:
            log.warning("worker_not_reached", path=path, reason=type(error).__name__)
            return _response(refusal_of(NotReady(WORKER_GONE), request_id))

    async def _start_branch(self, content: bytes, request: Request) -> Response:
        """The response to `POST /generate`, once a worker has accepted or refused the branch.

        Raises:
            SlotFull: every worker computes as many branches as it can.
            BackPressureError: `max_queued` branches already wait here.
            RayError: the worker is gone.
        """
        if self._is_full():
            raise _full()
        generate = self._generate.options(session_id=request.headers.get("X-Session-Id", ""))
        while True:
            chunks = generate.remote(content, request.headers.get("X-Request-Id") or "")
            self._running.add(chunks)
            try:
                head = await self._first(chunks)
            except BaseException:
                self._end(chunks)
                raise
            if isinstance(head, Acceptance):
                return StreamingResponse(self._lines(head, chunks), media_type=wire.NDJSON)
            self._end(chunks, is_lost=head is None)
            if head is not None:
                return _response(head)
            log.warning("branch_sent_again", reason="a worker has fallen silent")

    async def _first(self, chunks: Any) -> Acceptance | Refusal | None:
        """The first item of a branch; None if a worker has fallen silent before it came, which may be the branch's.

        Raises:
            SlotFull, BackPressureError, RayError: as `_start_branch`.
        """
        first = asyncio.ensure_future(anext(chunks))
        began = time.monotonic()
        silent, full_at = POOL.silent(began), began + self._queue_s
        try:
            while not (await asyncio.wait({first}, timeout=FIRST_POLL_S))[0]:
                if POOL.silent(time.monotonic()) - silent:
                    return None
                # The reports are newer than at the start. Where there is room, the worker is only slow.
                if time.monotonic() > full_at and self._is_full(others=1):
                    raise _full()
            found: Acceptance | Refusal = first.result()
            return found
        finally:
            first.cancel()

    async def _lines(self, head: Acceptance, chunks: Any) -> AsyncIterator[bytes]:
        """The chunks of a branch; where its worker is lost, a last line says so."""
        is_lost = False
        try:
            yield head.lines
            while True:
                reading = asyncio.ensure_future(anext(chunks, None))
                try:
                    while not (await asyncio.wait({reading}, timeout=LOST_POLL_S))[0]:
                        if POOL.is_silent(head.worker, time.monotonic(), REPORT_SILENCE_S):
                            raise WorkerLost
                finally:
                    reading.cancel()
                chunk = reading.result()
                if chunk is None:
                    return
                yield chunk
        except (TaskCancelledError, RequestCancelledError):
            raise
        except (RayError, RayServeException, WorkerLost) as error:
            is_lost = True
            log.warning("worker_lost", reason=type(error).__name__)
            yield wire.encode_line(Failed(code="worker_gone", detail=WORKER_GONE))
        finally:
            self._end(chunks, is_lost=is_lost)

    def _end(self, chunks: Any, *, is_lost: bool = False) -> None:
        """
        Args:
            is_lost: the worker is silent. Ray's cancellation would then hold up this whole process until Ray has found
                that the node is gone, 10 s and more; a worker that is only slow computes the branch to its end.
        """
        self._running.discard(chunks)
        if not is_lost:
            chunks.cancel()

    async def _states(self) -> AsyncIterator[bytes]:
        """Lines of `GET /state`: at each change that a gateway acts on, and at least every 0.5 s."""
        self._num_streams += 1
        try:
            while True:
                state = self._state()
                yield wire.encode_line(state)
                ends_at = time.monotonic() + STATE_PERIOD_S
                while time.monotonic() < ends_at and _summary(self._state()) == _summary(state):
                    await asyncio.sleep(STATE_POLL_S)
        finally:
            self._num_streams -= 1

    def _health(self, path: str) -> Response:
        state = "live" if path == "/health/live" else self._state().state
        return JSONResponse({"state": state}, 200 if state in {"live", "warm"} else 503)

    def _state(self) -> State:
        return POOL.state(self._model, self._report_own())

    def _is_full(self, others: int = 0) -> bool:
        """Whether no worker has room, `others` branches of this ingress not counted."""
        return POOL.is_full(self._report_own(others))

    def _report_own(self, others: int = 0) -> float:
        """The time of the report."""
        now = time.monotonic()
        POOL.report_ingress(self._name, IngressLoad(self._num_streams, len(self._running) - others), now)
        return now

    async def _report(self) -> None:
        while True:
            try:
                await self._peers.broadcast(
                    "report_ingress", self._name, self._num_streams, len(self._running)
                ).results_async(timeout_s=REPORT_PERIOD_S, return_exceptions=True)
            except (RayError, RayServeException, TimeoutError) as error:
                log.debug("load_not_reported", reason=type(error).__name__)
            await asyncio.sleep(REPORT_PERIOD_S)


def _summary(state: State) -> tuple[str, int, int]:
    return state.state, state.max_batch, state.num_gateways


def _full() -> SlotFull:
    return SlotFull("Every worker of the pool computes as many branches as it can.")


def _response(content: bytes | Refusal, media_type: str | None = None) -> Response:
    if isinstance(content, Refusal):
        return Response(content.body, content.status, content.headers)
    return Response(content, media_type=media_type)
