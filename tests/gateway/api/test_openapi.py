"""`GET /openapi.json`: a valid document of every route and method, true to the app that it describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from falcon import inspect
from jsonschema import Draft202012Validator
from msgspec import Meta, Struct
from openapi_spec_validator import OpenAPIV31SpecValidator

from gateway.api.openapi import build_document
from gateway.api.operation import JSON, Answer, Events, Operation, Operations, Parameter
from gateway.app import OPEN_ROUTES
from shared.api_keys import new_key
from shared.errors import InvalidRequest, NotFound, Overloaded, TercetError
from shared.parsing import BodyParser
from tests.gateway.conftest import Gateway, MakeGateway

Json = dict[str, Any]


class Words(Struct, kw_only=True, forbid_unknown_fields=True):
    """Words.

    A second paragraph.
    """

    text: Annotated[str, Meta(description="a string")]
    count: Annotated[int, Meta(ge=1, description="a whole number")] = 3


class Counted(Struct):
    count: int


class Failure(Struct):
    error: str


class ShortErrors:
    """A dialect's format: another shape, and another status for one error."""

    content_type, body_type = JSON, Failure

    def status(self, error: TercetError) -> int:
        return 429 if isinstance(error, Overloaded) else error.status

    def body(self, error: TercetError, request_id: str) -> bytes:
        return b"{}"

    def event(self, error: TercetError, request_id: str) -> bytes:
        return b""


EVENTS = Events({"count": (Counted, Failure), "": Literal["[DONE]"]})
WORDS = Operation(
    tag="Words",
    summary="Count words",
    bodies=(BodyParser(Words, {"n": "count", "k": "count", "input": "text"}),),
    parameters=(Parameter("id", "path", "an id"), Parameter("Prefer", "header", "a preference", examples=("fast",))),
    answers={200: Answer("Counted.", {JSON: Counted, "text/event-stream": EVENTS})},
    errors=(InvalidRequest, NotFound, Overloaded),
)
COUNTED_OR_NOT = Operation(
    tag="Words", summary="Read counts", answers={503: Answer("Not counted yet.", {JSON: Counted})}, errors=(Overloaded,)
)


class WordsResource:
    operations: ClassVar[Operations] = {"POST": WORDS}
    error_format = ShortErrors()


class CountsResource:
    operations: ClassVar[Operations] = {"GET": COUNTED_OR_NOT}


def document_of(gateway: Gateway) -> Json:
    document: Json = gateway.client.simulate_get("/openapi.json").json
    return document


def validator(document: Json, schema: Json) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method.upper(), operation


def url_of(path: str) -> str:
    """A path of a resource that exists."""
    return path.replace("{name}", "tercet.js").replace("{model}", "small")


@pytest.fixture
def words() -> Json:
    """The document of two operations that no route has."""
    documented = {"/words/{id}": WordsResource(), "/counts": CountsResource(), "/silent": object()}
    document = build_document(documented, open_routes={"/counts"}, needs_keys=True)
    sent: Json = msgspec.json.decode(msgspec.json.encode(document))
    return sent


@pytest.mark.parametrize("settings", [{}, {"keys": "/nonexistent"}])
def test_the_document_is_valid_openapi_3_1(make_gateway: MakeGateway, settings: dict[str, str]) -> None:
    document = document_of(make_gateway(**settings))
    assert document["openapi"] == "3.1.0"
    OpenAPIV31SpecValidator(document).validate()
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_a_document_with_every_kind_of_declaration_is_valid(words: Json) -> None:
    OpenAPIV31SpecValidator(words).validate()


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
    assert found == OPEN_ROUTES


def test_every_example_is_accepted_by_its_parser_and_its_schema(gateway: Gateway) -> None:
    document = document_of(gateway)
    num_examples = 0
    for path, method, operation in operations(document):
        declared: Operation = gateway.app.resources[path].operations[method]  # type: ignore[attr-defined]
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


def is_accepted(parser: BodyParser[Any], body: Any) -> bool:
    try:
        parser(msgspec.json.encode(body))
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    "body",
    [
        {"text": "a"},
        {"input": "a"},
        {"text": "a", "n": 3},
        {"input": "a", "k": 1},
        {"text": "a", "count": 2},
        {},
        {"text": 1},
        {"text": "a", "input": "a"},
        {"text": "a", "n": 0},
        {"text": "a", "n": 1, "k": 1},
        {"text": "a", "count": 1, "n": 1},
        {"text": "a", "x": 1},
        {"n": 2},
        {"text": "a", "count": "3"},
    ],
)
def test_the_schema_accepts_what_the_parser_accepts(words: Json, body: Json) -> None:
    schema = words["paths"]["/words/{id}"]["post"]["requestBody"]["content"][JSON]["schema"]
    assert validator(words, schema).is_valid(body) == is_accepted(WORDS.bodies[0], body)


@pytest.mark.parametrize("body", [{"text": "a", "count": None}, {"input": "a", "k": None}, {"text": None}, {"text": 1}])
def test_the_schema_of_a_parser_that_ignores_nulls_accepts_them(body: Json) -> None:
    parser = BodyParser(Words, {"k": "count", "input": "text"}, ignores_nulls=True)
    operation = Operation(tag="Words", summary="Count words", bodies=(parser,), answers={200: Answer("Counted.")})
    resource = type("LenientResource", (), {"operations": {"POST": operation}})
    document = build_document({"/words": resource()}, open_routes=set(), needs_keys=False)
    schema = document["paths"]["/words"]["post"]["requestBody"]["content"][JSON]["schema"]
    assert validator(document, schema).is_valid(body) == is_accepted(parser, body)


def test_an_alias_is_described_as_another_name(words: Json) -> None:
    schema = words["components"]["schemas"]["Words"]
    assert schema["description"] == "Words.\n\nA second paragraph."
    assert schema["properties"]["n"] == {
        "type": "integer",
        "minimum": 1,
        "description": "another name of count: a whole number",
    }


def test_a_resource_without_operations_is_left_out(words: Json) -> None:
    """The test of every route fails for one of the app."""
    assert words["paths"].keys() == {"/words/{id}", "/counts"}


def test_a_dialects_errors_have_its_shape_and_status_or_the_default_ones(words: Json) -> None:
    responses = words["paths"]["/words/{id}"]["post"]["responses"]
    name = responses["422"]["$ref"].rpartition("/")[2]
    content = words["components"]["responses"][name]["content"]
    assert content[JSON]["schema"] == {"$ref": "#/components/schemas/Failure"}
    assert content["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}
    assert {"400", "401", "404", "411", "413", "429"} <= responses.keys()
    for status in ("429", "503"):
        name = responses[status]["$ref"].rpartition("/")[2]
        assert "`overloaded`" in words["components"]["responses"][name]["description"]
    refusal = words["paths"]["/counts"]["get"]["responses"]["503"]
    assert refusal["content"].keys() == {JSON, "application/problem+json"}
    assert "Retry-After" in refusal["headers"]
    assert "`overloaded`" in refusal["description"]


@pytest.mark.parametrize(
    ("event", "is_valid"),
    [
        ({"event": "count", "data": '{"count": 1}'}, True),
        ({"data": "[DONE]"}, True),
        ({"data": "DONE"}, False),
        ({"event": "other", "data": '{"count": 1}'}, False),
        ({"event": "count"}, False),
        ("count", False),
    ],
)
def test_the_schema_of_a_stream_describes_each_event(words: Json, event: Any, is_valid: bool) -> None:
    stream = words["paths"]["/words/{id}"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert validator(words, stream["schema"]).is_valid(event) == is_valid
    found = [event["properties"]["data"].get("contentSchema") for event in stream["schema"]["anyOf"]]
    assert found == [{"$ref": f"#/components/schemas/{name}"} for name in ("Counted", "Failure")] + [None]


def test_the_document_has_an_etag_and_is_not_sent_twice(gateway: Gateway) -> None:
    first = gateway.client.simulate_get("/openapi.json")
    assert first.headers["content-type"] == "application/json"
    again = gateway.client.simulate_get("/openapi.json", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_answers_of_every_get_match_their_schemas(gateway: Gateway) -> None:
    document = document_of(gateway)
    num_json = 0
    for path, method, operation in operations(document):
        if method != "GET":
            continue
        response = gateway.client.simulate_get(url_of(path))
        declared = operation["responses"][str(response.status_code)]
        if "$ref" in declared:
            declared = document["components"]["responses"][declared["$ref"].rpartition("/")[2]]
        assert response.headers["content-type"] in declared["content"], path
        if response.headers["content-type"] == JSON:
            validator(document, declared["content"][JSON]["schema"]).validate(response.json)
            num_json += 1
    assert num_json >= 7


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/autocomplete", b"{", 400),
        ("/autocomplete", b'{"context": 1}', 422),
        ("/autocomplete", b'{"context": "", "max_time": 0.01}', 503),
        ("/feedback", b'{"id": "x", "index": 0, "action": "accepted"}', 404),
        ("/static/nothing", None, 404),
    ],
)
def test_errors_match_their_schemas(gateway: Gateway, path: str, body: bytes | None, status: int) -> None:
    document = document_of(gateway)
    response = gateway.client.simulate_request("POST" if body else "GET", path, body=body)
    assert response.status_code == status
    operation = document["paths"].get(path, document["paths"]["/static/{name}"])["post" if body else "get"]
    declared = operation["responses"][str(status)]
    declared = document["components"]["responses"][declared["$ref"].rpartition("/")[2]]
    schema = declared["content"][response.headers["content-type"]]["schema"]
    validator(document, schema).validate(response.json)
    assert f"`{response.json['code']}`" in declared["description"]
    for name, header in declared["headers"].items():
        assert "$ref" in header
        assert name in {key.title() for key in response.headers}, name
