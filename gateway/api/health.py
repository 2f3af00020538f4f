"""`/health/live`, `/health/ready` and `/metrics`: for load balancers, operators and Prometheus.

Readiness is derived from the slots' last states and from one file in the run directory; nothing here calls a worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import falcon
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from shared.errors import retry_after_s
from shared.plan import DRAINING_FILE, Plan


class LiveResource:
    """`GET /health/live`: 200 as long as this process answers requests, whatever the slots' states."""

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.media = {"status": "live"}


class ReadyResource:
    """`GET /health/ready`: 200 while every model has a warm slot and the server does not drain, else 503.

    Its body shows the models and each slot's state, also with a 503.
    """

    def __init__(self, plan: Plan, admission: Admission, run_path: Path) -> None:
        self._plan = plan
        self._admission = admission
        # The supervisor, another process, creates it before it stops the gateway.
        self._draining_file = run_path / DRAINING_FILE

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
                "pid": state.pid,
            }
            for slot, state in zip(self._plan.slots, states, strict=True)
        ]
        warm_models = {slot["model"] for slot in slots if slot["state"] == "warm"}
        if self._draining_file.exists():
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


class MetricsResource:
    """`GET /metrics`: the gateway's metrics and every slot's, in Prometheus' text format."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def on_get(self, _req: falcon.Request, resp: falcon.Response) -> None:
        resp.content_type = CONTENT_TYPE_LATEST
        resp.data = self._metrics.exposition()
