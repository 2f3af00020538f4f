"""The gateway's WSGI app.

`create_app` assembles routes and middleware from collaborators that exist already. `build`, which gunicorn calls,
makes them; it alone reads the environment and starts threads.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import falcon
import structlog
from falcon.routing import CompiledRouter

from gateway.api.autocomplete import AutocompleteResource
from gateway.api.autocompletion import Autocompletion, PredictionSettings
from gateway.api.error_handlers import add_error_handlers
from gateway.api.feedback import FeedbackResource, FeedbackStore
from gateway.api.health import LiveResource, MetricsResource, ReadyResource
from gateway.api.job_computation import compute_job
from gateway.api.jobs import JobResource, JobsResource, JobSubmitter
from gateway.api.openai.error_format import OPENAI_ERRORS, UnknownRoutes
from gateway.api.openai.resources import CompletionsResource, ModelResource, ModelsResource
from gateway.api.openapi import DocumentResource, build_document
from gateway.api.page import INDEX, AssetResource, StaticResource, docs_page, read_assets, service_worker
from gateway.api.root import RootResource
from gateway.api.sagemaker import Dialect, InvocationsResource, JumpStartResponder, PatsnapResponder
from gateway.api.slots import SlotsResource, wants_page
from gateway.api.tgi import (
    COMPLETE,
    COMPLETE_AS_STREAM,
    EndpointResource,
    GenerateResource,
    InfoResource,
    TgiResponder,
)
from gateway.api.tgi_schema import TGI_ERRORS
from gateway.api.tokens import TokenizeResource, TokenizerInfoResource
from gateway.generation.fanout import MAX_BRANCHES_AT_ONCE, Fanout
from gateway.generation.request_starter import RequestStarter
from gateway.generation.retry_budget import RetryBudget
from gateway.generation.sessions import Sessions
from gateway.jobs.executor import JobExecutor
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from gateway.metrics import Metrics
from gateway.middleware.api_keys import ApiKeyCheck
from gateway.middleware.body_limits import BodyLimits
from gateway.middleware.origins import Origins
from gateway.middleware.rate_limits import RateLimits
from gateway.middleware.request_log import Request, RequestLog
from gateway.middleware.traces import Traces
from gateway.paths import ASKED_PATH, nearest_route, served_path
from gateway.pool.access import RemoteAccess
from gateway.pool.admission import Admission
from gateway.pool.client import SlotClient
from gateway.pool.quota import OwnerQuota
from gateway.pool.tokenizing import PoolTokenizer
from gateway.pool.watcher import PoolWatcher
from gateway.server.classes import classify
from gateway.server.early_refusals import find_early_refusal
from gateway.server.request_parser import RequestHead
from gateway.server.served_app import ServedApp
from gateway.server.work import Work
from shared.api_keys import KeyFile
from shared.errors import TercetError
from shared.hangups import HangupWatcher
from shared.plan import Plan, read_plan
from shared.settings import Settings
from shared.telemetry import configure_structlog
from shared.tracing import NO_TRACING, Tracing, start_tracing

READY_PATHS = ("/health/ready", "/health", "/healthz", "/ping")
HEALTH_PATHS = ("/health/live", *READY_PATHS)
# Classes of requests, by route; all others are reads. Each class has threads and a queue of its own.
WORK = {
    **dict.fromkeys(
        ("/autocomplete", "/v1/completions", "/generate", "/generate_stream", "/invocations", "/"), Work.COMPLETIONS
    ),
    **dict.fromkeys(("/tokenize", "/tokenizer_info"), Work.TOKENIZING),
    **dict.fromkeys(("/jobs", "/jobs/{}"), Work.JOBS),
    "/feedback": Work.FEEDBACK,
    **dict.fromkeys(HEALTH_PATHS, Work.HEALTH),
}
# What may be read without an API key where the server requires one: probes, the API's description, and the pages with
# their field for the key.
# Every route that is not listed needs a key.
STATIC_ROUTES = ("/static/{name}", "/static/vendor/{name}")
OPEN_ROUTES = frozenset({"/", *STATIC_ROUTES, "/service_worker.js", "/docs", "/openapi.json", *HEALTH_PATHS})
# Routes that need a key, but whose page does not: it shows nothing before it has the key.
OPEN_PAGES = {"/slots": wants_page}
# The share of the pool that jobs may use, if each has this many branches; on a CPU, where a step takes longer with each
# row, also of the requests that run at a time. The rest is left to clients that wait.
JOB_SHARE = 0.25
BRANCHES_PER_REQUEST = 3
UNKNOWN_OPENAI_ROUTES = UnknownRoutes()
# Objects that are new since the last collection, which walks them. Python's default, 700, is reached by the requests
# in progress, whose objects end without a collection.
MAX_YOUNG_OBJECTS = 10_000
log = structlog.get_logger()


class GatewayApp(falcon.App[falcon.Request, falcon.Response], ServedApp):
    """The WSGI app, and what its server needs of the parts behind it.

    Attributes:
        router: finds a path's resource.
        resources: resources by URI template.
        draining: readiness is off, because the process stops and none takes its place.
    """

    def __init__(
        self,
        admission: Admission,
        fanout: Fanout,
        metrics: Metrics,
        jobs: JobExecutor | None,
        tokenizer: PoolTokenizer,
        *,
        needs_keys: bool,
        prefix: str,
    ) -> None:
        """
        Args:
            prefix: the path of the public URL, which a proxy may leave in the path of a request.
        """
        self.router = CompiledRouter()
        super().__init__(router=self.router, request_type=Request)
        self.resources: dict[str, object] = {}
        self.draining = threading.Event()
        self._admission = admission
        self._fanout = fanout
        self._metrics = metrics
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._needs_keys = needs_keys
        self._prefix = prefix

    def __call__(self, env: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        asked = env["PATH_INFO"]
        env["PATH_INFO"] = served = served_path(asked, self._prefix, lambda path: self.router.find(path) is not None)
        if served != asked:
            env[ASKED_PATH] = asked
        return super().__call__(env, start_response)

    def classify(self, head: RequestHead) -> tuple[Work, str]:
        return classify(head.raw, WORK, self._prefix, needs_keys=self._needs_keys)

    def find_early_refusal(self, head: RequestHead) -> TercetError | None:
        return find_early_refusal(head.raw, self._fanout, self._metrics, needs_keys=self._needs_keys)

    @property
    def has_warm_slot(self) -> bool:
        return any(state.state == "warm" for state in self._admission.states().values())

    @property
    def num_arrived(self) -> int:
        return self._admission.num_arrived

    @property
    def is_computing(self) -> bool:
        has_jobs = self._jobs is not None and self._jobs.num_open > 0
        return has_jobs or any(self._admission.in_flight())

    def watch_server(self, gauges: Mapping[str, tuple[str, Callable[[], float]]]) -> None:
        self._metrics.watch_server(gauges)

    def count_refused_connection(self, code: str) -> None:
        self._metrics.refused_requests.labels(reason=code).inc()

    def count_unparsed_request(self, status: int) -> None:
        self._metrics.requests.labels(route="(none)", status=str(status)).inc()

    def begin_stop(self, *, is_replaced: bool) -> None:
        if not is_replaced:
            self.draining.set()
        if self._jobs is not None:
            self._jobs.stop()

    def cancel_all(self, error: TercetError) -> None:
        self._fanout.cancel_all(error)
        self._tokenizer.cancel_all(error)

    def end_stop(self, timeout_s: float) -> None:
        if self._jobs is not None:
            self._jobs.join(timeout_s)

    def add_route(self, uri_template: str, resource: Any, **kwargs: Any) -> None:
        """As Falcon's; what answers GET answers HEAD too, of which the server sends no body."""
        if hasattr(resource, "on_get"):
            resource.on_head = resource.on_get
        super().add_route(uri_template, resource, **kwargs)
        self.resources[uri_template] = resource

    def find_resource(self, req: falcon.Request) -> object:
        """The resource or the sink that a request is routed to, or None."""
        route = self.router.find(req.path, req)
        if route is not None:
            return route[0]
        return UNKNOWN_OPENAI_ROUTES if req.path.startswith(UNKNOWN_OPENAI_ROUTES.prefix) else None


def create_app(
    *,
    settings: Settings,
    admission: Admission,
    fanout: Fanout,
    metrics: Metrics,
    hangups: HangupWatcher,
    jobs: JobExecutor | None = None,
    clients: Mapping[int, SlotClient] | Sequence[SlotClient] = (),
    tracing: Tracing = NO_TRACING,
) -> GatewayApp:
    """The app over its collaborators. Reads no environment, and starts no threads but those of `jobs`.

    Args:
        clients: clients of the slots, by slot index; they are called for tokens only.
    """
    tokenizer = PoolTokenizer(admission, clients)
    app = GatewayApp(
        admission,
        fanout,
        metrics,
        jobs,
        tokenizer,
        needs_keys=settings.requires_keys,
        prefix=settings.public_path,
    )
    key_file = KeyFile(settings.access.keys) if settings.requires_keys and settings.access.keys else None
    keys = ApiKeyCheck(
        key_file,
        OPEN_ROUTES,
        OPEN_PAGES,
        app.router.find,
        RateLimits(),
        settings.limits.key_rate,
    )
    # The request log comes first: it sets the request id that error responses carry. Origins come before keys and body
    # limits: a page of a listed origin can then read why its request was refused.
    traces = [] if tracing is NO_TRACING else [Traces(tracing)]
    body_limits = BodyLimits(settings.limits.max_body_bytes)
    app.add_middleware([*traces, RequestLog(metrics), Origins(settings, HEALTH_PATHS), keys, body_limits])
    public_url = settings.access.public_url
    add_error_handlers(app, app.find_resource, partial(nearest_route, resources=app.resources), metrics, public_url)
    quota = OwnerQuota(settings.limits.key_concurrency)
    starter = RequestStarter(admission.models, fanout, quota, Sessions(), hangups, settings.limits.timeout_s)
    feedback_store = FeedbackStore(metrics)
    submitter = None if jobs is None else JobSubmitter(jobs, settings.public_path)
    prediction = PredictionSettings(settings.model.predict_temperature, settings.model.min_usefulness)
    autocompletion = Autocompletion(starter, settings.model.similarity, prediction, settings.model.min_familiarity)
    autocomplete = AutocompleteResource(starter, autocompletion, feedback_store, submitter)
    completions = CompletionsResource(starter, settings.model.similarity)
    tgi = TgiResponder(starter, tokenizer, settings.model.similarity)
    if settings.server.sagemaker:
        app.add_route("/ping", ReadyResource(admission, app.draining.is_set, needs_every_model=False))
        dialects = {
            "input": Dialect(PatsnapResponder(starter).respond),
            "inputs": Dialect(tgi.respond, TGI_ERRORS),
            "text_inputs": Dialect(JumpStartResponder(tgi).respond, TGI_ERRORS),
            "prompt": Dialect(completions.respond, OPENAI_ERRORS),
            "context": Dialect(autocomplete.respond),
        }
        app.add_route("/invocations", InvocationsResource(dialects))
        return app
    models = ModelsResource(starter)
    ready = ReadyResource(admission, app.draining.is_set)
    assets = read_assets()
    routes: dict[str, object] = {
        "/autocomplete": autocomplete,
        "/feedback": FeedbackResource(feedback_store),
        "/v1/completions": completions,
        "/v1/models": models,
        "/v1/models/{model}": ModelResource(starter, models),
        "/generate": GenerateResource(tgi, "object", COMPLETE),
        "/generate_stream": GenerateResource(tgi, "stream", COMPLETE_AS_STREAM),
        "/info": InfoResource(admission, starter),
        "/endpoint": EndpointResource(public_url),
        "/tokenize": TokenizeResource(starter, tokenizer),
        "/tokenizer_info": TokenizerInfoResource(starter, tokenizer),
        "/health/live": LiveResource(),
        **dict.fromkeys(READY_PATHS, ready),
        "/slots": SlotsResource(admission, metrics, assets),
        "/metrics": MetricsResource(metrics),
        "/": RootResource(assets[INDEX], tgi),
        "/docs": AssetResource(docs_page(assets), "The documentation of this API, with a form to try each request"),
        "/service_worker.js": AssetResource(
            service_worker(assets), "The service worker of the web editor", "The script."
        ),
        "/static/{name}": StaticResource(assets),
        "/static/vendor/{name}": StaticResource(assets, "vendor/"),
    }
    if jobs is not None and submitter is not None:
        routes |= {"/jobs": JobsResource(submitter, autocompletion.check), "/jobs/{job_id}": JobResource(jobs)}
        is_revoked = None if key_file is None else key_file.is_revoked
        jobs.start(partial(compute_job, starter, autocompletion), is_revoked)
    documented = {**routes, "/openapi.json": DocumentResource}
    document = build_document(
        documented, open_routes=OPEN_ROUTES, needs_keys=settings.requires_keys, public_url=public_url
    )
    routes["/openapi.json"] = DocumentResource(document)
    for path, resource in routes.items():
        app.add_route(path, resource)

    def refuse_unknown(req: falcon.Request, resp: falcon.Response, **_: object) -> None:
        near = nearest_route(req.path, routes)
        if near is not None and UNKNOWN_OPENAI_ROUTES.prefix not in near:
            raise falcon.HTTPNotFound
        UNKNOWN_OPENAI_ROUTES(req, resp)

    app.add_sink(refuse_unknown, UNKNOWN_OPENAI_ROUTES.prefix)
    return app


def build() -> GatewayApp:
    """The app of this process: settings from the environment, the plan from the run directory, one thread per slot
    that follows its state, and one for each host name of `TERCET_POOL`."""
    settings = Settings.load(os.environ)
    configure_structlog("gateway", settings.server.log)
    bind, has_keys = settings.server.bind, settings.access.keys is not None
    if not bind.is_loopback and not settings.server.sagemaker and not (has_keys and settings.uses_tls):
        # Other machines may use the server without a key, or read texts and keys on their way.
        log.warning("address_exposed", address=str(bind), keys=has_keys, tls=settings.uses_tls)
    plan = read_plan(settings.run_path)
    admission = Admission(plan, settings.pool.placement, settings.limits.queue)
    metrics = Metrics(admission.states, lambda: admission.num_waiting)
    access = RemoteAccess(settings.remote.pool_key, settings.remote.pool_ca) if settings.remote.pool else None
    pool = PoolWatcher(plan, admission, settings.pool.ack_ms / 1e3, settings.remote.pool, access)
    num_threads = MAX_BRANCHES_AT_ONCE * (plan.max_running + settings.limits.queue)
    largest_batch = max((slot.max_batch for slot in plan.slots), default=settings.pool.max_batch)
    retry_budget = RetryBudget(min_retries=largest_batch)
    tracing = start_tracing("tercet-gateway") if settings.server.traces else NO_TRACING
    fanout = Fanout(pool.clients, admission, metrics, num_threads, retry_budget, tracing)
    # What is loaded by now stays until exit. Frozen, it is not scanned by each full collection, which delays requests.
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS)
    return create_app(
        settings=settings,
        admission=admission,
        fanout=fanout,
        metrics=metrics,
        hangups=HangupWatcher(),
        jobs=_make_jobs(settings, plan, admission, fanout, metrics),
        clients=pool.clients,
        tracing=tracing,
    )


def _make_jobs(
    settings: Settings, plan: Plan, admission: Admission, fanout: Fanout, metrics: Metrics
) -> JobExecutor | None:
    if settings.job_store == "none" or settings.server.sagemaker:
        return None
    queue = JobQueue(
        open_store(settings.job_store),
        ttl_s=settings.jobs.ttl_s,
        max_open=settings.jobs.queue,
        count=lambda event: metrics.jobs.labels(event=event).inc(),
    )
    num_threads = max(1, int(JOB_SHARE * plan.max_running / BRANCHES_PER_REQUEST))
    jobs = JobExecutor(
        queue,
        num_threads=num_threads,
        has_room=lambda: has_room_for_job(admission, fanout.num_awaited, jobs.num_running),
    )
    metrics.watch_jobs(lambda: jobs.num_open)
    return jobs


def has_room_for_job(admission: Admission, num_awaited: int, num_running: int) -> bool:
    """Whether a job may start: no request waits for room, and the jobs keep to their share.

    Args:
        num_awaited: requests of clients that run or wait.
        num_running: jobs that run now.
    """
    slots = admission.slots()
    if admission.num_waiting or not any(slot.state.state == "warm" for slot in slots):
        return False
    most = JOB_SHARE * admission.capacity() / BRANCHES_PER_REQUEST
    if num_awaited and any(slot.device == "cpu" for slot in slots):
        most = min(most, num_awaited * JOB_SHARE / (1 - JOB_SHARE))
    return num_running < max(1, int(most))
