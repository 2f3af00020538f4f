"""The document for Cloud Endpoints: OpenAPI 3.1 of the routes that the gateway of overlays/gke has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from deploy.cloud.kubernetes.endpoints import CLOSED_PATHS, endpoints_document
from shared.api_keys import new_key
from tests.deploy.cloud.kubernetes.rendered import containers, environment, of_kind, workloads
from tests.deploy.command_line.test_cli import run_module
from tests.gateway.conftest import MakeGateway

Json = dict[str, Any]


@pytest.fixture
def gateway_document(make_gateway: MakeGateway, tmp_path: Path) -> Json:
    """`GET /openapi.json` of a gateway with API keys and without jobs, as overlays/gke has it."""
    new_key(tmp_path / "keys", "test")
    document: Json = make_gateway(keys=str(tmp_path / "keys"), jobs="none").client.simulate_get("/openapi.json").json
    return document


@pytest.fixture
def converted(gateway_document: Json) -> Json:
    return endpoints_document(gateway_document, host())


def host() -> str:
    return next(
        str(document["data"]["ENDPOINTS_SERVICE"])
        for document in of_kind("overlays/gke", "ConfigMap").values()
        if "ENDPOINTS_SERVICE" in document["data"]
    )


def test_the_command_prints_the_document_of_the_gateway(gateway_document: Json, converted: Json) -> None:
    done = run_module("deploy.cloud.kubernetes.endpoints", "--host", host())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == converted
    addressed = endpoints_document(gateway_document, host(), "203.0.113.7")
    OpenAPIV31SpecValidator(addressed).validate()  # also that no two operations have one id
    endpoint = {"allowCors": True, "target": "203.0.113.7"}
    assert addressed["servers"] == [{"url": f"https://{host()}", "x-google-endpoint": endpoint}]
    for segment in "/".join(converted["paths"]).split("/"):  # Cloud Endpoints takes parameters as whole segments only
        assert ("{" in segment) is (segment.startswith("{") and segment.endswith("}"))
    with pytest.raises(ValueError, match="'https://a' is not a host name"):
        endpoints_document(gateway_document, "https://a")


def test_it_has_every_operation_but_those_for_operators_and_each_needs_a_key_where_the_gateway_needs_one(
    gateway_document: Json, converted: Json
) -> None:
    assert converted["security"] == [{"api_key": []}]
    assert converted["components"]["securitySchemes"]["api_key"]["name"] == "x-api-key"
    open_operations = {
        (path, method): operation.get("security") == []
        for path, item in gateway_document["paths"].items()
        for method, operation in item.items()
        if path not in CLOSED_PATHS
    }
    assert open_operations == {
        (path, method): operation.get("security") == []
        for path, item in converted["paths"].items()
        for method, operation in item.items()
    }
    assert open_operations["/health/ready", "get"]
    assert not open_operations["/autocomplete", "post"]
    assert {("/feedback", "post"), ("/v1/completions", "post")} <= open_operations.keys()


def test_the_key_of_the_gateway_is_added_by_the_proxy() -> None:
    template = dict(workloads("overlays/gke"))["tercet-gateway"]
    [proxy] = [container for container in containers(template) if container["name"] == "endpoints"]
    assert "--add_request_header=authorization=Bearer $(GATEWAY_KEY)" in proxy["args"]
    assert environment("overlays/gke", template, proxy)["GATEWAY_KEY"]
