"""`/health/live`, `/health/ready`, `/slots` and `/metrics`: for load balancers, operators and Prometheus.

Readiness is derived from the slots' last states and from whether this process drains; nothing here calls a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import falcon
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from shared.errors import retry_after_s
from shared.plan import Plan


class LiveResource:
    """`GET /health/live`: 200 as long as this process answers requests, whatever the slots' states."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.media = {"status": "live"}

    on_head = on_get


class ReadyResource:
    """`GET /health/ready`: 200 while every model has a warm slot and the server does not drain, else 503.

    Its body shows the models and each slot's state, also with a 503. The route is open, so it names no process.
    """

    def __init__(self, plan: Plan, admission: Admission, is_draining: Callable[[], bool]) -> None:
        self._plan = plan
        self._admission = admission
        self._is_draining = is_draining

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        states = self._admission.states()
        slots: list[dict[str, Any]] = [
            {
                "slot": slot.index,
                "model": slot.model,
                "device": slot.device,
                "state": state.state,
                "reason": state.reason,
                "progress": round(state.progress, 3),
                "dtype": state.dtype,
                "ms_per_token": round(state.ms_per_token, 3),
            }
            for slot, state in zip(self._plan.slots, states, strict=True)
        ]
        warm_models = {slot["model"] for slot in slots if slot["state"] == "warm"}
        if self._is_draining():
            status = "draining"
        elif all(model.name in warm_models for model in self._plan.models):
            status = "ready"
        else:
            status = "starting"
        if status != "ready":
            resp.status = falcon.HTTP_503
            resp.set_header("Retry-After", str(retry_after_s()))
        resp.media = {
            "status": status,
            "models": [
                {"model": model.name, "source": model.source, "warning": model.warning} for model in self._plan.models
            ],
            "slots": slots,
        }

    on_head = on_get


class SlotsResource:
    """`GET /slots`: all that is known of each slot, with process ids, revisions and counters."""

    def __init__(self, plan: Plan, admission: Admission) -> None:
        self._plan = plan
        self._admission = admission

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.media = {
            "slots": [
                {"slot": slot.index, **msgspec.to_builtins(state), "model": slot.model, "device": slot.device}
                for slot, state in zip(self._plan.slots, self._admission.states(), strict=True)
            ]
        }

    on_head = on_get


class MetricsResource:
    """`GET /metrics`: the gateway's metrics and every slot's, in Prometheus' text format."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = CONTENT_TYPE_LATEST
        resp.data = self._metrics.exposition()

    on_head = on_get
