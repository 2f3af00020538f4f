"""The gateway's WSGI app.

`create_app` assembles routes and middleware from collaborators that exist already. `build`, which gunicorn calls,
makes them; it alone reads the environment and starts threads.
"""

from __future__ import annotations

import difflib
import gc
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import falcon
import structlog
from falcon.routing import CompiledRouter

from gateway.api.autocompletion import Autocompletion, PredictionSettings
from gateway.api.error_handlers import add_error_handlers
from gateway.api.openai import error_format as openai
from gateway.api.page import ASKED_PATH
from gateway.entrance import Entrance
from gateway.generation.fanout import MAX_BRANCHES_AT_ONCE, Fanout
from gateway.generation.request_starter import RequestStarter
from gateway.jobs.executor import JobExecutor
from gateway.jobs.opening import open_store
from gateway.jobs.queue import JobQueue
from gateway.metrics import Metrics
from gateway.middleware.body_limits import BodyLimits
from gateway.middleware.origins import Origins
from gateway.middleware.request_log import Request, RequestLog
from gateway.middleware.traces import Traces
from gateway.pool.access import RemoteAccess
from gateway.pool.admission import Admission
from gateway.pool.client import SlotClient
from gateway.pool.retries import RetryBudget
from gateway.pool.tokenizing import PoolTokenizer
from gateway.pool.watcher import PoolWatcher
from gateway.routes import HEALTH_PATHS, Route, make_routes
from gateway.server.request_parser import RequestHead
from gateway.server.served_app import Arrival, ServedApp
from gateway.server.wsgi import decode_path
from shared.api_keys import KeyFile
from shared.cancellation import HangupWatcher
from shared.errors import TercetError
from shared.plan import Plan, read_plan
from shared.settings import Settings
from shared.telemetry import configure_structlog
from shared.tracing import Tracing, start_tracing

# The share of the pool that jobs may use, if each has this many branches; on a CPU, where a step takes longer with each
# row, also of the requests that run at a time. The rest is left to clients that wait.
JOB_SHARE = 0.25
BRANCHES_PER_REQUEST = 3
# How alike two names must be (0 to 1): `completion` and `completions` are, `chat` and `static` are not.
MIN_SIMILARITY = 0.75
# The names of a path that are compared, at most: a path of thousands would take a thread for a second.
MAX_NAMES = 4
# Objects that are new since the last collection, which walks them. Python's default, 700, is reached by the requests
# in progress, whose objects end without a collection.
MAX_YOUNG_OBJECTS = 10_000
log = structlog.get_logger()


class GatewayApp(falcon.App[falcon.Request, falcon.Response], ServedApp):
    """The WSGI app, and what its server needs of the parts behind it.

    Attributes:
        entrance: judges requests by their heads; set once it is made, as `routes`.
        routes: by URI template.
        draining: readiness is off, because the process stops and none takes its place.
    """

    def __init__(
        self,
        admission: Admission,
        fanout: Fanout,
        metrics: Metrics,
        jobs: JobExecutor | None,
        tokenizer: PoolTokenizer,
        prefix: str,
    ) -> None:
        """
        Args:
            prefix: the path of the public URL, which a proxy may leave in the path of a request.
        """
        self.router = CompiledRouter()
        super().__init__(router=self.router, request_type=Request)
        self.entrance: Entrance
        self.routes: dict[str, Route] = {}
        self.draining = threading.Event()
        self._admission = admission
        self._fanout = fanout
        self._metrics = metrics
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._prefix = prefix

    def __call__(self, env: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        asked = env["PATH_INFO"]
        env["PATH_INFO"] = served = self._served(asked)
        if served != asked:
            env[ASKED_PATH] = asked
        return super().__call__(env, start_response)

    def admit(self, head: RequestHead, client: object) -> Arrival:
        address = client[0] if isinstance(client, tuple) else ""
        return self.entrance.admit(
            head.method, self._served(decode_path(head.path)), head.version, head.fields, address
        )

    def refuse(self, head: RequestHead, refusal: TercetError, start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = self._served(decode_path(head.path))
        return self.entrance.refuse(head, path, self.find_resource(path), refusal, start_response)

    def charge(self, arrival: Arrival, num_bytes: int) -> None:
        self.entrance.charge(arrival, num_bytes)

    def _served(self, path: str) -> str:
        """The path without repeated slashes or one at its end, and without the prefix, unless it is a route with it.

        Clients and proxies add slashes (`/v1//models`, `/generate/`). Routing, API keys and errors all see this path.
        """
        if "//" in path or (path.endswith("/") and path != "/"):
            path = "/" + "/".join(filter(None, path.split("/")))
        prefix = self._prefix
        if prefix and (path == prefix or path.startswith(f"{prefix}/")) and self.router.find(path) is None:
            return path[len(prefix) :] or "/"
        return path

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

    def find_route(self, path: str) -> Route | None:
        found = self.router.find(path)
        return None if found is None else self.routes.get(found[3] or "")

    def find_resource(self, path: str) -> object:
        """The resource that a path is routed to, or None. Unknown paths of OpenAI's API are as its completions."""
        route = self.router.find(path)
        if route is None and path.startswith(openai.PREFIX):
            route = self.router.find("/v1/completions")
        return None if route is None else route[0]

    def find_near(self, path: str) -> str | None:
        """Methods and path of the route that was probably meant, as "POST /v1/completions"; None: none is near."""
        routes = {route.rpartition("/")[2]: route for route in self.routes if not route.endswith(("/", "}"))}
        for name in path.lower().split("/")[: -MAX_NAMES - 1 : -1]:  # the last first
            for found in difflib.get_close_matches(name, routes, n=1, cutoff=MIN_SIMILARITY):
                resource = self.routes[routes[found]].resource
                methods = [method for method in ("GET", "POST") if hasattr(resource, f"on_{method.lower()}")]
                return f"{' or '.join(methods)} {routes[found]}"
        return None


def create_app(
    *,
    settings: Settings,
    admission: Admission,
    fanout: Fanout,
    metrics: Metrics,
    hangups: HangupWatcher,
    jobs: JobExecutor | None = None,
    clients: Mapping[int, SlotClient] | Sequence[SlotClient] = (),
    tracing: Tracing | None = None,
) -> GatewayApp:
    """The app over its collaborators. Reads no environment, and starts no threads but those of `jobs`.

    Args:
        clients: clients of the slots, by slot index; they are called for tokens only.
    """
    limits, access = settings.limits, settings.access
    tokenizer = PoolTokenizer(admission, clients)
    starter = RequestStarter(admission.models, fanout, hangups, limits.key_concurrency, limits.timeout_s)
    key_file = KeyFile(access.keys) if settings.requires_keys and access.keys else None

    prediction = PredictionSettings(settings.model.predict_temperature, settings.model.min_usefulness)
    autocompletion = Autocompletion(starter, settings.model.similarity, prediction, settings.model.min_familiarity)

    request_log, traces = RequestLog(metrics), None if tracing is None else Traces(tracing)
    origins, body_limits = Origins(settings, HEALTH_PATHS), BodyLimits(limits.max_body_bytes)
    app = GatewayApp(admission, fanout, metrics, jobs, tokenizer, settings.public_path)
    app.entrance = Entrance(app.find_route, origins, key_file, limits, fanout.check, metrics, request_log, traces)
    # The request log comes first: it sets the request id that error responses carry. Origins come before keys and body
    # limits: a page of a listed origin can then read why its request was refused.
    app.add_middleware([*([] if traces is None else [traces]), request_log, origins, app.entrance, body_limits])
    add_error_handlers(app, app.find_resource, app.find_near, metrics, access.public_url)
    app.routes = make_routes(
        settings, admission, metrics, starter, autocompletion, tokenizer, jobs, app.draining.is_set
    )
    for path, route in app.routes.items():
        app.add_route(path, route.resource)
    if jobs is not None:
        is_revoked = None if key_file is None else key_file.is_revoked
        jobs.start(autocompletion.compute, is_revoked)
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
    tracing = start_tracing("tercet-gateway") if settings.server.traces else None
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
