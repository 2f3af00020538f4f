"""A worker as a Ray Serve replica: holds a `SlotService` in place of a gunicorn process.

Makes the plan of its node for one slot, starts the service, and reports its state to every ingress. Torch is imported
only after the worker's environment is set, so this module imports none of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import structlog
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from deploy.cloud.ray.config import RayConfig
from deploy.cloud.ray.replies import Acceptance, Refusal, refusal_of
from deploy.tuning.planning import make_plan
from shared import wire
from shared.cpu_features import num_cores
from shared.errors import StartError, TercetError
from shared.plan import Plan
from shared.setting_values import ModelSpec
from shared.settings import Settings
from shared.telemetry import configure_structlog, start_log_thread, use_log_streams
from shared.worker_environment import worker_environment

if TYPE_CHECKING:
    from workers.prompt_score import AnyBranch
    from workers.service import SlotService

INGRESS = "Ingress"
REPORT_PERIOD_S = 0.5
WARM_POLL_S = 0.05
log = structlog.get_logger()


class WorkerReplica:
    """One model on a share of one device. Serve sends no requests here until `__init__` has returned."""

    async def __init__(self, config: RayConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        """
        Raises:
            StartError: the settings, the checkpoint or the device are wrong, or the model cannot be loaded. Serve shows
                the text in `serve status` and starts the replica again.
        """
        settings = worker_settings(config, Settings.load(os.environ))
        use_log_streams()
        start_log_thread()
        configure_structlog("workers", settings.server.log)
        plan = make_plan(settings, os.environ)
        slot = plan.slots[0]
        os.environ.update(worker_environment(slot, plan, settings, os.environ))
        context = serve.get_replica_context()
        self._name, self._app = context.replica_id.unique_id, context.app_name
        # One for each branch, and two for texts to be tokenized.
        self._threads = ThreadPoolExecutor(config.max_batch + 2, thread_name_prefix="branch")
        self._service = await asyncio.to_thread(self.make_service, plan, settings)
        self._service.start()
        self._reporting = asyncio.create_task(self._report())
        while not self._service.is_warm:
            state = self._service.state()
            if state.state == "failed":
                self._reporting.cancel()
                self._service.close()
                raise StartError(f"{state.model} cannot be loaded: {state.reason}")
            await asyncio.sleep(WARM_POLL_S)

    def make_service(self, plan: Plan, settings: Settings) -> SlotService:
        """The service of this worker, whose plan has one slot."""
        from workers.app import make_service

        return make_service(plan, plan.slots[0], settings)

    async def generate(self, content: bytes, request_id: str) -> AsyncIterator[Acceptance | Refusal | bytes]:
        """The lines of `POST /generate`, in chunks, the first with this worker's name; a refusal is the only item.

        Serve cancels the iteration when the client has hung up, which cancels the sequence.
        """
        try:
            branch = self._service.submit(wire.parse_generate_request(content))
        except TercetError as error:
            yield refusal_of(error, request_id)
            return
        chunks = map(wire.encode_lines, branch)
        reading = self._threads.submit(next, chunks, b"")
        try:
            yield Acceptance(self._name, await asyncio.wrap_future(reading))
            reading = self._threads.submit(next, chunks, b"")
            while chunk := await asyncio.wrap_future(reading):
                yield chunk
                reading = self._threads.submit(next, chunks, b"")
        finally:
            branch.cancel()
            # Closing waits for the end of the sequence, and a chunk may still be read.
            reading.add_done_callback(lambda _: self._close(branch))

    async def tokenize(self, content: bytes, request_id: str) -> bytes | Refusal:
        """The body of `POST /tokenize`."""

        def tokenize() -> bytes:
            with closing(self._service.tokenize(wire.parse_tokenize_request(content))) as tokenization:
                return b"".join(wire.encode_tokens(tokenization.result()))

        try:
            return await asyncio.wrap_future(self._threads.submit(tokenize))
        except TercetError as error:
            return refusal_of(error, request_id)

    async def check_health(self) -> None:
        """Raises if this replica has to be replaced; Serve calls it regularly."""
        state = self._service.state()
        if state.state == "failed":
            raise RuntimeError(state.reason or "the engine has failed")
        if self._reporting.done():
            raise RuntimeError("This worker reports its state no more.")

    def __del__(self) -> None:
        """Serve calls this once, after the last request has ended."""
        with suppress(AttributeError):  # `__init__` has failed
            self._service.close()

    def _close(self, branch: AnyBranch) -> None:
        with suppress(RuntimeError):  # the replica is being stopped
            self._threads.submit(branch.close)

    async def _report(self) -> None:
        """Send this worker's state to every ingress, twice a second, and at once when it is warm or has failed."""
        ingress = serve.get_deployment_handle(INGRESS, self._app)
        while True:
            state = self._service.state()
            try:
                await ingress.broadcast("report_worker", self._name, msgspec.json.encode(state)).results_async(
                    timeout_s=REPORT_PERIOD_S, return_exceptions=True
                )
            except (RayError, RayServeException, TimeoutError) as error:
                log.debug("state_not_reported", reason=type(error).__name__)
            for _ in range(int(REPORT_PERIOD_S / WARM_POLL_S)):
                await asyncio.sleep(WARM_POLL_S)
                if self._service.state().state != state.state:
                    break


def worker_settings(config: RayConfig, settings: Settings) -> Settings:
    """The settings of a worker: the node's, with the model, device and batch of the application.

    `TERCET_RUN_DIR` is shared by the workers of a node, whose lock of a GPU is in it.
    """
    name, _, source = config.model.partition("=")
    models = (ModelSpec(name, source or None, _workers_per_device(config)),)
    pool = replace(
        settings.pool,
        devices=("cuda:0",) if config.num_gpus else ("cpu",),  # Ray shows a replica its own GPU only
        max_batch=config.max_batch,
        cpu_threads=settings.pool.cpu_threads or (0 if config.num_gpus else max(1, int(config.num_cpus))),
    )
    return replace(settings, model=replace(settings.model, models=models), pool=pool)


def _workers_per_device(config: RayConfig) -> int:
    """Workers that Ray puts on one GPU, or on this node's CPU: they divide its memory."""
    if config.num_gpus:
        return int(1 / config.num_gpus + 1e-6)
    return max(1, min(config.max_workers, int(num_cores() / config.num_cpus)))
