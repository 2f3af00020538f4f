"""Starts the EC2 instance that runs the jobs, whatever state it is in.

EC2 starts only an instance that has stopped: one that is stopping must be waited for. Calls that EC2 refuses for the
moment (no capacity, throttling, its own errors) are repeated within the caller's time.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

FIRST_DELAY_S = 0.25
MAX_DELAY_S = 4.0
# Errors that no repetition changes: the instance does not exist, or the function may not start it.
_FINAL_CODES = {"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed", "UnauthorizedOperation", "OptInRequired"}
_GONE = {"shutting-down", "terminated"}


@dataclass(frozen=True, slots=True)
class Wake:
    """How an attempt to start the instance ended.

    Attributes:
        state: EC2's, as last seen; "" where EC2 did not say.
        code: EC2's error code, or that of the state, if the instance is not starting; else "".
        is_final: repeating the attempt cannot help.
    """

    state: str
    code: str = ""
    is_final: bool = False

    @property
    def is_up(self) -> bool:
        return self.state in {"pending", "running"} and not self.code


class Instance:
    def __init__(self, client: Any, instance_id: str) -> None:
        """
        Args:
            client: boto3's, of EC2.
        """
        self._client = client
        self._id = instance_id

    def wake(self, until: float) -> Wake:
        """Start the instance unless it runs.

        Args:
            until: `time.monotonic()` time after which no further attempt begins.
        """
        delay_s = FIRST_DELAY_S
        while True:
            wake = self._try()
            if wake.is_up or wake.is_final:
                break
            pause_s = delay_s * random.uniform(0.5, 1.0)
            if time.monotonic() + pause_s > until:
                break
            time.sleep(pause_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)
        if not wake.is_up:
            log("instance_failed", state=wake.state, code=wake.code)
        return wake

    def _try(self) -> Wake:
        state = ""
        try:
            found = self._client.describe_instances(InstanceIds=[self._id])
            state = str(found["Reservations"][0]["Instances"][0]["State"]["Name"])
            if state in _GONE:
                return Wake(state, "InstanceTerminated", is_final=True)
            if state != "stopped":
                return Wake(state, "" if state in {"pending", "running"} else "IncorrectInstanceState")
            started = self._client.start_instances(InstanceIds=[self._id])
            state = str(started["StartingInstances"][0]["CurrentState"]["Name"])
            log("instance_started", state=state)
            return Wake(state)
        except ClientError as error:
            code = str(error.response["Error"]["Code"])
            return Wake(state, code, is_final=code in _FINAL_CODES)
        except BotoCoreError as error:
            return Wake(state, type(error).__name__)
        except LookupError:
            return Wake(state, "InvalidInstanceID.NotFound", is_final=True)


def log(event: str, **fields: object) -> None:
    """A line of JSON for CloudWatch. No prompt and no whole id may be among the fields."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
