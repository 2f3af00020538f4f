"""The API in the form that Google Cloud Endpoints takes: OpenAPI 2.0, with Google's extensions.

    python -m deploy.cloud.kubernetes.endpoints --host tercet.endpoints.my-project.cloud.goog >openapi.json

The proxy of Cloud Endpoints routes by paths and methods and checks an API key, and never looks into bodies: the
document names operations, parameters and statuses, and leaves the schemas of bodies to the gateway's own document.
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

METHODS = ("get", "put", "post", "delete", "patch")
# For operators: the proxy adds the gateway's key to each call, so that every caller could read them.
CLOSED_PATHS = frozenset({"/metrics", "/slots"})
# Google's API key is read from this header, which Tercet's clients send as well, or from the query (`key`).
API_KEY = {"type": "apiKey", "name": "x-api-key", "in": "header"}
# JSON Schema's keywords that a parameter of OpenAPI 2.0 has too.
_PARAMETER_KEYWORDS = ("type", "enum", "minimum", "maximum", "minLength", "maxLength", "pattern")
_TYPES = {"string", "integer", "number", "boolean"}
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
        document: `GET /openapi.json` of the gateway, OpenAPI 3.1.
        host: the service's name, which is also its host name: `<api>.endpoints.<project>.cloud.goog`.
        address: IP address that Cloud Endpoints' DNS gives to this name; None: it gives none.

    Raises:
        ValueError: the host is not a host name.
    """
    if not _HOST.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name; use <api>.endpoints.<project>.cloud.goog")
    info = document["info"]
    endpoint: Json = {"name": host, "allowCors": True}  # preflight requests reach the gateway, which answers them
    if address is not None:
        endpoint["target"] = address
    return {
        "swagger": "2.0",
        "info": {name: info[name] for name in ("title", "description", "version")},
        "host": host,
        "basePath": "/",
        "schemes": ["https"],
        "consumes": ["application/json"],
        "produces": ["application/json", "application/problem+json"],
        "x-google-allow": "configured",
        "x-google-endpoints": [endpoint],
        "securityDefinitions": {"api_key": API_KEY},
        "security": [{"api_key": []}],
        "paths": {
            path: {method: _operation(item[method], document) for method in METHODS if method in item}
            for path, item in document["paths"].items()
            if path not in CLOSED_PATHS
        },
    }


def _operation(operation: Mapping[str, Any], document: Mapping[str, Any]) -> Json:
    parameters = [_parameter(parameter) for parameter in operation.get("parameters", ())]
    if "requestBody" in operation:
        parameters.append({"name": "body", "in": "body", "required": True, "schema": {"type": "object"}})
    converted: Json = {"operationId": operation["operationId"], "summary": operation["summary"]}
    if parameters:
        converted["parameters"] = parameters
    converted["responses"] = {
        status: {"description": _resolved(response, document)["description"]}
        for status, response in operation["responses"].items()
    }
    if operation.get("security") == []:  # open without a key, as in the gateway
        converted["security"] = []
    return converted


def _parameter(parameter: Mapping[str, Any]) -> Json:
    schema = parameter["schema"]
    converted: Json = {name: parameter[name] for name in ("name", "in", "description") if name in parameter}
    converted["required"] = parameter["in"] == "path" or parameter.get("required", False)
    converted |= {keyword: schema[keyword] for keyword in _PARAMETER_KEYWORDS if keyword in schema}
    if converted.get("type") not in _TYPES:
        converted["type"] = "string"
    return converted


def _resolved(found: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The response that a reference names, or the response itself."""
    reference = found.get("$ref")
    if reference is None:
        return found
    response: Mapping[str, Any] = document["components"]["responses"][reference.rpartition("/")[2]]
    return response


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
