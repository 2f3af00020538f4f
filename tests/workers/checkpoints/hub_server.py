"""A model hub on 127.0.0.1: the part of the hub's API that a download needs, and faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Server = TypeVar("Server", bound=ThreadingHTTPServer)


class Hub(ThreadingHTTPServer):
    """A model hub on 127.0.0.1. `repositories` maps names to files; the other attributes select faults."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.status = 200
        self.token: str | None = None  # without it, every repository is as one that does not exist
        self.page: bytes | None = None  # answers everything
        self.is_dripping = False  # sends an answer that never ends
        self.spoiled: str | None = None  # a file whose bytes do not match its digest
        self.endless: str | None = None  # a file that never ends
        self.dripped: str | None = None  # a file that arrives byte by byte
        self.num_sent = 0  # bytes of the endless file
        self.stalled: str | None = None  # a file of which half is sent
        self.has_stalled = threading.Event()
        self.may_continue = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(server: Server) -> Iterator[Server]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append(path)
        if hub.is_dripping:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            with contextlib.suppress(ConnectionError):  # the client is killed
                while True:
                    self.wfile.write(b"X-Drip: 1\r\n")
                    time.sleep(0.1)
        elif hub.status != 200 or hub.page is not None:
            self._send(hub.page or b"no", status=hub.status)
        elif hub.token is not None and self.headers["authorization"] != f"Bearer {hub.token}":
            self._send(b"{}", status=401, headers={"X-Error-Code": "RepoNotFound"})
        elif match := re.fullmatch(r"/api/models/([\w-]+/[\w-]+)(?:/revision/(.+))?", path):
            self._send_listing(match[1], match[2])
        elif match := re.fullmatch(rf"/api/models/([\w-]+/[\w-]+)/tree/{COMMIT}", path):
            self._send_tree(match[1])
        elif match := re.fullmatch(rf"/([\w-]+/[\w-]+)/resolve/(?:main|v1|{COMMIT})/(.+)", path):
            self._send_file(match[1], match[2])
        else:
            self._send(b"unknown", status=404)

    def _send_listing(self, repository: str, revision: str | None) -> None:
        if revision not in (None, "main", "v1", COMMIT):
            self._send(b"{}", status=404, headers={"X-Error-Code": "RevisionNotFound"})
            return
        files = self.server.repositories.get(repository)
        if files is None:
            # As the real hub answers for private and for missing repositories.
            self._send(b"{}", status=401, headers={"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": name, "size": len(data), **_digests(name, data)} for name, data in files.items()]
        self._send(json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())

    def _send_tree(self, repository: str) -> None:
        files = self.server.repositories[repository]
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        self._send(json.dumps(entries).encode())

    def _send_file(self, repository: str, file: str) -> None:
        data = self.server.repositories[repository][file]
        digest = hashlib.sha256(data).hexdigest()
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{digest if file.endswith(".safetensors") else digest[:40]}"',
        }
        if self.command == "GET" and file in {self.server.endless, self.server.dripped}:
            self._send_on(data, headers)
            return
        if self.server.spoiled == file:
            data = data[:-1] + b"?"
        self._send(data, headers=headers, is_stalling=self.server.stalled == file)

    def _send_on(self, data: bytes, headers: dict[str, str]) -> None:
        """Send until the client hangs up; an endless file has no length."""
        is_endless = self.server.endless is not None
        self.send_response(200)
        for key, value in (headers if is_endless else {**headers, "Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(bytes(1 << 20) if is_endless else b"x")
                self.server.num_sent += 1 << 20
                self.server.has_stalled.set()
                time.sleep(0 if is_endless else 0.1)

    def _send(
        self,
        data: bytes,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        is_stalling: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_stalling:
            self.wfile.write(data[: len(data) // 2])
            self.server.has_stalled.set()
            self.server.may_continue.wait(20)
        else:
            self.wfile.write(data)

    def log_request(self, code: object = None, size: object = None) -> None:
        """No log."""


def _digests(name: str, data: bytes) -> dict[str, Any]:
    """What the hub lists: a git object id of small files, a SHA-256 of weights, which it keeps by git-lfs."""
    if name.endswith(".safetensors"):
        sha256 = hashlib.sha256(data).hexdigest()
        return {"blobId": "0" * 40, "lfs": {"sha256": sha256, "size": len(data), "pointerSize": 130}}
    return {"blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
