"""AWS for tests: moto's server behind a proxy that records each call and can delay, fail, lose or rewrite it.

moto keeps no time: an instance runs and an endpoint serves as soon as they are made. What AWS takes minutes for, and
what fails there, is injected here, in the wire format of the called service. Calls reach moto unchanged otherwise.
"""

from __future__ import annotations

import fnmatch
import json
import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape

import boto3
from botocore.config import Config

from tests.gateway.jobs.servers import AWS_ENVIRON, dynamodb_server

REGION = "eu-central-1"
MOTO_TIMEOUT_S = 60.0
Rewrite = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the calls number `first` to `first + times - 1` (from 1) of an operation.

    Attributes:
        operation: as `Call.operation` has it; `*` and `?` match as in a shell.
        status: answer with this status and the error `code` instead of the service's answer; 0: let it answer.
        is_performed: whether, with a `status`, the service performs the call and only its answer is lost.
        rewrite: changes the body of an answer that is no error.
    """

    operation: str
    first: int = 1
    times: int = 1
    delay_s: float = 0.0
    status: int = 0
    code: str = ""
    message: str = ""
    is_performed: bool = False
    rewrite: Rewrite | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call as the proxy saw it.

    Attributes:
        service: as the signature names it, like "sagemaker".
        operation: "CreateEndpoint", or for REST services the method and path, "PUT /bucket/key".
        body: decoded from JSON or a form; else empty.
        status: status of the answer that the caller got.
    """

    service: str
    operation: str
    body: dict[str, Any]
    status: int


class Cloud:
    """The proxy. Faults hold for one test: `reset` removes them, the recorded calls, and everything in moto."""

    def __init__(self, moto_port: int) -> None:
        self._moto_port = moto_port
        self._lock = threading.Lock()
        self._counts: Counter[Fault] = Counter()
        self._faults: list[Fault] = []
        self._calls: list[Call] = []
        self._clients: dict[str, Any] = {}
        cloud = self

        class Handler(_Handler):
            def answer(self, body: bytes) -> None:
                cloud._answer(self, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    # What tests give to the code under test.

    @property
    def environ(self) -> dict[str, str]:
        """Variables by which boto3 in another process uses this cloud."""
        return {**AWS_ENVIRON, "AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": REGION}

    def client(self, service: str, config: Config | None = None) -> Any:
        """boto3's client of a service. Without retries unless `config` says otherwise."""
        if config is None and service in self._clients:
            return self._clients[service]
        made = boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id="tests",
            aws_secret_access_key="tests",
            config=config or Config(retries={"total_max_attempts": 1}, proxies={}),
        )
        if config is None:
            self._clients[service] = made
        return made

    # What happened.

    @property
    def calls(self) -> list[Call]:
        """The calls in the order of their answers."""
        with self._lock:
            return list(self._calls)

    def operations(self, *services: str) -> list[str]:
        """The operations in order, of all services or of these."""
        return [call.operation for call in self.calls if not services or call.service in services]

    def count(self, operation: str) -> int:
        return sum(fnmatch.fnmatchcase(name, operation) for name in self.operations())

    def forget(self) -> None:
        """Remove the recorded calls and the faults; what is in moto stays."""
        with self._lock:
            self._calls, self._faults, self._counts = [], [], Counter()

    def reset(self) -> None:
        """An empty account."""
        self.forget()
        self._forward("POST", "/moto-api/reset", {}, b"")

    # What goes wrong.

    def inject(self, fault: Fault) -> None:
        with self._lock:
            self._faults.append(fault)

    def delay(self, operation: str, seconds: float, *, first: int = 1, times: int = 1) -> None:
        self.inject(Fault(operation, first, times, delay_s=seconds))

    def fail(
        self,
        operation: str,
        code: str = "InternalFailure",
        message: str = "injected",
        *,
        status: int = 500,
        first: int = 1,
        times: int = 1,
        is_performed: bool = False,
    ) -> None:
        """Answer with an error. With `is_performed` the service did what was wanted and only the answer is lost."""
        self.inject(
            Fault(operation, first, times, status=status, code=code, message=message, is_performed=is_performed)
        )

    def throttle(self, operation: str, *, first: int = 1, times: int = 1) -> None:
        self.fail(operation, "ThrottlingException", "Rate exceeded", status=400, first=first, times=times)

    def rewrite(self, operation: str, change: Rewrite, *, first: int = 1, times: int = 1) -> None:
        self.inject(Fault(operation, first, times, rewrite=change))

    # The proxy itself.

    def _answer(self, request: _Handler, body: bytes) -> None:
        service = _service_of(request.headers.get("authorization", ""))
        operation, fields = _read(request, body)
        faults = self._due(operation)
        for fault in faults:
            threading.Event().wait(fault.delay_s)  # tests replace time.sleep
        refusal = next((fault for fault in faults if fault.status), None)
        status, content = 0, b""
        headers: dict[str, str] = {}
        if refusal is None or refusal.is_performed:
            sent = {name: value for name, value in request.headers.items() if name.lower() != "connection"}
            status, headers, content = self._forward(request.command, request.path, sent, body)
        if refusal is not None:
            status, headers, content = refusal.status, *_error(service, request, refusal)
        for fault in faults:
            if fault.rewrite is not None and status < 400:
                content = fault.rewrite(content)
        with self._lock:
            self._calls.append(Call(service, operation, fields, status))
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", headers.get("x-head-length", str(len(content))))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)

    def _due(self, operation: str) -> list[Fault]:
        """The faults of this call."""
        found = []
        with self._lock:
            for fault in self._faults:
                if fnmatch.fnmatchcase(operation, fault.operation):
                    self._counts[fault] += 1
                    if fault.first <= self._counts[fault] < fault.first + fault.times:
                        found.append(fault)
        return found

    def _forward(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = HTTPConnection("127.0.0.1", self._moto_port, timeout=MOTO_TIMEOUT_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            found = {name.lower(): value for name, value in answer.getheaders()}
        finally:
            connection.close()
        length = found.pop("content-length", None)
        if method == "HEAD" and length is not None:
            found["x-head-length"] = length
        for name in ("transfer-encoding", "connection", "date", "server"):
            found.pop(name, None)
        return answer.status, found, content


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _handle(self) -> None:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            body = self._chunks()
            del self.headers["transfer-encoding"]
            self.headers["content-length"] = str(len(body))
        else:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.answer(body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _handle

    def _chunks(self) -> bytes:
        parts = []
        while (size := int(self.rfile.readline().split(b";")[0], 16)) > 0:
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass  # trailers: checksums, which moto does not check
        return b"".join(parts)

    def answer(self, body: bytes) -> None:
        raise NotImplementedError

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


def _service_of(authorization: str) -> str:
    """The service of a signature's scope: `Credential=KEY/DATE/REGION/SERVICE/aws4_request`."""
    parts = authorization.partition("Credential=")[2].partition(",")[0].split("/")
    return parts[3] if len(parts) > 3 else ""


def _read(request: _Handler, body: bytes) -> tuple[str, dict[str, Any]]:
    """The operation, and the fields of the body."""
    kind = request.headers.get("content-type", "")
    fields: dict[str, Any] = {}
    if "json" in kind and body:
        document = json.loads(body)
        fields = document if isinstance(document, dict) else {}
    elif "x-www-form-urlencoded" in kind:
        fields = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
    path = request.path.partition("?")[0]
    if target := request.headers.get("x-amz-target"):
        return target.rpartition(".")[2], fields
    if "Action" in fields:
        return fields["Action"], fields
    return f"{request.command} {urllib.parse.unquote(path)}", fields


def _error(service: str, request: _Handler, fault: Fault) -> tuple[dict[str, str], bytes]:
    """Headers and body of an error, as the service would write it."""
    form = "x-www-form-urlencoded" in request.headers.get("content-type", "")
    code, message = escape(fault.code), escape(fault.message)
    if service == "ec2":
        inner = f"<Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors>"
        return {"Content-Type": "text/xml"}, f"<Response>{inner}<RequestID>1</RequestID></Response>".encode()
    if service == "s3":
        return {"Content-Type": "application/xml"}, (
            f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        )
    if form:
        inner = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
        return {"Content-Type": "text/xml"}, f"<ErrorResponse>{inner}</ErrorResponse>".encode()
    content = json.dumps({"__type": fault.code, "message": fault.message}).encode()
    return {"Content-Type": "application/x-amz-json-1.1", "x-amzn-errortype": fault.code}, content


@contextmanager
def running_cloud() -> Iterator[Cloud]:
    """moto's server in a process of its own, and the proxy in front of it."""
    with dynamodb_server() as moto_url:
        cloud = Cloud(int(moto_url.rpartition(":")[2]))
        cloud.start()
        try:
            yield cloud
        finally:
            cloud.stop()
