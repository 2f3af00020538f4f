"""`/health/live`, `/health/ready` and `/metrics`: for load balancers, operators and Prometheus.

Readiness is derived from the slots' last states and from whether this process drains; nothing here calls a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import falcon
import msgspec
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.api.operation import JSON, Answer, Operation, Operations
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from shared.errors import draw_retry_after_s
from shared.plan import REMOTE
from shared.protocol import SlotState
from shared.version import tercet_version

TAG = "Health and metrics"
_encode = msgspec.json.Encoder().encode


class Liveness(Struct, kw_only=True):
    status: Literal["live"] = "live"


class ServedModel(Struct, kw_only=True):
    """A model of the plan. `warning` says what is unusual about its checkpoint; `bytes` is the size of its weights'
    files, 0 if only other machines have them."""

    model: str
    source: str
    warning: str | None
    bytes: int


class SlotReadiness(Struct, kw_only=True):
    """A slot's state; `reason` says why it is not warm, `progress` how much of its model is loaded (0 to 1). `kernels`
    says which kernels a GPU worker uses, and whether its steps are CUDA graphs; empty on a CPU."""

    slot: int
    model: str
    device: str
    state: SlotState
    reason: str | None
    progress: float
    dtype: str
    kernels: str
    ms_per_token: float


class Readiness(Struct, kw_only=True):
    """`ready` while every model has a warm slot, or one that changes its worker. `version` is the gateway's."""

    status: Literal["ready", "starting", "draining"]
    version: str
    models: list[ServedModel]
    slots: list[SlotReadiness]


class LiveResource:
    """`GET /health/live`: 200 as long as this process answers requests, whatever the slots' states."""

    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag=TAG, summary="Liveness", answers={200: Answer("The gateway answers requests.", {JSON: Liveness})}
        )
    }

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.data = _encode(Liveness())


class ReadyResource:
    """`GET /health/ready`: 200 while every model has a warm slot and the server does not drain, else 503.

    A slot counts as warm for a second more, since its worker may just be replaced. Its body shows the models and each
    slot's state, also with a 503. The route is open, so it names no process.
    """

    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag=TAG,
            summary="Readiness, with the state of every model and slot",
            answers={
                200: Answer("Every model has a warm slot.", {JSON: Readiness}),
                503: Answer("A model has no warm slot, or the server is shutting down.", {JSON: Readiness}),
            },
        )
    }

    def __init__(
        self, admission: Admission, is_draining: Callable[[], bool], *, needs_every_model: bool = True
    ) -> None:
        """
        Args:
            needs_every_model: else a single warm slot is enough.
        """
        self._admission = admission
        self._is_draining = is_draining
        self._num_needed = len(admission.models.all()) if needs_every_model else 1

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        slots = [
            SlotReadiness(
                slot=row.slot.index,
                model=row.slot.model,
                device=row.device,
                state=row.state.state,
                reason=row.state.reason,
                progress=round(row.state.progress, 3),
                dtype=row.state.dtype,
                kernels=row.state.kernels,
                ms_per_token=round(row.state.ms_per_token, 3),
            )
            for row in self._admission.slots()
        ]
        status: Literal["ready", "starting", "draining"]
        if self._is_draining():
            status = "draining"
        elif len(self._admission.ready_models()) >= self._num_needed:
            status = "ready"
        else:
            status = "starting"
        if status != "ready":
            resp.status = falcon.HTTP_503
            resp.set_header("Retry-After", str(draw_retry_after_s()))
        models = [
            ServedModel(
                model=model.name,
                source=model.source,
                warning=model.warning,
                bytes=0 if model.source == REMOTE else model.weight_bytes,
            )
            for model in self._admission.models.all()
        ]
        resp.data = _encode(Readiness(status=status, version=tercet_version(), models=models, slots=slots))


class MetricsResource:
    """`GET /metrics`: the gateway's metrics and every slot's, in Prometheus' text format."""

    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag=TAG,
            summary="Metrics in Prometheus' text format",
            answers={200: Answer("The gateway's metrics and every slot's.", {CONTENT_TYPE_LATEST: str})},
        )
    }

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = CONTENT_TYPE_LATEST
        resp.data = self._metrics.exposition()
