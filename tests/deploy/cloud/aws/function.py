"""The wake function as Lambda runs it: its own handler in this process, over the stack of its template in moto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from deploy.cloud.aws.wake.handler import handle, make_service
from gateway.jobs.dynamodb import DynamoDbStore
from gateway.jobs.queue import JobQueue
from tests.deploy.cloud.aws.cloud import REGION, Cloud, Rewrite
from tests.deploy.cloud.aws.stacks import wake_stack

PROMPT = {"prompt": "The old man looked at the sea and", "num_samples": 2, "length": 8}
USER = "AROAEXAMPLE"
STOPPED = {"source": "aws.ec2", "detail-type": "EC2 Instance State-change Notification", "detail": {"state": "stopped"}}
SCHEDULED = {"source": "aws.events", "detail-type": "Scheduled Event", "detail": {}}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: Any


def in_state(name: str) -> Rewrite:
    """What DescribeInstances says of an instance, with another state: moto's changes states at once."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        found["Reservations"][0]["Instances"][0]["State"]["Name"] = name
        return found

    return change


class Function:
    """The deployed function: what API Gateway and EventBridge do with it."""

    def __init__(self, cloud: Cloud, environ: dict[str, str]) -> None:
        self.cloud = cloud
        self.environ = environ
        self.ec2 = cloud.client("ec2")

    def post(self, body: Any, *, user: str = f"{USER}:session", **headers: str) -> Answer:
        raw = body if isinstance(body, str) else json.dumps(body)
        return self._request("POST /jobs", user, body=raw, headers=headers)

    def get(self, job_id: str, *, user: str = f"{USER}:another-session") -> Answer:
        return self._request("GET /jobs/{id}", user, pathParameters={"id": job_id}, headers={})

    def sweep(self, event: dict[str, Any] = SCHEDULED) -> dict[str, Any]:
        return handle(event, self._context)

    @property
    def _context(self) -> Any:
        """What Lambda passes with an event."""
        return SimpleNamespace(get_remaining_time_in_millis=lambda: 29_000)

    def _request(self, route: str, user: str, **fields: Any) -> Answer:
        method, _, path = route.partition(" ")
        context = {"http": {"method": method, "path": path}, "authorizer": {"iam": {"userId": user}}}
        event = {"version": "2.0", "routeKey": route, "requestContext": context, "isBase64Encoded": False, **fields}
        answer = handle(event, self._context)
        return Answer(answer["statusCode"], answer["headers"], json.loads(answer["body"]))

    # The instance.

    @property
    def state(self) -> str:
        found = self.ec2.describe_instances(InstanceIds=[self.environ["INSTANCE_ID"]])
        return str(found["Reservations"][0]["Instances"][0]["State"]["Name"])

    def stop_instance(self) -> None:
        self.ec2.stop_instances(InstanceIds=[self.environ["INSTANCE_ID"]])

    # The gateway's side of the table.

    @property
    def job_store(self) -> str:
        return f"dynamodb://{self.environ['TABLE']}?region={REGION}&endpoint={self.cloud.url}"

    def open_queue(self) -> JobQueue:
        store = DynamoDbStore(self.environ["TABLE"], region=REGION, endpoint=self.cloud.url)
        return JobQueue(store, ttl_s=float(self.environ["JOB_TTL_S"]), max_open=100)

    def items(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.cloud.client("dynamodb").scan(TableName=self.environ["TABLE"])["Items"]
        return found

    def erase(self) -> None:
        client = self.cloud.client("dynamodb")
        for item in self.items():
            client.delete_item(TableName=self.environ["TABLE"], Key={"pk": item["pk"]})


@contextmanager
def deployed_function(cloud: Cloud, directory: Path, **variables: str) -> Iterator[Function]:
    """The function of a new stack in an empty account; this process has its environment.

    Args:
        variables: replacements for the template's variables.
    """
    cloud.reset()
    with wake_stack(cloud, directory) as environ, pytest.MonkeyPatch.context() as patch:
        for name, value in {**environ, **variables}.items():
            patch.setenv(name, value)
        make_service.cache_clear()
        yield Function(cloud, environ)
    make_service.cache_clear()
