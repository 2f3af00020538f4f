"""The gateway's WSGI app: `create_app` puts collaborators together, `build` alone reads the environment."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TypeAlias

import falcon

from gateway.api.autocomplete import AutocompleteResource
from gateway.api.feedback import FeedbackResource, FeedbackStore
from gateway.api.health import LiveResource, MetricsResource, ReadyResource
from gateway.api.page import PageResource, StaticResource, read_assets
from gateway.generation.fanout import Fanout
from gateway.metrics import Metrics
from gateway.middleware.boundary import Boundary, render_error, render_http_error, render_unknown
from gateway.pool.admission import Admission
from gateway.pool.watcher import PoolWatcher
from shared.errors import TercetError
from shared.hangups import HangupWatcher
from shared.plan import Plan, read_plan
from shared.settings import Settings
from shared.telemetry import configure_structlog

App: TypeAlias = falcon.App[falcon.Request, falcon.Response]
READY_PATHS = ("/health/ready", "/health", "/healthz", "/ping")
# Branches of later waves wait on a thread too; a request has at most eight.
MAX_BRANCHES_PER_REQUEST = 8


def create_app(
    *,
    settings: Settings,
    plan: Plan,
    admission: Admission,
    fanout: Fanout,
    metrics: Metrics,
    hangups: HangupWatcher,
    run_path: Path,
) -> App:
    """The app over collaborators that are made already; starts nothing."""
    app = falcon.App(middleware=[Boundary(settings, metrics)])
    app.add_error_handler(Exception, render_unknown)
    app.add_error_handler(falcon.HTTPError, render_http_error)
    app.add_error_handler(TercetError, render_error)
    feedback_store = FeedbackStore(metrics)
    autocomplete = AutocompleteResource(plan, fanout, hangups, feedback_store, settings.timeout_s, settings.similarity)
    app.add_route("/autocomplete", autocomplete)
    app.add_route("/feedback", FeedbackResource(feedback_store))
    ready = ReadyResource(plan, admission, run_path)
    for path in READY_PATHS:
        app.add_route(path, ready)
    app.add_route("/health/live", LiveResource())
    app.add_route("/metrics", MetricsResource(metrics))
    assets = read_assets()
    app.add_route("/", PageResource(assets))
    app.add_route("/static/{name}", StaticResource(assets))
    return app


def build() -> App:
    """The app as this process's environment asks for it, following its pool."""
    settings = Settings.load(os.environ)
    configure_structlog("gateway", settings.log)
    plan = read_plan(settings.run_path)
    admission = Admission(plan, settings.placement, settings.queue)
    metrics = Metrics(admission)
    pool = PoolWatcher(plan, admission, settings.ack_ms / 1e3)
    num_threads = MAX_BRANCHES_PER_REQUEST * (plan.max_running + settings.queue)
    fanout = Fanout(pool.clients, admission, metrics, num_threads)
    gc.freeze()  # modules stay: to look through them for garbage again and again would hold requests up
    return create_app(
        settings=settings,
        plan=plan,
        admission=admission,
        fanout=fanout,
        metrics=metrics,
        hangups=HangupWatcher(),
        run_path=settings.run_path,
    )
