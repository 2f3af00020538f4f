"""`GET /openapi.json`: a valid document of every route and method, true to the app that it describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from falcon import inspect
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway.api.jobs import JobsResource
from gateway.api.openai.resources import CompletionsResource
from gateway.api.openai.schema import parse_completion_request
from gateway.api.openapi import build_document
from gateway.api.operation import JSON, Operation
from gateway.api.schema import parse_job_request
from gateway.api.tolerance import TolerantParser
from gateway.routes import open_paths
from shared.api_keys import new_key
from shared.errors import InvalidRequest
from shared.parsing import BodyParser
from tests.gateway.conftest import Gateway, MakeGateway

Json = dict[str, Any]


def document_of(gateway: Gateway) -> Json:
    document: Json = gateway.client.simulate_get("/openapi.json").json
    return document


def validator(document: Json, schema: Json) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def declared_response(document: Json, operation: Json, status: int) -> Json:
    """What an operation declares for a status."""
    declared: Json = operation["responses"][str(status)]
    return document["components"]["responses"][declared["$ref"].rpartition("/")[2]] if "$ref" in declared else declared


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


def url_of(path: str) -> str:
    """A path of a resource that exists."""
    return path.replace("{name}", "tercet.js").replace("{model}", "small")


@pytest.mark.parametrize("settings", [{}, {"keys": "/nonexistent"}])
def test_the_document_is_valid_openapi_3_1(make_gateway: MakeGateway, settings: dict[str, str]) -> None:
    document = document_of(make_gateway(**settings))
    assert document["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(document).validate()
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_method_of_every_route_has_an_operation(gateway: Gateway) -> None:
    routes = {
        (route.path, method.method)
        for route in inspect.inspect_routes(gateway.app)
        for method in route.methods
        if not method.internal and method.method != "HEAD"
    }
    documented = {(path, method) for path, method, _ in operations(document_of(gateway))}
    assert documented == routes
    ids = [operation["operationId"] for _, _, operation in operations(document_of(gateway))]
    assert len(set(ids)) == len(ids)


def test_the_document_says_which_operations_need_a_key(make_gateway: MakeGateway, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "first")[0]
    keyed, open_to_all = make_gateway(keys=str(tmp_path / "keys")), make_gateway()
    assert not any("security" in operation for _, _, operation in operations(document_of(open_to_all)))
    document = document_of(keyed)
    found = set()
    for path, method, operation in operations(document):
        url = url_of(path)
        is_open = operation.get("security", document["security"]) == []
        found |= {path} if is_open else set()
        status = keyed.client.simulate_request(method, url, body=b"[]").status_code
        assert (status == 401) == ("401" in operation["responses"]) == (not is_open), path
        headers = {"x-api-key": key}
        assert keyed.client.simulate_request(method, url, body=b"[]", headers=headers).status_code != 401
    assert found == open_paths(keyed.app.routes)


def test_every_example_is_accepted_by_its_parser_and_its_schema(gateway: Gateway) -> None:
    document = document_of(gateway)
    num_examples = 0
    for path, method, operation in operations(document):
        declared: Operation = gateway.app.routes[path].resource.operations[method]  # type: ignore[attr-defined]
        if not declared.bodies:
            assert "requestBody" not in operation
            continue
        content = operation["requestBody"]["content"][JSON]
        assert content["examples"], path
        for example in content["examples"].values():
            validator(document, content["schema"]).validate(example["value"])
            assert any(is_accepted(parser, example["value"]) for parser in declared.bodies), path
            num_examples += 1
    assert num_examples >= 3


def is_accepted(parser: BodyParser[Any] | TolerantParser[Any], body: Any) -> bool:
    try:
        parser(msgspec.json.encode(body))
    except InvalidRequest:
        return False
    return True


JOBS: list[Json] = [
    *({"context": "a", "n": 3}, {"prompt": "a", "num_samples": 3}, {}, {"n": 2}, {"context": 1}),
    *({"context": "a", "x": 1}, {"context": "a", "prompt": "a"}, {"context": "a", "n": 0}, {"context": "a", "n": None}),
    *({"context": "a", "n": 1, "num_samples": 1}, {"context": "a", "n_samples": 1, "n": 1}),
]
COMPLETIONS: list[Json] = [{"prompt": "a", "n": None}, {"prompt": "a", "n": "3"}]


@pytest.mark.parametrize(
    ("path", "parser", "bodies"),
    [("/jobs", parse_job_request, JOBS), ("/v1/completions", parse_completion_request, COMPLETIONS)],
)
def test_a_schema_accepts_what_its_parser_accepts(
    path: str, parser: BodyParser[Any] | TolerantParser[Any], bodies: list[Json]
) -> None:
    resources = {"/jobs": JobsResource, "/v1/completions": CompletionsResource}
    document = build_document(resources, open_routes=(), needs_keys=False)
    schema = document["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"]
    for body in bodies:
        assert validator(document, schema).is_valid(body) == is_accepted(parser, body), body


def test_an_alias_is_described_as_another_name(gateway: Gateway) -> None:
    fields = document_of(gateway)["components"]["schemas"]["AutocompleteRequest"]["properties"]
    assert fields["n"]["description"] == f"another name of n_samples: {fields['n_samples']['description']}"
    assert {"type": "integer", "minimum": 1, "maximum": 8} in fields["n"]["anyOf"]


def test_a_dialects_errors_have_its_shape_and_status_or_the_default_ones(gateway: Gateway) -> None:
    document = document_of(gateway)
    for status in (429, 503):
        response = declared_response(document, document["paths"]["/generate"]["post"], status)
        assert "`overloaded`" in response["description"]
        assert response["content"][JSON]["schema"] == {"$ref": "#/components/schemas/TgiError"}
        assert response["content"]["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}
    refusal = document["paths"]["/health/ready"]["get"]["responses"]["503"]  # an answer or an error
    assert refusal["content"].keys() == {JSON, "application/problem+json"}
    assert "Retry-After" in refusal["headers"]
    assert "`overloaded`" in refusal["description"]


@pytest.mark.parametrize(
    ("path", "event", "is_valid"),
    [
        ("/autocomplete", {"event": "token", "data": "{}"}, True),
        ("/autocomplete", {"event": "other", "data": "{}"}, False),
        ("/autocomplete", {"event": "token"}, False),
        ("/autocomplete", {"data": "{}"}, False),
        ("/autocomplete", "token", False),
        ("/v1/completions", {"data": "[DONE]"}, True),
    ],
)
def test_the_schema_of_a_stream_describes_each_event(gateway: Gateway, path: str, event: Any, is_valid: bool) -> None:
    document = document_of(gateway)
    stream = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert validator(document, stream["schema"]).is_valid(event) == is_valid


def test_answers_of_every_get_match_their_schemas(gateway: Gateway) -> None:
    document = document_of(gateway)
    num_json = 0
    for path, method, operation in operations(document):
        if method != "GET":
            continue
        response = gateway.client.simulate_get(url_of(path))
        declared = declared_response(document, operation, response.status_code)
        assert response.headers["content-type"] in declared["content"], path
        if response.headers["content-type"] == JSON:
            validator(document, declared["content"][JSON]["schema"]).validate(response.json)
            num_json += 1
    assert num_json >= 7
