"""The document for Cloud Endpoints: OpenAPI 2.0 of the routes that the gateway of overlays/gke has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV2SpecValidator

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


def test_the_command_prints_the_document_of_the_gateway_which_is_openapi_2(
    gateway_document: Json, converted: Json
) -> None:
    done = run_module("deploy.cloud.kubernetes.endpoints", "--host", host())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == converted
    addressed = endpoints_document(gateway_document, host(), "203.0.113.7")
    OpenAPIV2SpecValidator(addressed).validate()
    assert addressed["x-google-endpoints"] == [{"name": host(), "allowCors": True, "target": "203.0.113.7"}]
    for segment in "/".join(converted["paths"]).split("/"):  # Cloud Endpoints takes parameters as whole segments only
        assert ("{" in segment) is (segment.startswith("{") and segment.endswith("}"))
    with pytest.raises(ValueError, match="'https://a' is not a host name"):
        endpoints_document(gateway_document, "https://a")


def test_it_has_every_operation_but_those_for_operators(gateway_document: Json, converted: Json) -> None:
    operations = {(path, method) for path, item in converted["paths"].items() for method in item}
    assert operations == {
        (path, method)
        for path, item in gateway_document["paths"].items()
        for method in item
        if path not in CLOSED_PATHS
    }
    assert {("/autocomplete", "post"), ("/feedback", "post"), ("/v1/completions", "post")} <= operations
    names = [operation["operationId"] for item in converted["paths"].values() for operation in item.values()]
    assert len(set(names)) == len(names)


def test_what_needs_a_key_of_the_gateway_needs_one_of_google(gateway_document: Json, converted: Json) -> None:
    assert converted["security"] == [{"api_key": []}]
    for path, item in converted["paths"].items():
        for method, operation in item.items():
            is_open = gateway_document["paths"][path][method].get("security") == []
            assert (operation.get("security") == []) is is_open, path
    assert converted["paths"]["/health/ready"]["get"]["security"] == []
    assert "security" not in converted["paths"]["/autocomplete"]["post"]


def test_the_key_of_the_gateway_is_added_by_the_proxy() -> None:
    template = dict(workloads("overlays/gke"))["tercet-gateway"]
    [proxy] = [container for container in containers(template) if container["name"] == "endpoints"]
    assert "--add_request_header=authorization=Bearer $(GATEWAY_KEY)" in proxy["args"]
    assert environment("overlays/gke", template, proxy)["GATEWAY_KEY"]
