"""Starts the EC2 instance that runs the jobs, if EC2 can start it now.

EC2 starts only an instance that has stopped. One that is stopping is started by the sweep that follows its stop. What
EC2 refuses for the moment (no capacity, throttling, its own errors) is repeated by botocore, and by the next sweep.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

_GONE = {"shutting-down", "terminated"}


@dataclass(frozen=True, slots=True)
class Wake:
    """How an attempt to start the instance ended.

    Attributes:
        state: EC2's, as last seen; "" where EC2 did not say.
        code: EC2's error code, or that of the state, if the instance is not starting; else "".
    """

    state: str
    code: str = ""

    @property
    def is_up(self) -> bool:
        return self.state in {"pending", "running"} and not self.code


def wake_instance(client: Any, instance_id: str) -> Wake:
    """Start the instance unless it runs.

    Args:
        client: boto3's, of EC2.
    """
    wake = _try(client, instance_id)
    if not wake.is_up:
        log("instance_failed", state=wake.state, code=wake.code)
    return wake


def _try(client: Any, instance_id: str) -> Wake:
    state = ""
    try:
        found = client.describe_instances(InstanceIds=[instance_id])
        state = str(found["Reservations"][0]["Instances"][0]["State"]["Name"])
        if state != "stopped":
            refusal = "InstanceTerminated" if state in _GONE else "IncorrectInstanceState"
            return Wake(state, "" if state in {"pending", "running"} else refusal)
        started = client.start_instances(InstanceIds=[instance_id])
        state = str(started["StartingInstances"][0]["CurrentState"]["Name"])
        log("instance_started", state=state)
        return Wake(state)
    except ClientError as error:
        return Wake(state, str(error.response["Error"]["Code"]))
    except BotoCoreError as error:
        return Wake(state, type(error).__name__)
    except LookupError:
        return Wake(state, "InvalidInstanceID.NotFound")


def log(event: str, **fields: object) -> None:
    """A line of JSON for CloudWatch. No prompt and no whole id may be among the fields."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
