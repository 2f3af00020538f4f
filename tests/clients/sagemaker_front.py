"""What stands in front of a container on SageMaker, as far as `invoke_endpoint` sees it.

It passes `/endpoints/NAME/invocations` to the container's `/invocations` and turns the container's errors into
`ModelError`. Source: the API reference of InvokeEndpoint.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.gateway.pool.helpers import respond, serving_requests

_PASSED = ("content-type", "accept", "x-amzn-sagemaker-custom-attributes")


@contextmanager
def sagemaker_front(container_url: str) -> Iterator[str]:
    """A front of the container at `container_url`; yields its own URL."""

    def pass_on(connection: socket.socket, request: bytes) -> None:
        head, _, body = request.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        if not re.fullmatch(r"POST /endpoints/[\w-]+/invocations HTTP/1.1", line):
            respond(connection, 404, b"")
            return
        sent = httpx.Headers([(name, value) for name, _, value in (field.partition(": ") for field in fields)])
        headers = {name: sent[name] for name in _PASSED if name in sent}
        answer = container.post("/invocations", content=body, headers=headers)
        passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
        status, content = answer.status_code, answer.content
        if answer.is_error:
            content = json.dumps({"OriginalStatusCode": status, "OriginalMessage": answer.text}).encode()
            status, passed = 424, {**passed, "x-amzn-errortype": "ModelError"}
        respond(connection, status, content, passed)

    with (
        httpx.Client(base_url=container_url, timeout=60, trust_env=False) as container,
        serving_requests(pass_on) as server,
    ):
        yield f"http://{server.address}"
