"""The life of a SageMaker endpoint as one stack of CloudFormation: created, updated, waited for, invoked, and removed.

`sagemaker.yaml` says what belongs to it. CloudFormation decides in which order it is made, what an update replaces, and
what a failed one brings back.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.cloud.aws.calls import Account, AwsError, with_advice
from shared.errors import StartError

TEMPLATE = Path(__file__).with_name("sagemaker.yaml")
TAG = "tercet-deployment"
POLL_S = 10.0
WAIT_S = 1800.0  # until an endpoint serves, or is gone
# An endpoint may be InService some seconds before it answers.
INVOKE_ATTEMPTS = 3
PROMPT = "The old man looked at the sea and"
# Of a stack that never served, or of which a part is gone: CloudFormation updates none of these.
_FAILED = frozenset({"CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED", "UPDATE_FAILED", "DELETE_FAILED"})
_SERVES = frozenset({"CREATE_COMPLETE", "UPDATE_COMPLETE"})
_STARTED = frozenset({"CREATE_IN_PROGRESS", "UPDATE_IN_PROGRESS", "DELETE_IN_PROGRESS"})

Report = Callable[[str], None]


@dataclass
class Endpoint:
    """One endpoint and its stack, by the name of the deployment.

    Attributes:
        report: is called with each change worth a line.
        is_new: whether this object has created the stack.
    """

    account: Account
    name: str
    report: Report
    poll_s: float = POLL_S
    wait_s: float = WAIT_S
    is_new: bool = False

    @property
    def stack(self) -> str:
        return f"{self.name}-sagemaker"

    @property
    def log_group(self) -> str:
        return f"/aws/sagemaker/Endpoints/{self.name}"

    @property
    def destroy_command(self) -> str:
        return f"tercet deploy sagemaker --destroy --name {self.name} --region {self.account.region}"

    @contextmanager
    def undone_on_failure(self, keep: bool) -> Iterator[None]:
        """A stack that the body creates is removed again if it raises (also at Ctrl-C), unless `keep`."""
        try:
            yield
        except BaseException as error:
            if self.is_new and keep:
                self.report(f"Kept what was created; remove it with: {self.destroy_command}")
            elif self.is_new:
                self.report("Removing what was created; Ctrl-C leaves it …")
                try:
                    self._delete_stack()
                except StartError as left:
                    raise StartError(f"{error} {left}") from error
                except KeyboardInterrupt:
                    self.report(f"Not everything was removed, and what is left may cost money: {self.destroy_command}")
                    raise
            raise

    def check_ownership(self) -> None:
        """
        Raises:
            StartError: a stack or an endpoint of this name exists that this command did not make.
        """
        found = self._find_stack()
        if found is None:
            what = f"An endpoint {self.name}"
            is_own = self.account.find("sagemaker", "describe_endpoint", EndpointName=self.name) is None
        else:
            what = f"A stack {self.stack}"
            is_own = {"Key": TAG, "Value": self.name} in found["Tags"]
        if not is_own:
            raise StartError(f"{what} exists and was not made by this command: choose another --name.")

    def ensure(self, **parameters: str) -> dict[str, str]:
        """Create or update the stack and wait until that is done.

        Args:
            parameters: of the template. Others keep the value they have in the stack, or the template's.

        Returns:
            The stack's outputs.

        Raises:
            StartError: AWS refuses something, a resource fails, or it takes too long.
        """
        found = self._settled()
        if found is not None and found["StackStatus"] in _FAILED:
            self.report(f"Stack {self.stack} had failed: replacing it.")
            self._delete_stack()
            found = None
        before = {} if found is None else found.get("Parameters", [])
        values = {each["ParameterKey"]: each["ParameterValue"] for each in before} | parameters
        request = {
            "StackName": self.stack,
            "TemplateBody": TEMPLATE.read_text(encoding="utf-8"),
            "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in values.items()],
            "Capabilities": ["CAPABILITY_NAMED_IAM"],
            "Tags": [{"Key": TAG, "Value": self.name}],
            "ClientRequestToken": uuid.uuid4().hex,  # a call that is sent again, since its answer was lost, is one
        }
        if found is None:
            self.is_new = True  # before the call, whose answer may be lost
            self.report(f"Creating stack {self.stack} …")
            self.account.call("cloudformation", "create_stack", **request, DisableRollback=True)
        else:
            self._update(request)
        return self._outputs()

    def _update(self, request: dict[str, Any]) -> None:
        """A stack that serves is brought back if the update fails; one that is new is removed or kept as it is."""
        try:
            self.account.call("cloudformation", "update_stack", **request, DisableRollback=self.is_new)
            self.report(f"Updating stack {self.stack}; the endpoint serves meanwhile …")
        except AwsError as error:
            if "No updates are to be performed" not in error.detail:
                raise

    def _outputs(self) -> dict[str, str]:
        """
        Raises:
            StartError: the stack is not what was wanted.
        """
        found = self._settled()
        if found is None:
            raise StartError(f"Stack {self.stack} was deleted while it was created.")
        if found["StackStatus"] not in _SERVES:
            raise StartError(
                f"Endpoint {self.name} does not serve: {self._reason()} Its log group is {self.log_group}."
            )
        return {each["OutputKey"]: each["OutputValue"] for each in found.get("Outputs", [])}

    def _reason(self) -> str:
        """The first failure of the last change. CloudFormation lists the newest event first."""
        events = self.account.call("cloudformation", "describe_stack_events", StackName=self.stack)["StackEvents"]
        reasons = []
        for event in events:
            if event["ResourceStatus"].endswith("_FAILED"):
                reasons.append(event.get("ResourceStatusReason", event["ResourceStatus"]))
            if event["LogicalResourceId"] == self.stack and event["ResourceStatus"] in _STARTED:
                break
        return with_advice(reasons[-1] if reasons else "its stack was changed meanwhile")

    def _find_stack(self) -> dict[str, Any] | None:
        found = self.account.find("cloudformation", "describe_stacks", StackName=self.stack)
        return None if found is None else dict(found["Stacks"][0])

    def _settled(self) -> dict[str, Any] | None:
        """The stack once nothing is in progress; None: there is none.

        Raises:
            StartError: that takes longer than `wait_s`.
        """
        status, waited_s = "", 0.0
        while (found := self._find_stack()) is not None:
            if found["StackStatus"] != status:
                status = found["StackStatus"]
                self.report(f"Stack {self.stack}: {status} after {waited_s:.0f} s.")
            if not status.endswith("_IN_PROGRESS"):
                return found
            if waited_s >= self.wait_s:
                raise StartError(
                    f"Stack {self.stack} is {status} after {waited_s:.0f} s; see the log group {self.log_group}, or "
                    "wait longer with --wait-s."
                )
            time.sleep(self.poll_s)
            waited_s += self.poll_s
        return None

    def invoke(self) -> list[str]:
        """Three completions of a prompt.

        Raises:
            StartError: the endpoint answers with something else.
        """
        body = json.dumps({"input": PROMPT}).encode()
        for attempt in range(1, INVOKE_ATTEMPTS + 1):
            try:
                answer = self.account.call(
                    "sagemaker-runtime",
                    "invoke_endpoint",
                    EndpointName=self.name,
                    ContentType="application/json",
                    Body=body,
                )
                return [str(text) for text in json.loads(answer["Body"].read())["output"]]
            except AwsError as error:
                if attempt == INVOKE_ATTEMPTS:
                    raise StartError(f"{error} Its log group is {self.log_group}.") from error
                time.sleep(self.poll_s)
            except (ValueError, KeyError, TypeError) as error:
                raise StartError(
                    f"Endpoint {self.name} answers, but not as Tercet does: build the image from "
                    "deploy/packaging/Dockerfile."
                ) from error
        raise AssertionError("unreachable")

    def destroy(self) -> None:
        """Remove the stack and the logs. What is gone already is no error.

        Raises:
            StartError: something could not be removed; the rest is.
        """
        self._delete_stack()
        self.account.find("logs", "delete_log_group", logGroupName=self.log_group)

    def _delete_stack(self) -> None:
        """Also while it is being created: then it waits. Returns when it is gone."""
        if self._settled() is None:
            return
        left = "Not everything could be removed, and what is left may cost money"
        try:
            self.account.call("cloudformation", "delete_stack", StackName=self.stack)
        except AwsError as error:
            raise StartError(f"{left}: {error} Run again: {self.destroy_command}") from error
        if self._settled() is not None:
            raise StartError(f"{left}: {self._reason()} Run again: {self.destroy_command}")
        self.report(f"Removed stack {self.stack}.")
