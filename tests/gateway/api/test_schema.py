"""The public schema: defaults, aliases, and errors that name the field, its range and the value."""

import pytest

from gateway.api.schema import parse_autocomplete_request, parse_feedback_request
from shared.errors import InvalidJson, InvalidRequest


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


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (b"{}", "context", "context is required"),
        (
            b'{"context": 3}',
            "context",
            "characters: the document before the cursor, not 3.",
        ),
        (b'{"context": "a", "n": 9}', "n_samples", "n_samples must be a whole number from 1 to 8, not 9."),
        (b'{"context": "a", "n": 0}', "n_samples", "from 1 to 8, not 0"),
        (b'{"context": "a", "length": 257}', "length", "from 1 to 256, not 257"),
        (b'{"context": "a", "length": 20.5}', "length", "whole number"),
        (b'{"context": "a", "max_time": 0}', "max_time", "above 0, not 0"),
        (b'{"context": "a", "temperature": 5.1}', "temperature", "from 0 to 5"),
        (b'{"context": "a", "temperature": "hot"}', "temperature", "not a string"),
        (b'{"context": "a", "top_p": -0.1}', "top_p", "from 0 to 1"),
        (b'{"context": "a", "min_p": 1.1}', "min_p", "from 0 (off) to 1, not 1.1"),
        (b'{"context": "a", "repetition_penalty": 0}', "repetition_penalty", "from 0.01 to 100"),
        (b'{"context": "a", "stop": "x"}', "stop", "list of up to 8 strings"),
        (b'{"context": "a", "stop": ["1","2","3","4","5","6","7","8","9"]}', "stop", "list of up to 8"),
        (b'{"context": "a", "stop": [""]}', "stop", "1 to 256 characters"),
        (b'{"context": "a", "single_line": 1}', "single_line", "true or false, not 1"),
        (b'{"context": "a", "seed": 9223372036854775808}', "seed", "from 0 to 9223372036854775807"),
        (b'{"context": "a", "contxt": 1}', "contxt", "Unknown field contxt; the fields are context"),
        (b'{"context": "a", "n": 1, "samples": 2}', "n", "another name of n_samples"),
    ],
)
def test_a_wrong_field_is_named_with_its_range(raw: bytes, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_autocomplete_request(raw)
    assert message in caught.value.detail
    assert [error.field for error in caught.value.fields] == [field]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "it is empty"),
        (b'{"context": "a",\n "n":}', "line 2, column 6"),
        (b"[]", "not an array"),
        (b'"text"', "not a string"),
        (b'{"context":\n"\xff"}', "context must be UTF-8, which byte 0xff is not, line 2, column 2."),
        (b'{"context": "a"} x', "trailing characters"),
    ],
)
def test_a_body_that_is_not_a_json_object_is_refused_with_the_position(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidJson, match=message):
        parse_autocomplete_request(raw)


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (b'{"id": "a", "index": 8, "action": "accepted"}', "index", "from 0 to 7: the sentence's place, not 8"),
        (b'{"id": "a", "index": 0, "action": "liked"}', "action", "accepted, rejected, ignored"),
        (b'{"id": "a", "index": 0, "action": "accepted", "characters": -1}', "characters", "from 0 to 10000"),
        (b'{"id": "a", "index": 0, "action": "accepted", "kept": 10001}', "kept", "from 0 to 10000"),
        (b'{"index": 0, "action": "accepted"}', "id", "id is required"),
    ],
)
def test_a_wrong_field_of_feedback_is_named_with_its_range(raw: bytes, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_feedback_request(raw)
    assert message in caught.value.detail
    assert [error.field for error in caught.value.fields] == [field]
