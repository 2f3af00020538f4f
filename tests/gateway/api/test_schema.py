"""The public schema: defaults, aliases, and errors that name the field, its range and the value."""

import pytest

from gateway.api.schema import parse_autocomplete_request, parse_job_request
from shared.errors import InvalidRequest


def test_only_context_is_required() -> None:
    request = parse_autocomplete_request(b'{"context": ""}')
    assert (request.n_samples, request.length, request.temperature, request.top_k, request.top_p) == (
        3,
        20,
        1,
        50,
        0.95,
    )


@pytest.mark.parametrize("name", ["n_samples", "samples", "n"])
def test_aliases_of_n_samples(name: str) -> None:
    assert parse_autocomplete_request(b'{"context": "a", "%s": 5}' % name.encode()).n_samples == 5


def test_the_published_names_of_a_jobs_fields() -> None:
    request = parse_job_request(b'{"prompt": "a", "num_samples": 2, "top_n": 30}')
    assert (request.context, request.n_samples, request.top_k) == ("a", 2, 30)


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (b"{}", "context", "context is required"),
        (b'{"context": 3}', "context", "characters: the document before the cursor, not 3."),
        (b'{"context": "a", "n": 9}', "n_samples", "n_samples must be a whole number from 1 to 8, not 9."),
        (b'{"context": "a", "max_time": 0}', "max_time", "above 0, not 0"),
        (b'{"context": "a", "temperature": "hot"}', "temperature", "from 0 to 5, not a string"),
        (b'{"context": "a", "stop": [""]}', "stop", "list of up to 8 strings of 1 to 256 characters"),
        (b'{"context": "a", "contxt": 1}', "contxt", "Unknown field contxt; the fields are context"),
        (b'{"context": "a", "n": 1, "samples": 2}', "n", "another name of n_samples"),
    ],
)
def test_a_wrong_field_is_named_with_its_range(raw: bytes, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_autocomplete_request(raw)
    assert message in caught.value.detail
    assert [error.field for error in caught.value.fields] == [field]
