"""Requests that are wrong in some way, and what a correct answer to any request looks like.

Hypothesis strategies over the bodies, fields, headers, methods and paths that a client can choose. They send nothing:
the same requests serve the app in this process and a running server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

from falcon import testing
from hypothesis import strategies as st
from msgspec import structs

from gateway.api.schema import AutocompleteRequest, FeedbackRequest
from shared.errors import PROBLEM_JSON, TercetError
from tests.e2e.edge_numbers import EDGES, NOT_JSON

# Statuses of the server's side that are promises: no room, and no time.
DECLARED_5XX = {503, 504}
FIELDS = [found.name for found in structs.fields(AutocompleteRequest)] + ["n", "samples"]
FEEDBACK_FIELDS = [found.name for found in structs.fields(FeedbackRequest)]
PATHS = ["/autocomplete", "/feedback", "/", "/health/ready", "/health/live", "/metrics", "/slots", "/static/tercet.js"]


@dataclass(frozen=True)
class HttpRequest:
    """A request as a client writes it."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def error_codes() -> set[str]:
    """The codes of all errors that an answer may have."""

    def subclasses(kind: type[TercetError]) -> set[type[TercetError]]:
        return {kind}.union(*map(subclasses, kind.__subclasses__()))

    return {kind.code for kind in subclasses(TercetError)}


def check_answer(request: HttpRequest, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """Fails unless the answer is a correct one for some request, right or wrong.

    Args:
        headers: headers by lower-case name.
    """
    assert status < 500 or status in DECLARED_5XX, (request, status, body[:500])
    if status < 400 or request.method == "HEAD":
        return
    if request.path.split("?")[0].startswith("/health") and status == 503:  # the readiness page
        return
    if request.method == "POST" and not unquote_to_bytes(request.path.split("?")[0]).strip(
        b"/"
    ):  # another dialect's errors
        assert headers["content-type"] == "application/json", (request, status, headers)
        assert json.loads(body).keys() == {"error", "error_type"}, (request, body)
        return
    assert headers["content-type"] == PROBLEM_JSON, (request, status, headers)
    problem = json.loads(body)
    assert problem["status"] == status, (request, problem)
    assert problem["code"] in error_codes(), (request, problem)
    assert problem["detail"].strip(), (request, problem)
    assert problem["request_id"] == headers["x-request-id"], (request, problem)
    if status in DECLARED_5XX or status == 429:
        assert 1 <= int(headers["retry-after"]) <= 60, (request, headers)


def call_app(app: Any, request: HttpRequest) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by lower-case name, and body of a request to a WSGI app, as a server would pass it on.

    Falcon's own test client refuses to send many of these requests.
    """
    path, _, query = request.path.partition("?")
    headers = {"Host": "localhost", **request.headers}
    environ = testing.create_environ("/", headers={"Host": headers["Host"]}, body=request.body)
    environ["REQUEST_METHOD"] = request.method
    environ["PATH_INFO"] = unquote_to_bytes(path).decode("latin-1")
    environ["QUERY_STRING"] = query
    environ["CONTENT_LENGTH"] = str(len(request.body))
    for name, value in headers.items():
        variable = name.upper().replace("-", "_")
        environ[variable if variable in {"CONTENT_LENGTH", "CONTENT_TYPE"} else f"HTTP_{variable}"] = value
    start = testing.StartResponseMock()
    response = app(environ, start)
    body = b"".join(response)
    getattr(response, "close", lambda: None)()
    assert start.status is not None
    return int(start.status[:3]), start.headers_dict, body


ODD_TEXTS = [
    "",
    " ",
    "\x00",
    "a\x00b",
    "\ud800",
    "\udfff\ud800",
    "\ufeff",
    "\u202e",
    "\x7f\x80",
    "\U0010ffff",
    "é" * 300,
    "e\u0301" * 50,
    "<|endoftext|>",
    "\r\n\t",
    "' OR 1=1 --",
    "../../etc/passwd",
    "{{7*7}}",
    "%s%n",
    "a" * 3000,
]
_texts = st.one_of(st.sampled_from(ODD_TEXTS), st.text(max_size=40))
_numbers: st.SearchStrategy[float] = st.one_of(
    st.sampled_from([json.loads(number) for number in (*EDGES, *NOT_JSON)]), st.integers(-10, 300), st.floats(width=64)
)
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, _texts),
    lambda inner: st.one_of(st.lists(inner, max_size=10), st.dictionaries(_texts, inner, max_size=3)),
    max_leaves=10,
)
# Values that the field's own kind suggests, so that many requests fail in one field only, and many in none.
_likely: dict[str, st.SearchStrategy[Any]] = {
    "context": _texts,
    "stop": st.lists(_texts, max_size=10),
    "session": _texts,
    "model_size": st.sampled_from(["small", "medium", "large", "", "x" * 200]),
    "single_line": st.booleans(),
    "stream": st.booleans(),
    "max_time": st.one_of(st.floats(0, 0.05), _numbers),
    "id": _texts,
    "action": st.sampled_from(["accepted", "rejected", "ignored", "liked", ""]),
}


def _write(members: list[tuple[str, Any]], is_ascii: bool) -> bytes:
    """A JSON object with these members, repeated names and lone surrogates included."""
    written = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=is_ascii)}" for name, value in members)
    return ("{" + ", ".join(written) + "}").encode("utf-8", "surrogatepass")


@st.composite
def structured_bodies(draw: st.DrawFn, names: list[str], required: Mapping[str, Any]) -> bytes:
    """JSON objects with fields of the schema and others, in and out of their ranges, sometimes repeated."""
    members = [(name, value) for name, value in required.items() if draw(st.integers(0, 9))]
    for name in draw(st.lists(st.sampled_from(names), max_size=5)):
        likely = _likely.get(name, _numbers)
        members.append((name, draw(likely if draw(st.integers(0, 3)) else _values)))
    if not draw(st.integers(0, 9)):
        members.append((draw(_texts), draw(_values)))
    return _write(members, is_ascii=draw(st.booleans()))


@st.composite
def raw_bodies(draw: st.DrawFn) -> bytes:
    """Bytes that are not JSON, or nearly: cut, changed, nested, in other encodings."""
    body = draw(structured_bodies(FIELDS, {"context": "He saw"}))
    if not draw(st.integers(0, 3)):  # the same names twice
        body = body[:-1] + b", " + draw(structured_bodies(FIELDS, {"context": "He saw"}))[1:]
    kind = draw(st.integers(0, 7))
    if kind == 0:
        return draw(st.binary(max_size=100))
    if kind == 1:
        return body[: draw(st.integers(0, len(body)))]
    if kind == 2:
        position = draw(st.integers(0, len(body)))
        return body[:position] + draw(st.binary(min_size=1, max_size=4)) + body[position:]
    if kind == 3:
        depth = draw(st.sampled_from([10, 500, 990, 1_000, 1_010, 5_000, 100_000]))
        opening = draw(st.sampled_from([b"[", b'{"a":', b'{"context":', b'{"stop":[']))
        return opening * depth
    if kind == 4:
        depth = draw(st.sampled_from([10, 500, 990, 1_000, 1_010, 5_000]))
        return b'{"context": "a", "stop": ' + b"[" * depth + b"]" * depth + b"}"
    if kind == 5:
        return body.decode("utf-8", "replace").encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-7", "utf-8-sig"])))
    if kind == 6:
        number = draw(st.sampled_from(["1e999", "-1e999", "1e-999", "9" * 5_000, "NaN", "Infinity", "0x1", "01", "+1"]))
        return f'{{"context": "a", "{draw(st.sampled_from(FIELDS))}": {number}}}'.encode()
    return draw(st.sampled_from([b"", b" ", b"null", b"[]", b"[{}]", b"1", b'"a"', b"{}{}", b"\xef\xbb\xbf{}"]))


_header_values = st.one_of(
    st.sampled_from(["", "a", "0", "-1", "é", "*", "null", "x" * 5_000, '"', "\t", "http://[", "localhost:evil"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30),
)
_header_names = st.sampled_from(
    [
        "Accept",
        "Accept-Encoding",
        "Authorization",
        "Content-Type",
        "Cookie",
        "Forwarded",
        "If-Match",
        "If-None-Match",
        "If-Modified-Since",
        "Origin",
        "Range",
        "Referer",
        "User-Agent",
        "X-API-Key",
        "X-Forwarded-For",
        "X-Http-Method-Override",
        "X-Request-Id",
        "Access-Control-Request-Method",
    ]
)
_headers = st.dictionaries(_header_names, _header_values, max_size=3)
_methods = st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "PRI"])
_path_ends = st.one_of(
    st.just(""),
    st.sampled_from(["/", "//", "/..", "/%2e%2e/", "%00", "%ff", "?a=%zz", "?" + "a=1&" * 200, ";x", "%f0%28", "\\"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="#"), max_size=20),
)


@st.composite
def bad_requests(draw: st.DrawFn) -> HttpRequest:
    """Any of the above; most are bodies for `/autocomplete`."""
    kind = draw(st.integers(0, 9))
    if kind < 4:
        return HttpRequest("POST", "/autocomplete", draw(structured_bodies(FIELDS, {"context": "He saw"})))
    if kind < 7:
        return HttpRequest("POST", draw(st.sampled_from(PATHS[:2])), draw(raw_bodies()))
    if kind < 8:
        required = {"id": "a", "index": 0, "action": "accepted"}
        return HttpRequest("POST", "/feedback", draw(structured_bodies(FEEDBACK_FIELDS, required)))
    method = draw(_methods)
    body = draw(raw_bodies()) if method in {"POST", "PUT", "PATCH", "DELETE"} else b""
    return HttpRequest(method, draw(st.sampled_from(PATHS)) + draw(_path_ends), body, draw(_headers))
