"""Requests that carry a prompt and a key in every place where a client can put them.

A test sends them to the app in this process or to a running server, and then looks for both texts in the logs, in the
metrics and in what other clients are answered.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from gateway.api.schema import AutocompleteRequest, FeedbackRequest
from tests.bad_requests import HttpRequest


@dataclass(frozen=True)
class Canaries:
    """Texts that must not appear anywhere: words of a prompt, without quotes, and a valid API key."""

    prompt: str
    key: str

    def found_in(self, text: str) -> bool:
        """Also in parts, escaped in JSON, or percent-encoded."""
        return any(word in text for word in (*self.prompt.split(), self.key, self.key.removeprefix("tct_")))


def canary_requests(canaries: Canaries) -> Iterator[HttpRequest]:
    """More than a hundred: valid, malformed, wrong in each field, too large, on wrong paths, by wrong methods."""
    prompt, key = canaries.prompt, canaries.key
    authorized = {"Authorization": f"Bearer {key}"}

    def post(body: Any, path: str = "/autocomplete", headers: dict[str, str] | None = None) -> HttpRequest:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return HttpRequest("POST", path, raw, authorized | (headers or {}))

    for is_streamed in (False, True):
        for more in ({}, {"session": prompt}, {"stop": [prompt]}, {"session": key}, {"n": 8, "temperature": 0}):
            yield post({"context": prompt, "stream": is_streamed, **more})
    raw = prompt.encode()
    for malformed in (
        raw,
        b'{"context": "%s' % raw,
        b'{"context": "%s"} %s' % (raw, raw),
        b'{"context": "%s\xff"}' % raw,
        b'{"context": "%s\\ud800"}' % raw,
        b'["%s"]' % raw,
        b'"%s"' % raw,
        b'{"%s"}' % raw,
        b'{"context":%s}' % raw,
        b'{"context": "%s", "context": "%s"}' % (raw, raw),
        b"\xef\xbb\xbf%s" % raw,
        raw * 100_000,
        b'{"context":' + b"[" * 2_000 + b'"%s"' % raw,
    ):
        yield post(malformed)
        yield post(malformed, "/feedback")
    for path, kind, required in (
        ("/autocomplete", AutocompleteRequest, {"context": prompt}),
        ("/feedback", FeedbackRequest, {"id": prompt, "index": 0, "action": "accepted"}),
    ):
        yield post(required, path)
        yield post({**required, prompt: 1}, path)
        yield post({**required, key: prompt}, path)
        for field in structs.fields(kind):
            for value in (prompt * 20, [prompt] * 20, {prompt: prompt}, [key]):
                yield post({**required, field.name: value}, path)
    words = prompt.replace(" ", "%20")
    for path in (f"/{words}", f"/static/{words}", f"/autocomplete/{words}", f"/autocomplete?context={words}&key={key}"):
        yield HttpRequest("GET", path, b"", authorized)
        yield post({"context": prompt}, path)
    for method in ("GET", "PUT", "DELETE", "TRACE", prompt.split()[0], key):
        yield HttpRequest(method, "/autocomplete", b"", authorized)
    for header in (
        *("User-Agent", "X-Request-Id", "Referer", "Origin", "Host", "Cookie", "X-API-Key", "Accept", "If-None-Match"),
        *("Content-Type", "Content-Encoding", "Content-Length", "Forwarded", "Authorization"),
    ):
        for value in (prompt, key, f"Bearer {prompt}", f"Bearer {key}x"):
            yield post({"context": "He saw"}, headers={header: value})
