"""What stands in front of a container on SageMaker, as far as `invoke_endpoint` sees it.

It passes `/endpoints/NAME/invocations` to the container's `/invocations` and turns the container's errors into
`ModelError`. Source: the API reference of InvokeEndpoint.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_PASSED = ("content-type", "accept", "x-amzn-sagemaker-custom-attributes")


class _Front(BaseHTTPRequestHandler):
    container: httpx.Client

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if not re.fullmatch(r"/endpoints/[\w-]+/invocations", self.path):
            self.send_error(404)
            return
        headers = {name: self.headers[name] for name in _PASSED if name in self.headers}
        answer = self.container.post("/invocations", content=body, headers=headers)
        status, content, error = answer.status_code, answer.content, {}
        if answer.is_error:
            status, error = 424, {"x-amzn-errortype": "ModelError"}
            content = json.dumps({"OriginalStatusCode": answer.status_code, "OriginalMessage": answer.text}).encode()
        self.send_response(status)
        for name in _PASSED:
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        for name, value in {**error, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@contextmanager
def sagemaker_front(container_url: str) -> Iterator[str]:
    """A front of the container at `container_url`; yields its own URL."""
    with httpx.Client(base_url=container_url, timeout=60, trust_env=False) as container:
        handler = type("Front", (_Front,), {"container": container})
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever).start()
            try:
                yield f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
