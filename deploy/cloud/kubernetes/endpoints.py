"""The API in the form that Google Cloud Endpoints takes: OpenAPI 3.1 with Google's extensions.

    python -m deploy.cloud.kubernetes.endpoints --host tercet.endpoints.my-project.cloud.goog >openapi.json

The proxy of Cloud Endpoints routes by paths and methods, serves no others, checks an API key, and never looks into
bodies: the document names operations and parameters, and leaves bodies and answers to the gateway's own document.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from gateway.app import create_app
from gateway.generation.fanout import Fanout
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from gateway.pool.retries import RetryBudget
from gateway.routes import describe
from shared.cancellation import HangupWatcher
from shared.plan import Model, Plan
from shared.settings import Settings

Json = dict[str, Any]

# For operators: the proxy adds the gateway's key to each call, so that every caller could read them.
CLOSED_PATHS = frozenset({"/metrics", "/slots"})
# Google's API key is read from this header, which Tercet's clients send as well, or from the query (`key`).
API_KEY = {"type": "apiKey", "name": "x-api-key", "in": "header"}
# What the proxy needs of an operation. Where `security` is empty, the route is open without a key, as in the gateway.
OPERATION_FIELDS = ("operationId", "summary", "parameters", "security")
ANSWERS = {"default": {"description": "As the gateway's own document says."}}
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


def gateway_document() -> Json:
    """`GET /openapi.json` of a gateway with API keys and without jobs, as overlays/gke runs it."""
    settings = Settings.load({"TERCET_JOBS": "none"})
    plan = Plan({}, [Model("any", "", "", n_ctx=1, vocab_size=1)], [])
    admission = Admission(plan, settings.pool.placement, settings.limits.queue)
    metrics = Metrics(admission.states, lambda: 0)
    fanout = Fanout([], admission, metrics, num_threads=1, retry_budget=RetryBudget(1))
    app = create_app(
        settings=settings,
        admission=admission,
        fanout=fanout,
        metrics=metrics,
        hangups=HangupWatcher(),
    )
    return describe(app.routes, needs_keys=True)


def endpoints_document(document: Mapping[str, Any], host: str, address: str | None = None) -> Json:
    """The document for `gcloud endpoints services deploy`.

    Args:
        document: `GET /openapi.json` of the gateway.
        host: the service's name, which is also its host name: `<api>.endpoints.<project>.cloud.goog`.
        address: IP address that Cloud Endpoints' DNS gives to this name; None: it gives none.

    Raises:
        ValueError: the host is not a host name.
    """
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name; use <api>.endpoints.<project>.cloud.goog")
    endpoint: Json = {"allowCors": True}  # preflight requests reach the gateway, which answers them
    if address is not None:
        endpoint["target"] = address
    return {
        "openapi": document["openapi"],
        "info": document["info"],
        "servers": [{"url": f"https://{host}", "x-google-endpoint": endpoint}],
        "x-google-api-management": {},
        "components": {"securitySchemes": {"api_key": API_KEY}},
        "security": [{"api_key": []}],
        "paths": {
            path: {
                method: {name: operation[name] for name in OPERATION_FIELDS if name in operation}
                | {"responses": ANSWERS}
                for method, operation in item.items()
            }
            for path, item in document["paths"].items()
            if path not in CLOSED_PATHS
        },
    }


def main() -> None:
    """Print the document for Cloud Endpoints."""
    parser = argparse.ArgumentParser(description="Print the gateway's API for Google Cloud Endpoints.")
    parser.add_argument("--host", required=True, help="<api>.endpoints.<project>.cloud.goog")
    parser.add_argument("--address", help="IP address of the load balancer")
    options = parser.parse_args()
    try:
        document = endpoints_document(gateway_document(), options.host, options.address)
    except ValueError as error:
        sys.exit(f"{parser.prog}: {error}")
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
