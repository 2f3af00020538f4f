"""Every field of the public schema has bounds, and accepts exactly what is within them.

The cases are generated from the schema: a field without bounds, or of a kind that is not known here, fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from gateway.api.schema import (
    AutocompleteRequest,
    FeedbackRequest,
    parse_autocomplete_request,
    parse_feedback_request,
)
from shared.errors import InvalidRequest
from shared.parsing import BodyParser, description_of
from shared.protocol import Sampling
from shared.time_margins import MARGINS
from tests.gateway.api.conftest import MakeApi
from tests.gateway.generation.stubs import completion

# Upper bounds that depend on a model or a setting, as the stub pool and the default settings have them. The resource
# checks them.
RESOURCE_BOUNDS = {"max_time": 30, "max_tokens": 1004, "seed": 2**64 - 1}
# Beyond the vocabulary it is off.
UNBOUNDED = {"top_k"}
REQUESTS: dict[type[msgspec.Struct], tuple[BodyParser[Any], dict[str, Any]]] = {
    AutocompleteRequest: (parse_autocomplete_request, {"context": "a"}),
    FeedbackRequest: (parse_feedback_request, {"id": "a", "index": 0, "action": "accepted"}),
}
# One JSON value of each kind, and the kinds of the schema that accept it.
KINDS: list[tuple[Any, tuple[type[inspect.Type], ...]]] = [
    ("text", (inspect.StrType,)),
    (0.5, (inspect.FloatType,)),
    (1, (inspect.IntType, inspect.FloatType)),
    (True, (inspect.BoolType,)),
    ([], (inspect.ListType,)),
    ([["text"]], ()),
    ({}, ()),
    ({"text": "text"}, ()),
]


def kinds_of(annotation: inspect.Type) -> tuple[inspect.Type, ...]:
    return annotation.types if isinstance(annotation, inspect.UnionType) else (annotation,)


def unwrap(annotation: inspect.Type) -> inspect.Type:
    return annotation.type if isinstance(annotation, inspect.Metadata) else annotation


def cases(name: str, annotation: inspect.Type) -> Iterator[tuple[Any, bool]]:
    """Values at, below and above each bound, and whether they are within it."""
    kinds = tuple(map(unwrap, kinds_of(unwrap(annotation))))
    for kind in kinds:
        match kind:
            case inspect.IntType() | inspect.FloatType():
                yield from number_cases(name, kind)
            case inspect.StrType():
                yield from length_cases(name, kind, lambda length: "x" * length)
            case inspect.ListType():
                items = list(cases(name, kind.item_type))
                good = [value for value, is_good in items if is_good][:1]
                yield from length_cases(name, kind, lambda length, good=good: good * length)  # type: ignore[misc]
                yield from (([value], is_good) for value, is_good in items)
            case inspect.LiteralType():
                yield from [("x", False), *((value, True) for value in kind.values)]
            case inspect.BoolType():
                yield from ((True, True), (False, True))
            case _:  # a null is as leaving the field out: `tests.shared.test_parsing`
                assert isinstance(kind, inspect.NoneType), f"{name}: {kind} is not known here"
    for value, accepting in KINDS:
        if not any(isinstance(kind, (*accepting, inspect.LiteralType)) for kind in kinds):
            yield value, False


def length_cases(
    name: str, kind: inspect.StrType | inspect.ListType, make: Callable[[int], Any]
) -> Iterator[tuple[Any, bool]]:
    assert kind.max_length is not None, f"{name} has no max_length"
    low, high = kind.min_length or 0, kind.max_length
    for length in {max(0, low - 1), low, high - 1, high, high + 1}:
        yield make(length), low <= length <= high


def number_cases(name: str, kind: inspect.IntType | inspect.FloatType) -> Iterator[tuple[Any, bool]]:
    def beside(bound: float, side: int) -> float:
        return bound + side if isinstance(kind, inspect.IntType) else math.nextafter(bound, side * math.inf)

    low = kind.ge if kind.gt is None else kind.gt
    assert low is not None, f"{name} has no lower bound"
    yield from ((beside(low, -1), False), (low, kind.gt is None), (beside(low, 1), True))
    if name not in RESOURCE_BOUNDS.keys() | UNBOUNDED:
        assert kind.le is not None, f"{name} has no upper bound"
        yield from ((beside(kind.le, -1), True), (kind.le, True), (beside(kind.le, 1), False))
    yield from ((-(10**300), False), (-1, kind.ge == -1))


@pytest.mark.parametrize(
    ("request_type", "field"),
    [(kind, field) for kind in REQUESTS for field in msgspec.structs.fields(kind)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_field_accepts_exactly_what_is_within_its_bounds(
    request_type: type[msgspec.Struct], field: msgspec.structs.FieldInfo
) -> None:
    parse, required = REQUESTS[request_type]
    description = description_of(field.type)
    for kind in map(unwrap, kinds_of(unwrap(inspect.type_info(field.type)))):
        for limit in filter(None, (getattr(kind, bound, None) for bound in ("ge", "gt", "le", "max_length"))):
            assert f"{limit}" in description or f"{limit:g}" in description, limit
    for value, is_good in cases(field.name, inspect.type_info(field.type)):
        body = msgspec.json.encode({**required, field.name: value})
        if is_good:
            assert getattr(parse(body), field.name) == value
            continue
        with pytest.raises(InvalidRequest) as caught:
            parse(body)
        assert [error.field for error in caught.value.fields] == [field.name], value
        assert description in caught.value.detail
        assert len(caught.value.detail) < 250


@pytest.mark.parametrize("name", RESOURCE_BOUNDS)
def test_a_bound_that_depends_on_the_server_is_checked_too(make_api: MakeApi, name: str) -> None:
    api = make_api(lambda request: completion(request, " the sea was calm."))
    limit = RESOURCE_BOUNDS[name]
    for value in (limit - 1, limit):
        assert api.complete(**{name: value}).status_code == 200
    for value in (limit + 1, 10**300):
        response = api.complete(**{name: value})
        assert response.status_code == 422
        assert [error["field"] for error in response.json["errors"]] == [name]


def test_a_time_in_which_no_worker_could_answer_is_refused(make_api: MakeApi) -> None:
    api = make_api(lambda request: completion(request, " the sea was calm."))
    for path, body in (
        ("/autocomplete", {"context": "a"}),
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"inputs": "a", "parameters": {}}),
    ):
        for value in (5e-324, 1e-9, MARGINS.return_s):
            part = {"max_time": value}
            response = api.post(path, {**body, "parameters": part} if "inputs" in body else {**body, **part})
            assert response.status_code == (400 if path == "/v1/completions" else 422), (path, value)
            assert "max_time must be above 0.005 seconds" in response.text


def test_the_internal_wire_bounds_what_the_public_schema_bounds() -> None:
    """A worker accepts every value that the gateway lets through."""
    public, internal = (
        {field.name: unwrap(inspect.type_info(field.type)) for field in msgspec.structs.fields(kind)}
        for kind in (AutocompleteRequest, Sampling)
    )
    for name in public.keys() & internal.keys() - UNBOUNDED:  # -1 is replaced before
        for bound in ("ge", "gt"):
            assert getattr(internal[name], bound, None) == getattr(public[name], bound, None), name
