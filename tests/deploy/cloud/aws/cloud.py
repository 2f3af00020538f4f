"""AWS for tests: moto's server, and boto3 in this process with faults between the two.

moto keeps no time: an instance runs and an endpoint serves as soon as they are made. What AWS takes minutes for, and
what fails there, is injected here, where botocore sends a request and has parsed the answer; its retries are real.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any, NamedTuple

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
Parsed = dict[str, Any]
Rewrite = Callable[[Parsed], Parsed]
# What botocore gets for a request: `((HTTP response, parsed answer), None)`, or `(None, error)`.
Result = Any
Send = Callable[[], Result]


@dataclass(slots=True)
class Fault:
    """What happens to the calls number `first` to `first + times - 1` (from 1) of an operation.

    Attributes:
        operation: like "CreateStack".
        act: what is done in place of sending the call, which it may do.
        num_calls: of the operation, since the fault was set.
    """

    operation: str
    first: int
    times: int
    act: Callable[[Send], Result]
    num_calls: int = 0

    def is_due(self, operation: str) -> bool:
        """Counts the call."""
        self.num_calls += operation == self.operation
        return operation == self.operation and self.first <= self.num_calls < self.first + self.times


class Call(NamedTuple):
    """A call as it was sent. The service is what the signature names, like "sagemaker"."""

    service: str
    operation: str


class Cloud:
    """Faults hold for one test: `reset` removes them, the recorded calls, and everything in moto."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.calls: list[Call] = []  # of this process, in the order of their answers
        self._faults: list[Fault] = []
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

    def operations(self, *services: str) -> list[str]:
        """The operations in order, of all services or of these."""
        return [call.operation for call in self.calls if not services or call.service in services]

    def count(self, operation: str) -> int:
        return self.operations().count(operation)

    def forget(self) -> None:
        """Remove the recorded calls and the faults; what is in moto stays."""
        self.calls, self._faults = [], []

    def reset(self) -> None:
        """An empty account, whose endpoints answer with `OUTPUT`."""
        self.forget()
        answer = {"Body": json.dumps({"output": OUTPUT})}
        for path, body in (
            ("reset", {}),
            ("static/sagemaker/endpoint-results", {"region": REGION, "results": [answer]}),
        ):
            httpx.post(f"{self.url}/moto-api/{path}", json=body, trust_env=False).raise_for_status()

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

        def refuse(send: Send) -> Result:
            if is_performed:
                send()
            metadata = {"HTTPStatusCode": status, "HTTPHeaders": {}}
            parsed = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}
            return (AWSResponse(self.url, status, {}, HTTPResponse(BytesIO(), preload_content=False)), parsed), None

        self._faults.append(Fault(operation, first, times, refuse))

    def rewrite(self, operation: str, change: Rewrite, *, times: int = 1) -> None:
        """Change what the service answers, unless that is an error."""

        def answer(send: Send) -> Result:
            found, error = send()
            is_answer = error is None and found[0].status_code < 400
            return ((found[0], change(found[1])), None) if is_answer else (found, error)

        self._faults.append(Fault(operation, 1, times, answer))

    def answer(self, operation: Any, send: Send) -> Result:
        """
        Args:
            operation: botocore's model of it.
        """
        for fault in [fault for fault in self._faults if fault.is_due(operation.name)]:
            send = functools.partial(fault.act, send)
        result = send()
        self.calls.append(Call(operation.service_model.signing_name, operation.name))
        return result


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
                operation, lambda: send(endpoint, request, operation, context)
            ),
        )
        yield cloud
