"""The bytes between gateway and worker, which may be of different versions: each must understand the other."""

from __future__ import annotations

import msgspec
import pytest

from shared import wire
from shared.protocol import ENGINE_FAILURES, MAX_TYPED_TOKENS, Accepted, Failed, State, TokenizeResponse, Tokens
from tests.workers.helpers import run_python
from workers.engine.failures import EngineFailure
from workers.text.token_healing import MAX_FORCED_BYTES

LOCAL = b"POST /generate HTTP/1.1\r\nHost: slot\r\nContent-Length: 12\r\nX-Request-Id: r-1\r\n\r\n"
REMOTE = (
    b"POST /pool/generate HTTP/1.1\r\nHost: workers.example:9100\r\nAuthorization: Bearer k\r\n"
    b"Content-Length: 12\r\nX-Request-Id: r-1\r\nX-Session-Id: 5f\r\n\r\n"
)


def head(target: str, headers: list[tuple[bytes, bytes]]) -> bytes:
    """As the gateway's transport writes it: tests/gateway/pool/test_transport.py."""
    lines = [f"POST {target} HTTP/1.1".encode(), *(b"%s: %s" % header for header in headers)]
    return b"\r\n".join([*lines, b"", b""])


def remote_head(prefix: str = "") -> bytes:
    headers = wire.request_headers(host=b"workers.example:9100", key="k", length=12, request_id="r-1", session_id=b"5f")
    return head(f"{prefix}/generate", headers)


def test_heads_are_these_bytes() -> None:
    assert head("/generate", wire.request_headers(length=12, request_id="r-1")) == LOCAL
    assert remote_head("/pool") == REMOTE
    assert wire.request_headers() == [(b"Host", b"slot")]


def test_a_worker_matches_what_a_gateway_writes() -> None:
    assert wire.match_head(LOCAL + b"x" * 12) == wire.GenerateHead(len(LOCAL), 12)
    head = remote_head()
    assert wire.match_head(head + b"x" * 12) == wire.GenerateHead(len(head), 12, b"Bearer k")


@pytest.mark.parametrize(
    "data",
    [
        LOCAL[:-1],
        LOCAL.replace(b"POST", b"GET"),
        LOCAL.replace(b"12", b"-1"),
        LOCAL.replace(b"12", b"1234567890"),
        LOCAL.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
        REMOTE,
    ],
)
def test_another_head_is_left_to_the_parser(data: bytes) -> None:
    assert wire.match_head(data) is None


def test_lines_are_told_apart_whatever_the_chunks() -> None:
    lines = wire.encode_lines([Accepted(), Failed(code="c", detail="d")])
    for size in (1, 7, len(lines)):
        chunks = [lines[at : at + size] for at in range(0, len(lines), size)]
        found = [line for batch in wire.split_lines(chunks) for line in batch]
        assert list(map(wire.decode_line, found)) == [Accepted(), Failed(code="c", detail="d")]


def test_a_body_that_ends_within_a_line_is_broken() -> None:
    with pytest.raises(wire.InvalidAnswer) as caught:
        list(wire.split_lines([wire.encode_line(State(state="warm"))[:-1]]))
    assert caught.value.code == "broken"


def test_tokens_in_parts_are_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "TOKENS_PER_PART", 2)
    texts = ["a", " b", "\u00e9"]
    tokens = TokenizeResponse(ids=[5, 6, 7], texts=texts, ends=[1, 3, 4], n_ctx=64, eos_id=2, eos_token="<end>")
    encoded = b"".join(wire.encode_tokens(tokens))
    assert msgspec.json.decode(encoded, type=TokenizeResponse) == tokens
    assert wire.decode_tokens(encoded) == Tokens(ids=[5, 6, 7], ends=[1, 3, 4], n_ctx=64, eos_id=2, eos_token="<end>")


def test_concurrent_first_requests_do_not_crash() -> None:
    """Runs in fresh processes: msgspec builds a type's table at its first use in a process."""
    program = """
import sys, threading
from shared.wire import parse_generate_request
sys.setswitchinterval(1e-6)
body = b'{"prompt": "a", "sampling": {"top_k": 3}, "group": {"id": "g", "size": 3}, "request_id": "r"}'
together = threading.Barrier(8)
def first():
    together.wait()
    parse_generate_request(body)
threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    assert [run_python(program).returncode for _ in range(3)] == [0] * 3


def test_token_healing_types_no_more_tokens_than_the_protocol_has() -> None:
    assert MAX_FORCED_BYTES == MAX_TYPED_TOKENS  # a token has a byte at least


def test_every_kind_of_failure_of_an_engine_is_a_listed_code() -> None:
    failures: list[type[EngineFailure]] = [EngineFailure, *EngineFailure.__subclasses__()]
    kinds = {failure.kind for failure in failures}
    assert kinds == ENGINE_FAILURES


@pytest.mark.parametrize(("limits", "is_valid"), [((5, 12), True), ((4, 12), False), ((5, 11), False)])
@pytest.mark.parametrize("size", [1, 3, 12])
def test_lines_and_all_lines_have_a_limit(limits: tuple[int, int], is_valid: bool, size: int) -> None:
    body = b"aaaaa\nbbbbb\n"
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    if is_valid:
        assert [line for batch in wire.split_lines(chunks, *limits) for line in batch] == [b"aaaaa", b"bbbbb"]
    else:
        with pytest.raises(wire.InvalidAnswer, match="more bytes"):
            list(wire.split_lines(chunks, *limits))
