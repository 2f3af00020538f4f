"""Requests for tokens are bounded like those for completions: by their key, by their client, by the server's stop."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from shared.protocol import TokenizeResponse
from tests.gateway.api.conftest import MakeApi
from tests.gateway.api.test_refusals import Key, Keys, quick

ROUTES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/tokenize", {"inputs": "a"}),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("GET", "/tokenizer_info", None),
    ("POST", "/generate", {"inputs": "a", "parameters": {"max_length": 9}}),
]


class Worker:
    """Holds each text until it is released."""

    def __init__(self) -> None:
        self.has_text, self.is_free = threading.Event(), threading.Event()

    def __call__(self, text: str) -> TokenizeResponse:
        self.has_text.set()
        self.is_free.wait(20)
        return TokenizeResponse(ids=[7], texts=[text], ends=[len(text)], n_ctx=1024, eos_id=0)


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_a_request_for_tokens_counts_in_its_keys_concurrency_and_ends_with_its_client(
    make_api: MakeApi, method: str, path: str, body: dict[str, Any] | None
) -> None:
    """60 texts of one key were tokenized at once. `tests/gateway/pool/test_tokenizing.py` has other ends."""
    worker = Worker()
    api = make_api(quick, tokenize=worker, settings={"key_concurrency": "1"})
    api.app.add_middleware(Keys(a=Key()))
    headers = {"X-Key": "a"}
    ours, peer = socket.socketpair()
    with ours, peer, ThreadPoolExecutor(1) as threads:
        extras = {"gunicorn.socket": ours}
        held = threads.submit(api.request, method, path, json=body, headers=headers, extras=extras)
        assert worker.has_text.wait(5)
        assert api.request(method, path, json=body, headers=headers).status_code == 429
        peer.close()
        assert held.result(5).status_code == 499
        worker.is_free.set()
    assert api.request(method, path, json=body, headers=headers).status_code == 200


def test_tokens_in_several_parts_are_one_list(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.api.tokens.TOKENS_AT_ONCE", 2)

    def by_character(text: str) -> TokenizeResponse:
        return TokenizeResponse(
            ids=[*range(len(text))], texts=[*text], ends=[*range(1, len(text) + 1)], n_ctx=9, eos_id=0
        )

    api = make_api(quick, tokenize=by_character)
    for text in ("", "a", "ab", "abc", "abcd"):
        expected = [{"id": i, "text": part, "start": i, "stop": i + 1} for i, part in enumerate(text)]
        assert api.post("/tokenize", {"inputs": text}).json == expected


@pytest.mark.parametrize(
    ("path", "body", "statuses"),
    [
        ("/tokenize", {"prompt": "x" * 40_000}, [200, 200, 429, 429]),
        ("/generate", {"inputs": "x" * 40_000, "parameters": {"max_length": 9}}, [200, 200, 429, 429]),
        ("/generate", {"inputs": "x" * 40_000}, [200, 200, 200, 200]),
    ],
)
def test_a_text_to_tokenize_counts_more_bytes_than_a_context(
    make_api: MakeApi, path: str, body: dict[str, Any], statuses: list[int]
) -> None:
    worker = Worker()
    worker.is_free.set()
    api = make_api(quick, tokenize=worker, settings={"bytes_per_s": "1"})
    assert [api.post(path, body).status_code for _ in range(4)] == statuses
