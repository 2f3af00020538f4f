"""The public schema: defaults and aliases. `tests/gateway/api/test_bounds.py` has the bounds."""

import json

import pytest

from gateway.api.schema import parse_autocomplete_request, parse_job_request, parse_others_job_request
from shared.errors import InvalidRequest


def test_a_context_alone_has_the_defaults_and_n_samples_its_other_names() -> None:
    for name in ("n_samples", "samples", "n"):
        request = parse_autocomplete_request(b'{"context": "", "%s": 3}' % name.encode())
        assert request == parse_autocomplete_request(b'{"context": ""}')
    assert (request.length, request.temperature, request.top_k, request.top_p) == (20, 1, 50, 0.95)
    with pytest.raises(InvalidRequest, match="another name of n_samples"):
        parse_autocomplete_request(b'{"context": "a", "n": 1, "samples": 2}')


def test_the_published_names_of_a_jobs_fields() -> None:
    request = parse_job_request(b'{"prompt": "a", "num_samples": 2, "top_n": 30}')
    assert (request.context, request.n_samples, request.top_k) == ("a", 2, 30)


# The body that the page of the published deployment on AWS sends: the values of its form, all of them strings.
PUBLISHED_PAGE = (
    b'{"prompt": "The old man", "num_samples": "4", "length": "100", "temperature": "0.7", "top_p": ".9", "top_k": "0"}'
)


def test_the_published_pages_numbers_are_strings() -> None:
    tolerated = parse_others_job_request(PUBLISHED_PAGE)
    request = tolerated.request
    assert (request.context, request.n_samples, request.length, request.top_k) == ("The old man", 4, 100, 0)
    assert (request.temperature, request.top_p) == (0.7, 0.9)
    assert tolerated.warnings == []


@pytest.mark.parametrize("number", ["5", " 5 ", "+5", "5.", "5.0", "05", "0.5e1"])
def test_a_number_in_a_string_is_read_as_pages_write_it(number: str) -> None:
    body = json.dumps({"prompt": "7", "length": number}).encode()
    request = parse_others_job_request(body).request
    assert (request.context, request.length) == ("7", 5)


@pytest.mark.parametrize("text", ["", "five", "0x5", "5,0", "nan", "inf", "1_0", "1e999", "٥", "5" * 41, "2.5", "257"])
def test_a_string_that_is_no_number_within_the_bounds_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="length must be a whole number of tokens from 1 to 256"):
        parse_others_job_request(json.dumps({"prompt": "a", "length": text}).encode())


def test_elsewhere_a_number_in_a_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not a string"):
        parse_job_request(b'{"context": "a", "length": "5"}')
    with pytest.raises(InvalidRequest, match="single_line must be true"):
        parse_others_job_request(b'{"prompt": "a", "single_line": "1"}')
