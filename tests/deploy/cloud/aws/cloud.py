"""AWS for tests: moto's server, and boto3 in this process with faults between the two.

moto keeps no time: an instance runs and an endpoint serves as soon as they are made. What AWS takes minutes for, and
what fails there, is injected here, where botocore sends a request and has parsed the answer; its retries are real.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import boto3
import httpx
import pytest
from botocore.awsrequest import AWSResponse
from botocore.config import Config
from botocore.endpoint import Endpoint
from urllib3 import HTTPResponse

from tests.gateway.jobs.servers import AWS_ENVIRON, dynamodb_server

REGION = "eu-central-1"
INVOKE = "InvokeEndpoint"
OUTPUT = ["one", "two", "three"]  # what an endpoint answers: moto's has no container
Rewrite = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the calls number `first` to `first + times - 1` (from 1) of an operation.

    Attributes:
        operation: as `Call.operation` has it.
        status: answer with this status and the error `code` instead of the service's answer; 0: let it answer.
        is_performed: whether, with a `status`, the service performs the call and only its answer is lost.
        rewrite: changes an answer that is no error.
    """

    operation: str
    first: int = 1
    times: int = 1
    status: int = 0
    code: str = ""
    message: str = ""
    is_performed: bool = False
    rewrite: Rewrite | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call as it was sent.

    Attributes:
        service: as the signature names it, like "sagemaker".
        operation: like "CreateStack".
    """

    service: str
    operation: str


class Cloud:
    """Faults hold for one test: `reset` removes them, the recorded calls, and everything in moto."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._counts: Counter[Fault] = Counter()
        self._faults: list[Fault] = []
        self._calls: list[Call] = []
        self._clients: dict[str, Any] = {}

    # What tests give to the code under test.

    @property
    def environ(self) -> dict[str, str]:
        """Variables by which boto3 uses this cloud, without faults in another process."""
        return {**AWS_ENVIRON, "AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": REGION}

    def client(self, service: str) -> Any:
        """boto3's client of a service, without retries."""
        if service not in self._clients:
            self._clients[service] = boto3.client(
                service,
                region_name=REGION,
                endpoint_url=self.url,
                aws_access_key_id="tests",
                aws_secret_access_key="tests",
                config=Config(retries={"total_max_attempts": 1}, proxies={}),
            )
        return self._clients[service]

    # What happened.

    @property
    def calls(self) -> list[Call]:
        """The calls of this process in the order of their answers."""
        with self._lock:
            return list(self._calls)

    def operations(self, *services: str) -> list[str]:
        """The operations in order, of all services or of these."""
        return [call.operation for call in self.calls if not services or call.service in services]

    def count(self, operation: str) -> int:
        return self.operations().count(operation)

    def forget(self) -> None:
        """Remove the recorded calls and the faults; what is in moto stays."""
        with self._lock:
            self._calls, self._faults, self._counts = [], [], Counter()

    def reset(self) -> None:
        """An empty account."""
        self.forget()
        httpx.post(f"{self.url}/moto-api/reset", trust_env=False).raise_for_status()

    # What goes wrong.

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
        self._faults.append(
            Fault(operation, first, times, status=status, code=code, message=message, is_performed=is_performed)
        )

    def rewrite(self, operation: str, change: Rewrite, *, times: int = 1) -> None:
        self._faults.append(Fault(operation, times=times, rewrite=change))

    def answer(self, operation: Any, request: Any, send: Callable[[], Any]) -> Any:
        """What botocore gets for a request: `((HTTP response, parsed answer), None)`, or `(None, error)`.

        Args:
            operation: botocore's model of it.
        """
        faults = self._due(operation.name)
        refusal = next((fault for fault in faults if fault.status), None)
        result: Any = send() if refusal is None or refusal.is_performed else None
        if refusal is not None:
            parsed = {
                "Error": {"Code": refusal.code, "Message": refusal.message},
                "ResponseMetadata": {"HTTPStatusCode": refusal.status, "HTTPHeaders": {}},
            }
            nothing = HTTPResponse(BytesIO(), preload_content=False)
            result = (AWSResponse(request.url, refusal.status, {}, nothing), parsed), None
        elif result[1] is None:
            response, parsed = result[0]
            if operation.name == INVOKE and request.url.startswith(self.url):
                parsed["Body"] = BytesIO(json.dumps({"output": OUTPUT}).encode())
            for fault in faults:
                if fault.rewrite is not None and response.status_code < 400:
                    parsed = fault.rewrite(parsed)
            result = (response, parsed), None
        with self._lock:
            self._calls.append(Call(operation.service_model.signing_name, operation.name))
        return result

    def _due(self, operation: str) -> list[Fault]:
        """The faults of this call."""
        found = []
        with self._lock:
            for fault in self._faults:
                if fault.operation == operation:
                    self._counts[fault] += 1
                    if fault.first <= self._counts[fault] < fault.first + fault.times:
                        found.append(fault)
        return found


@contextmanager
def running_cloud() -> Iterator[Cloud]:
    """moto's server in a process of its own, and this process's calls passed through the cloud."""
    send = Endpoint._do_get_response
    with dynamodb_server() as url, pytest.MonkeyPatch.context() as patch:
        cloud = Cloud(url)
        patch.setattr(
            Endpoint,
            "_do_get_response",
            lambda endpoint, request, operation, context: cloud.answer(
                operation, request, lambda: send(endpoint, request, operation, context)
            ),
        )
        yield cloud
