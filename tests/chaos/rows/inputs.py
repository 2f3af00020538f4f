"""R13: bad input of every kind, against a running instance."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from shared.errors import PROBLEM_JSON
from tests.chaos.http_client import Answer, Connection, find_fault, request_bytes
from tests.chaos.measure import Context, Findings

Body = dict[str, Any]
NUMBERS: list[Any] = [
    0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**40, 1e-320, 1e308, -0.0, 0.5, float("nan"), float("inf"), True,
]  # fmt: skip
STRINGS: list[Any] = [
    "", " ", "\0", "a\0b", "\ud800", "\udfff\ud800", "\U0010ffff", "\ufeff", "\u202e", "e" + "\u0301" * 500, "x" * 5000,
    "'; DROP TABLE", "{{7*7}}", "%s%n", "../../etc/passwd", "<script>", "\r\nX-Evil: 1",
]  # fmt: skip
OTHERS: list[Any] = [None, [], {}, [[]], [None], {"a": {}}, [1, "a"]]
FIELDS = [
    "context", "n_samples", "samples", "n", "length", "max_time", "model_size", "temperature", "top_k", "top_p",
    "max_tokens", "repetition_penalty", "stop", "single_line", "seed", "session", "stream", "explain", "min_p",
]  # fmt: skip
# Of the other dialects: their fields, their required field and few tokens, and the members of their errors.
OPENAI_FIELDS = [
    "model", "prompt", "max_tokens", "n", "best_of", "temperature", "top_p", "frequency_penalty", "presence_penalty",
    "logit_bias", "logprobs", "echo", "stop", "seed", "stream", "stream_options", "suffix", "clean", "session", "user",
]  # fmt: skip
TGI_FIELDS = [
    "best_of", "temperature", "repetition_penalty", "frequency_penalty", "top_k", "top_p", "do_sample", "seed", "stop",
    "max_new_tokens", "return_full_text", "truncate", "details", "decoder_input_details", "top_n_tokens", "watermark",
]  # fmt: skip
ERROR_MEMBERS = {"/v1/completions": {"error"}, "/generate": {"error", "error_type"}, "/": {"error", "error_type"}}
PATHS = [
    "/autocomplete",
    "/feedback",
    "//autocomplete",
    "/autocomplete/",
    "/AUTOCOMPLETE",
    "/%61utocomplete",
    "/",
    "/x",
]


def refuse_bad_input(context: Context, findings: Findings) -> None:
    """Random requests on persistent connections: no 5xx, every 4xx problem+json, and no process replaced.

    What happens to be right is answered, with few tokens. A 503 for overload cannot occur with one client.
    """
    tercet, endpoint = context.shared()
    before = [process.pid for group in tercet.processes().values() for process in group]
    num_requests = context.amount(1000, 10_000)
    rng = random.Random(context.seed)
    wrong = Counter[str]()
    statuses = Counter[str]()
    with Connection(endpoint) as connection:
        for _ in range(num_requests):
            kind, request = _bad_request(rng)
            answer = connection.exchange(request)
            statuses[f"{answer.status // 100}xx"] += 1
            if fault := _find_fault(kind, request, answer):
                wrong[f"{kind}: {fault}"] += 1
    after = [process.pid for group in tercet.processes().values() for process in group]
    findings.figures |= {"requests": num_requests, **dict(sorted(statuses.items()))}
    findings.none_of("wrong answers", dict(wrong))
    findings.require(before == after, f"the processes {before} became {after}")
    findings.require(statuses["4xx"] > num_requests / 4, "too few requests were wrong")


def _find_fault(kind: str, request: bytes, answer: Answer) -> str:
    """As `find_fault`; a dialect that has an error shape of its own must use it."""
    if answer.status >= 500 or answer.status == 0:
        return f"{answer.status} {answer.body[:100].decode(errors='replace')}"
    if answer.status < 400:
        return ""
    method, path, _ = request.split(b" ", 2)
    members = ERROR_MEMBERS.get(path.decode("latin-1")) if method == b"POST" else None
    if members is None or (kind == "headers" and answer.headers.get("content-type", "").startswith(PROBLEM_JSON)):
        return find_fault(answer)  # what is no valid HTTP is refused before it has a path
    return "" if answer.document().keys() == members else f"{answer.status} of another shape at {path!r}"


def _bad_request(rng: random.Random) -> tuple[str, bytes]:
    kind = rng.choice(list(_KINDS))
    return kind, _KINDS[kind](rng)


def _post(body: bytes, path: str = "/autocomplete") -> bytes:
    return request_bytes("POST", path, body)


def _value(rng: random.Random) -> Any:
    return rng.choice(rng.choice((NUMBERS, STRINGS, OTHERS)))


def _body(rng: random.Random) -> Body:
    return {"context": "The sea", "length": 1, "n_samples": rng.randrange(1, 3)}


def _wrong_values(rng: random.Random) -> bytes:
    body = _body(rng)
    for _ in range(rng.randrange(1, 4)):
        body[rng.choice(FIELDS)] = _value(rng)
    return _post(json.dumps(body).encode())


def _wrong_values_of_openai(rng: random.Random) -> bytes:
    body: Body = {"prompt": "The sea", "max_tokens": 1}
    for _ in range(rng.randrange(1, 4)):
        body[rng.choice(OPENAI_FIELDS)] = _value(rng)
    return _post(json.dumps(body).encode(), "/v1/completions")


def _wrong_values_of_tgi(rng: random.Random) -> bytes:
    parameters: Body = {"max_new_tokens": 1}
    for _ in range(rng.randrange(1, 4)):
        parameters[rng.choice(TGI_FIELDS)] = _value(rng)
    body: Body = {"inputs": "The sea", "parameters": parameters}
    if rng.random() < 0.2:
        body[rng.choice(("inputs", "parameters", "stream"))] = _value(rng)
    return _post(json.dumps(body).encode(), "/generate")


def _unknown_fields(rng: random.Random) -> bytes:
    body = _body(rng)
    body[str(rng.choice(STRINGS))] = _value(rng)
    return _post(json.dumps(body).encode())


def _mutated_bytes(rng: random.Random) -> bytes:
    """JSON with bytes replaced, removed or added: also what is no UTF-8."""
    body = bytearray(json.dumps(_body(rng) | {rng.choice(FIELDS): _value(rng)}).encode())
    for _ in range(rng.randrange(1, 5)):
        where = rng.randrange(len(body) + 1)
        match rng.randrange(3):
            case 0:
                body[where : where + 1] = bytes([rng.randrange(256)])
            case 1:
                del body[where : where + rng.randrange(1, 5)]
            case 2:
                body[where:where] = rng.choice(
                    (b"\xff\xfe", b"\xed\xa0\x80", b"\0", b"NaN", b"1e999", b"\\ud800", b"}")
                )
        if not body:
            break
    return _post(bytes(body))


def _nested(rng: random.Random) -> bytes:
    depth = rng.choice((10, 500, 1000, 5000, 100_000))
    opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    value = opening * depth + (b"1" + closing * depth if rng.random() < 0.5 else b"")
    return _post(value if rng.random() < 0.5 else b'{"context": "a", "length": 1, "stop": ' + value + b"}")


def _repeated_keys(rng: random.Random) -> bytes:
    name = rng.choice(FIELDS)
    values = ", ".join(f'"{name}": {json.dumps(_value(rng))}' for _ in range(rng.randrange(2, 50)))
    return _post(('{"context": "a", "length": 1, ' + values + "}").encode())


def _no_object(rng: random.Random) -> bytes:
    return _post(rng.choice((b"", b" ", b"null", b"1", b"[]", b'"a"', b"{", b"{}", b"\xef\xbb\xbf{}", b"\xff", b"\0")))


def _feedback(rng: random.Random) -> bytes:
    body = {name: _value(rng) for name in ("id", "index", "action", "characters", "kept")}
    return _post(json.dumps(body).encode(), "/feedback")


def _headers(rng: random.Random) -> bytes:
    names = (
        "SCRIPT_NAME", "Script-Name", "PATH_INFO", "Host", "Origin", "Content-Type", "Accept", "X-Request-Id", "Range",
        "Transfer-Encoding", "Connection", "Upgrade", "Expect", "Content-Encoding", "X-Forwarded-For", "Cookie",
        "Authorization", "Forwarded", "Access-Control-Request-Method", "If-None-Match",
    )  # fmt: skip
    value = str(rng.choice(STRINGS)).encode("utf-8", "surrogatepass")[:2000].decode("latin-1")
    return request_bytes(
        rng.choice(("GET", "POST", "HEAD", "OPTIONS")).replace("HEAD", "GET"), rng.choice(PATHS),
        json.dumps(_body(rng)).encode(), {rng.choice(names): value.replace("\r\n", " ")},
    )  # fmt: skip


def _methods_and_paths(rng: random.Random) -> bytes:
    method = rng.choice(("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "get"))
    path = rng.choice(PATHS) + rng.choice(("", "?", "?a=%ff", "?" + "a" * 300, "#x", ";x", "%00", "/../x", "/%2e%2e/x"))
    return request_bytes(method, path)


_KINDS: dict[str, Callable[[random.Random], bytes]] = {
    "wrong values": _wrong_values,
    "wrong values, OpenAI": _wrong_values_of_openai,
    "wrong values, Text Generation Inference": _wrong_values_of_tgi,
    "unknown fields": _unknown_fields,
    "mutated bytes": _mutated_bytes,
    "nested": _nested,
    "repeated keys": _repeated_keys,
    "no object": _no_object,
    "feedback": _feedback,
    "headers": _headers,
    "methods and paths": _methods_and_paths,
}
