"""The header that names a session, in every dialect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gateway.api.callers import SESSION_HEADER
from gateway.api.fields import MAX_SESSION_CHARS
from shared.protocol import GenerateRequest
from tests.gateway.api.conftest import Api, MakeApi
from tests.gateway.generation.stubs import Step, completion

# Paths and bodies; those of the second list may name a session.
WITHOUT_SESSION: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "He saw"}),
    ("/generate_stream", {"inputs": "He saw"}),
    ("/", {"inputs": "He saw"}),
]
WITH_SESSION: list[tuple[str, dict[str, Any]]] = [
    ("/autocomplete", {"context": "He saw"}),
    ("/autocomplete", {"context": "He saw", "stream": True}),
    ("/v1/completions", {"prompt": "He saw"}),
]


def respond(request: GenerateRequest) -> Iterator[Step]:
    yield from completion(request, f" the sea {request.seed}", finish_reason="length")


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    return make_api(respond)


def sessions(api: Api) -> set[str | None]:
    return {call.session for call in api.pool.workers[0].calls}


@pytest.mark.parametrize(("path", "body"), [*WITHOUT_SESSION, *WITH_SESSION])
def test_the_header_names_the_session(api: Api, path: str, body: dict[str, Any]) -> None:
    assert api.post(path, body, headers={SESSION_HEADER: "s" * MAX_SESSION_CHARS}).status_code == 200
    assert sessions(api) == {"s" * MAX_SESSION_CHARS}


@pytest.mark.parametrize(("path", "body"), WITH_SESSION)
def test_the_body_comes_first(api: Api, path: str, body: dict[str, Any]) -> None:
    assert api.post(path, {**body, "session": "b"}, headers={SESSION_HEADER: "h"}).status_code == 200
    assert sessions(api) == {"b"}


@pytest.mark.parametrize(("path", "body"), [*WITHOUT_SESSION, *WITH_SESSION])
def test_a_header_that_is_too_long_is_named(api: Api, path: str, body: dict[str, Any]) -> None:
    response = api.post(path, body, headers={SESSION_HEADER: "s" * (MAX_SESSION_CHARS + 1)})
    assert response.status_code in {400, 422}
    assert f"{SESSION_HEADER} must be a string of up to 128 characters." in response.text
    assert sessions(api) == set()


def test_an_empty_header_is_none(api: Api) -> None:
    assert api.complete().status_code == 200
    assert api.post("/autocomplete", {"context": "He saw"}, headers={SESSION_HEADER: ""}).status_code == 200
    assert sessions(api) == {None}
