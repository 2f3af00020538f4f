"""`GET /openapi.json`: the API as an OpenAPI 3.1 document, written from what the resources declare.

They declare it with `gateway.api.operation`; `msgspec.json.schema_components` writes the schemas from the types that
parse requests and render answers. The document is built once, when the app is created. This module knows no resource
but its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, ClassVar

import falcon
import msgspec

from gateway.api.error_formats import PROBLEM_DETAILS, ErrorFormat, error_format_of
from gateway.api.operation import JSON, Answer, Events, Operation, Operations, Parameter
from gateway.api.page import HEADERS_OF_FILES, NOT_MODIFIED, Asset, send_asset
from gateway.api.tolerance import TolerantParser
from shared.errors import (
    BodyTooLarge,
    ForbiddenOrigin,
    HeadersTooLarge,
    MalformedRequest,
    Overloaded,
    QuotaExceeded,
    RequestTimeout,
    ShuttingDown,
    TercetError,
    Unauthorized,
    UnknownHost,
    UnsupportedCoding,
    UrlTooLong,
)
from shared.parsing import BodyParser
from shared.version import tercet_version

Json = dict[str, Any]
TITLE = "Tercet"
DESCRIPTION = (
    "Tercet completes text while it is written: each request is answered with several continuations, best first, by the"
    " language models of this server (`GET /health/ready` names them). Every answer carries `X-Request-Id`, which"
    " a client may set; `Retry-After` says when a refused request may be sent again."
)
# Errors of the middleware and of the connections: of any request, of one with a body, and where a key is required.
ERRORS_OF_REQUESTS = (
    MalformedRequest,
    ForbiddenOrigin,
    RequestTimeout,
    UrlTooLong,
    UnknownHost,
    HeadersTooLarge,
    Overloaded,
    ShuttingDown,
)
ERRORS_OF_BODIES = (BodyTooLarge, UnsupportedCoding)
ERRORS_OF_KEYS = (Unauthorized, QuotaExceeded)
SECURITY_SCHEMES: Json = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of this server."},
    "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "An API key of this server."},
}
# Statuses whose answers say when to try again.
_REFUSALS = frozenset({429, 503, 504})
_REQUEST_ID = {"$ref": "#/components/headers/RequestId"}
_RETRY_AFTER = {"$ref": "#/components/headers/RetryAfter"}
_HEADERS: Json = {
    "RequestId": {
        "description": "The request's id: the one that the client sent, or a new one.",
        "required": True,
        "schema": {"type": "string"},
    },
    "RetryAfter": {
        "description": "Seconds after which to send the request again.",
        "required": True,
        "schema": {"type": "integer", "minimum": 1},
    },
}


class DocumentResource:
    """`GET /openapi.json`."""

    operations: ClassVar[Operations] = {
        "GET": Operation(
            tag="Pages",
            summary="This API as an OpenAPI 3.1 document",
            answers={200: Answer("The document.", {JSON: dict[str, Any]}, HEADERS_OF_FILES), 304: NOT_MODIFIED},
        )
    }

    def __init__(self, document: Json) -> None:
        self._asset = Asset.from_bytes(msgspec.json.encode(document), JSON)

    def on_get(self, req: falcon.Request, resp: falcon.Response) -> None:
        send_asset(self._asset, req, resp)


def build_document(
    resources: Mapping[str, object], *, open_routes: Collection[str], needs_keys: bool, public_url: str | None = None
) -> Json:
    """The OpenAPI document of an app.

    Args:
        resources: resources by URI template. One without `operations` is left out.
        open_routes: URI templates whose GET needs no API key.
        needs_keys: whether all other requests need a key.
        public_url: where clients reach the server; None: at the address of the document.
    """
    declared = [
        _Declared(path, method, operation, error_format_of(resource, method))
        for path, resource in resources.items()
        for method, operation in getattr(resource, "operations", {}).items()
    ]
    schemas = _Schemas(declared)
    paths: dict[str, Json] = {}
    for one in declared:
        is_open = one.method == "GET" and one.path in open_routes
        entry = _operation(one, schemas, needs_key=needs_keys and not is_open)
        if needs_keys and is_open:
            entry["security"] = []
        paths.setdefault(one.path, {})[one.method.lower()] = entry
    document: Json = {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": tercet_version(), "description": DESCRIPTION},
        "paths": paths,
        "tags": [{"name": tag} for tag in dict.fromkeys(one.operation.tag for one in declared)],
        "components": {"schemas": schemas.components, "headers": _HEADERS, "responses": schemas.responses},
    }
    if public_url is not None:
        document["servers"] = [{"url": public_url}]
    if needs_keys:
        document["components"]["securitySchemes"] = SECURITY_SCHEMES
        document["security"] = [{name: []} for name in SECURITY_SCHEMES]
    return document


@dataclass(frozen=True, slots=True)
class _Declared:
    """An operation, and what the app knows of it."""

    path: str
    method: str
    operation: Operation
    error_format: ErrorFormat

    @property
    def id(self) -> str:
        words = self.path.replace("{", "").replace("}", "").replace(".", "_").strip("/").split("/")
        return "_".join([self.method.lower(), *(word for word in words if word)])

    def types(self) -> Iterator[Any]:
        """Every type of the bodies, parameters and answers."""
        yield from (parser.kind for parser in self.operation.bodies)
        yield from (parameter.type for parameter in self.operation.parameters)
        for answer in self.operation.answers.values():
            for content in answer.content.values():
                for found in content.types.values() if isinstance(content, Events) else [content]:
                    yield from found if isinstance(found, tuple) else [found]
        yield from (PROBLEM_DETAILS.body_type, self.error_format.body_type)


class _Schemas:
    """The schemas of all types of the operations, and the responses that several operations share."""

    def __init__(self, declared: Sequence[_Declared]) -> None:
        parsers = {parser.kind: parser for one in declared for parser in one.operation.bodies}
        types = {_key(found): found for one in declared for found in one.types()}
        schemas, components = msgspec.json.schema_components(types.values(), ref_template="#/components/schemas/{name}")
        self._schemas = dict(zip(types, schemas, strict=True))
        self.components: dict[str, Json] = {name: _cleaned(schema) for name, schema in components.items()}
        self.responses: dict[str, Json] = {}
        for kind, parser in parsers.items():
            schema = self._component(self.of(kind))
            _describe_parser(schema, parser)
            for part in chain(*(field.get("anyOf", ()) for field in schema["properties"].values())):
                if "$ref" in part:  # a nested object: its fields may be null as well
                    nested = self._component(part)
                    nested["properties"] = {name: _nullable(field) for name, field in nested["properties"].items()}

    def _component(self, reference: Json) -> Json:
        return self.components[reference["$ref"].rpartition("/")[2]]

    def of(self, found: Any) -> Json:
        """The schema of a type, or of several."""
        if isinstance(found, tuple):
            return {"anyOf": [self.of(one) for one in found]}
        if found in (str, bytes):
            return {"type": "string"}
        return self._schemas[_key(found)]


def _key(found: Any) -> str:
    return repr(found)  # some types are not hashable


def _cleaned(schema: Json) -> Json:
    """A struct's schema, its docstring without the indentation of the code."""
    if "description" in schema:
        schema["description"] = inspect.cleandoc(schema["description"])
    return schema


def _describe_parser(schema: Json, parser: BodyParser[Any] | TolerantParser[Any]) -> None:
    """What a parser adds to its struct: a strict one refuses unknown fields, each takes a field by one of its names and
    ignores nulls."""
    is_strict = isinstance(parser, BodyParser)
    if is_strict:
        schema["additionalProperties"] = False
    required = schema.get("required", ())
    schema["properties"] = {
        name: field if name in required else _nullable(field) for name, field in schema["properties"].items()
    }
    names: dict[str, list[str]] = {}
    for alias, name in parser.aliases.items():
        if name not in schema["properties"]:  # a field of a nested object
            continue
        names.setdefault(name, [name]).append(alias)
        schema["properties"][alias] = {
            **{key: value for key, value in schema["properties"][name].items() if key != "default"},
            "description": f"another name of {name}: {schema['properties'][name].get('description', '')}",
        }
    rules: list[Json] = []
    for name, group in names.items():
        if name in schema.get("required", ()):
            schema["required"].remove(name)
            rules.append({"oneOf": [{"required": [one]} for one in group]})
        elif is_strict:
            rules += [{"not": {"required": list(pair)}} for pair in combinations(group, 2)]
    if rules:
        schema["allOf"] = rules


def _nullable(schema: Json) -> Json:
    """A field's schema that also accepts null; its description is the field's, not that of one of its types."""
    null = {"type": "null"}
    options = schema.get("anyOf", [schema])
    parts = (schema, *options)
    found: Json = {name: one.pop(name) for one in parts for name in ("description", "default") if name in one}
    return {"anyOf": [*(one for one in options if one != null), null], **found}


def _operation(declared: _Declared, schemas: _Schemas, *, needs_key: bool) -> Json:
    operation = declared.operation
    entry: Json = {"operationId": declared.id, "tags": [operation.tag], "summary": operation.summary}
    if operation.description:
        entry["description"] = operation.description
    if operation.parameters:
        entry["parameters"] = [_parameter(parameter, schemas) for parameter in operation.parameters]
    if operation.bodies:
        refs = [schemas.of(parser.kind) for parser in operation.bodies]
        content: Json = {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
        if operation.examples:
            content["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
        entry["requestBody"] = {"required": True, "content": {JSON: content}}
    errors = [*operation.errors, *ERRORS_OF_REQUESTS]
    errors += ERRORS_OF_BODIES if operation.bodies else ()
    errors += ERRORS_OF_KEYS if needs_key else ()
    entry["responses"] = _responses(declared, errors, schemas)
    return entry


def _parameter(parameter: Parameter, schemas: _Schemas) -> Json:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.description,
        "required": parameter.place == "path",
        "schema": schemas.of(parameter.type),
    } | ({"example": parameter.example} if parameter.example else {})


def _responses(declared: _Declared, errors: Iterable[type[TercetError]], schemas: _Schemas) -> Json:
    operation, error_format = declared.operation, declared.error_format
    by_status: dict[int, dict[str, type[TercetError]]] = {}
    for error in errors:
        # Where no resource is known yet, as when a connection is refused, an error has the default status and shape.
        for status in {error_format.status(error("")), error.status}:
            by_status.setdefault(status, {})[error.code] = error
    responses: Json = {}
    for status in sorted(operation.answers.keys() | by_status.keys()):
        answer, found = operation.answers.get(status), by_status.get(status, {})
        if answer is None:
            responses[str(status)] = _shared_error(status, found, error_format, schemas)
            continue
        response = _answer(status, answer, schemas)
        if found:
            refusal = _error(status, found, error_format, schemas)
            response["description"] += f" Or: {refusal['description']}"
            for media_type, content in refusal["content"].items():
                response["content"][media_type] = _either(response["content"].get(media_type), content)
        responses[str(status)] = response
    return responses


def _answer(status: int, answer: Answer, schemas: _Schemas) -> Json:
    response: Json = {"description": answer.description, "headers": _headers(status)}
    response["headers"] |= {
        name: {"description": description, "schema": {"type": "string"}} for name, description in answer.headers.items()
    }
    if answer.content:
        response["content"] = {
            media_type: _events(found, schemas) if isinstance(found, Events) else {"schema": schemas.of(found)}
            for media_type, found in answer.content.items()
        }
    return response


def _events(events: Events, schemas: _Schemas) -> Json:
    """Describe the events of a stream; the data of most is JSON, in a string."""
    types = [
        (name, one) for name, found in events.types.items() for one in (found if isinstance(found, tuple) else (found,))
    ]
    return {"schema": {"anyOf": [_event(name, schemas.of(found)) for name, found in types]}}


def _event(name: str, schema: Json) -> Json:
    data = schema if "enum" in schema else {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    if not name:
        return {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {
        "title": name,
        "type": "object",
        "properties": {"event": {"const": name}, "data": data},
        "required": ["event", "data"],
    }


def _shared_error(
    status: int, errors: Mapping[str, type[TercetError]], error_format: ErrorFormat, schemas: _Schemas
) -> Json:
    """A reference to the response; the same errors in the same shape are written once."""
    name = ".".join([getattr(error_format.body_type, "__name__", "error"), *sorted(errors)])
    schemas.responses.setdefault(name, _error(status, errors, error_format, schemas))
    return {"$ref": f"#/components/responses/{name}"}


def _error(status: int, errors: Mapping[str, type[TercetError]], error_format: ErrorFormat, schemas: _Schemas) -> Json:
    description = " ".join(f"{error.title} (`{code}`)." for code, error in sorted(errors.items()))
    formats = (error_format, PROBLEM_DETAILS)
    content = {one.content_type: {"schema": schemas.of(one.body_type)} for one in formats}
    return {"description": description, "headers": _headers(status), "content": content}


def _headers(status: int) -> Json:
    return {"X-Request-Id": _REQUEST_ID, **({"Retry-After": _RETRY_AFTER} if status in _REFUSALS else {})}


def _either(first: Json | None, second: Json) -> Json:
    if first is None or first == second:
        return second
    return {"schema": {"anyOf": [first["schema"], second["schema"]]}}
