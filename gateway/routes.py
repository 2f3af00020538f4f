"""The routes: what answers each path, which class of work its requests are, and who may read it without an API key.

Every route that does not say so needs a key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.autocomplete import AutocompleteResource
from gateway.api.autocompletion import Autocompletion
from gateway.api.feedback import FeedbackResource, FeedbackStore
from gateway.api.health import LiveResource, MetricsResource, ReadyResource
from gateway.api.jobs import JobResource, JobsResource, JobSubmitter
from gateway.api.openai.error_format import OPENAI_ERRORS
from gateway.api.openai.resources import CompletionsResource, ModelResource, ModelsResource
from gateway.api.openapi import DocumentResource, build_document
from gateway.api.page import INDEX, AssetResource, StaticResource, docs_page, read_assets, service_worker
from gateway.api.root import RootResource
from gateway.api.sagemaker import InvocationDialect, InvocationsResource, JumpStartResponder, PatsnapResponder
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
from gateway.generation.request_starter import RequestStarter
from gateway.jobs.executor import JobExecutor
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from gateway.pool.tokenizing import TEXT_WEIGHT, PoolTokenizer
from gateway.server.served_app import Work
from shared.settings import Settings

READY_PATHS = ("/health/ready", "/health", "/healthz", "/ping")
HEALTH_PATHS = ("/health/live", *READY_PATHS)
# The least that a request costs. A job takes 4.4 ms of the gateway's Python, a reading of the metrics 1.2: at 8 MB/s an
# owner's jobs take at most 27 % of it.
MIN_BYTES, METRICS_BYTES, JOB_BYTES = 2 << 10, 128 << 10, 128 << 10


def is_always_open(_fields: Mapping[str, str]) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Route:
    """
    Attributes:
        resource: answers it, as Falcon has it.
        work: class of its requests. Requests to read a route of completions are reads.
        is_open: whether a request to read it needs no key, from its header fields by their names of WSGI. None: it
            needs one.
        weight: what a byte of its requests costs, in bytes of a completion.
        min_bytes: the least that a request costs.
    """

    resource: object
    work: Work = Work.READS
    is_open: Callable[[Mapping[str, str]], bool] | None = None
    weight: int = 1
    min_bytes: int = MIN_BYTES


def open_paths(routes: Mapping[str, Route]) -> set[str]:
    """URI templates of the routes that all may read without a key."""
    return {path for path, route in routes.items() if route.is_open is is_always_open}


def make_routes(
    settings: Settings,
    admission: Admission,
    metrics: Metrics,
    starter: RequestStarter,
    autocompletion: Autocompletion,
    tokenizer: PoolTokenizer,
    jobs: JobExecutor | None,
    is_draining: Callable[[], bool],
) -> dict[str, Route]:
    """All routes of a gateway, by URI template."""
    feedback = FeedbackStore(metrics)
    submitter = None if jobs is None else JobSubmitter(jobs, settings.public_path)
    autocomplete = AutocompleteResource(starter, autocompletion, feedback, submitter)
    completions = CompletionsResource(starter, settings.model.similarity)
    tgi = TgiResponder(starter, tokenizer, settings.model.similarity)
    if settings.server.sagemaker:
        ready = ReadyResource(admission, is_draining, needs_every_model=False)
        dialects = {
            "input": InvocationDialect(PatsnapResponder(tgi).respond),
            "inputs": InvocationDialect(tgi.respond, TGI_ERRORS),
            "text_inputs": InvocationDialect(JumpStartResponder(tgi).respond, TGI_ERRORS),
            "prompt": InvocationDialect(completions.respond, OPENAI_ERRORS),
            "context": InvocationDialect(autocomplete.respond),
        }
        return {
            "/ping": Route(ready, Work.HEALTH, is_always_open),
            "/invocations": Route(InvocationsResource(dialects), Work.COMPLETIONS),
        }
    models, assets = ModelsResource(starter), read_assets()
    worker = AssetResource(service_worker(assets), "The service worker of the web editor", "The script.")
    docs = AssetResource(docs_page(assets), "The documentation of this API, with a form to try each request")
    ready = ReadyResource(admission, is_draining)
    routes = {
        "/autocomplete": Route(autocomplete, Work.COMPLETIONS),
        "/feedback": Route(FeedbackResource(feedback)),
        "/v1/completions": Route(completions, Work.COMPLETIONS),
        "/v1/models": Route(models),
        "/v1/models/{model}": Route(ModelResource(starter, models)),
        "/generate": Route(GenerateResource(tgi, "object", COMPLETE), Work.COMPLETIONS),
        "/generate_stream": Route(GenerateResource(tgi, "stream", COMPLETE_AS_STREAM), Work.COMPLETIONS),
        "/info": Route(InfoResource(admission, starter), Work.TOKENIZING),  # may wait for a worker
        "/endpoint": Route(EndpointResource(settings.access.public_url)),
        "/tokenize": Route(TokenizeResource(starter, tokenizer), Work.TOKENIZING, weight=TEXT_WEIGHT),
        "/tokenizer_info": Route(TokenizerInfoResource(starter, tokenizer), Work.TOKENIZING),
        "/health/live": Route(LiveResource(), Work.HEALTH, is_always_open),
        **dict.fromkeys(READY_PATHS, Route(ready, Work.HEALTH, is_always_open)),
        "/slots": Route(SlotsResource(admission, metrics, assets), is_open=wants_page),
        "/metrics": Route(MetricsResource(metrics), min_bytes=METRICS_BYTES),
        "/": Route(RootResource(assets[INDEX], tgi), Work.COMPLETIONS, is_always_open),
        "/docs": Route(docs, is_open=is_always_open),
        "/service_worker.js": Route(worker, is_open=is_always_open),
        "/static/{name}": Route(StaticResource(assets), is_open=is_always_open),
        "/static/vendor/{name}": Route(StaticResource(assets, "vendor/"), is_open=is_always_open),
    }
    if jobs is not None and submitter is not None:
        routes["/jobs"] = Route(JobsResource(submitter, autocompletion.check), Work.JOBS)
        routes["/jobs/{job_id}"] = Route(JobResource(jobs), Work.JOBS)
    routes["/openapi.json"] = Route(DocumentResource, is_open=is_always_open)
    document = describe(routes, needs_keys=settings.requires_keys, public_url=settings.access.public_url)
    return routes | {"/openapi.json": Route(DocumentResource(document), is_open=is_always_open)}


def describe(routes: Mapping[str, Route], *, needs_keys: bool, public_url: str | None = None) -> dict[str, Any]:
    """The OpenAPI document of the routes, as `build_document`."""
    resources = {path: route.resource for path, route in routes.items()}
    return build_document(resources, open_routes=open_paths(routes), needs_keys=needs_keys, public_url=public_url)
