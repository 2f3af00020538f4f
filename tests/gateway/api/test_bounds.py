"""Every field of the public schema has bounds: a field without them, or of a kind that is not known here, fails."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from gateway.api.schema import (
    AutocompleteRequest,
    FeedbackRequest,
)
from shared.parsing import description_of
from shared.protocol import Sampling
from shared.time_margins import MARGINS
from tests.gateway.api.conftest import MakeApi
from tests.gateway.generation.stubs import completion

# Upper bounds that depend on a model or a setting, as the stub pool and the default settings have them. The resource
# checks them.
RESOURCE_BOUNDS = {"max_time": 30, "max_tokens": 1004, "seed": 2**64 - 1}
# Beyond the vocabulary it is off.
UNBOUNDED = {"top_k"}


def unwrap(annotation: inspect.Type) -> inspect.Type:
    return annotation.type if isinstance(annotation, inspect.Metadata) else annotation


def limits_of(name: str, annotation: inspect.Type) -> Iterator[float | None]:
    """The bounds that a field must have, by its kinds; None for one that it lacks."""
    match unwrap(annotation):
        case inspect.UnionType(types=kinds):
            for kind in kinds:
                yield from limits_of(name, kind)
        case inspect.IntType() | inspect.FloatType() as number:
            yield number.ge if number.gt is None else number.gt
            if name not in RESOURCE_BOUNDS.keys() | UNBOUNDED:
                yield number.le
        case inspect.ListType() as items:
            yield items.max_length
            yield from limits_of(name, items.item_type)
        case inspect.StrType() as text:
            yield text.max_length
        case kind:
            assert isinstance(kind, inspect.LiteralType | inspect.BoolType | inspect.NoneType), kind


@pytest.mark.parametrize(
    "field",
    [field for kind in (AutocompleteRequest, FeedbackRequest) for field in msgspec.structs.fields(kind)],
    ids=lambda field: field.name,
)
def test_a_field_has_bounds_which_its_errors_name(field: msgspec.structs.FieldInfo) -> None:
    """`tests/shared/test_parsing.py` has the errors; msgspec keeps the bounds."""
    description = description_of(field.type)
    assert len(description) < 200
    for limit in limits_of(field.name, inspect.type_info(field.type)):
        assert limit is not None
        assert f"{limit}" in description or f"{limit:g}" in description, limit


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
