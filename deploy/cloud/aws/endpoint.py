"""The life of a SageMaker endpoint: created or updated, waited for, invoked, and removed with all that belongs to it.

`deploy.cloud.aws.requests` says what is wanted. Everything made here has a tag; only what has it is changed or removed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from deploy.cloud.aws.calls import Account, AwsError
from deploy.cloud.aws.requests import (
    TAG,
    Request,
    Wanted,
    log_group,
    repository,
    role_name,
    scaling_target,
)
from shared.errors import StartError

POLL_S = 10.0
WAIT_S = 1800.0  # until an endpoint serves, or is gone
# A new role is not known everywhere at once: SageMaker refuses it for some seconds.
ROLE_WAIT_S = 90.0
# An endpoint may be InService some seconds before it answers.
INVOKE_ATTEMPTS = 3
PROMPT = "The old man looked at the sea and"
_BUSY = frozenset({"Creating", "Updating", "SystemUpdating", "RollingBack", "Deleting"})

Report = Callable[[str], None]
Step = Callable[[], None]


@dataclass
class Endpoint:
    """One endpoint and its resources, by the name of the deployment.

    Attributes:
        report: is called with each change worth a line.
        sleep: waits seconds; tests replace it.
    """

    account: Account
    name: str
    report: Report
    poll_s: float = POLL_S
    wait_s: float = WAIT_S
    sleep: Callable[[float], None] = field(default_factory=lambda: time.sleep)
    _undo: list[Step] = field(default_factory=list)

    # Creating.

    @contextmanager
    def undone_on_failure(self, keep: bool) -> Iterator[None]:
        """What the body creates is removed again if it raises (also at Ctrl-C), unless `keep`."""
        self._undo = []
        try:
            yield
        except BaseException as error:
            if self._undo and keep:
                self.report(f"Kept what was created; remove it with: {self.destroy_command}")
            elif self._undo:
                self._undo_after(error)
            raise

    def _undo_after(self, error: BaseException) -> None:
        """
        Raises:
            StartError: something could not be removed.
        """
        self.report("Removing what was created; Ctrl-C leaves it …")
        try:
            self._remove(self._undo[::-1])
        except StartError as left:
            raise StartError(f"{error} {left}") from error
        except KeyboardInterrupt:
            self.report(f"Not everything was removed, and what is left may cost money: {self.destroy_command}")
            raise

    @property
    def destroy_command(self) -> str:
        return f"tercet deploy sagemaker --destroy --name {self.name} --region {self.account.region}"

    def check_name_is_free(self) -> None:
        """
        Raises:
            StartError: an endpoint of this name exists that this command did not make.
        """
        found = self.account.find("sagemaker", "describe_endpoint", EndpointName=self.name)
        if found is not None:
            self._require_own(self._is_own_arn(found["EndpointArn"]), f"An endpoint {self.name}")

    def ensure_repository(self) -> str:
        """Create the image repository unless it exists.

        Returns:
            Its URI.

        Raises:
            StartError: it exists and belongs to something else.
        """
        service, operation, parameters = repository(self.name)
        try:
            answer = self.account.call(service, operation, **parameters)
        except AwsError as error:
            if not error.is_name_taken:
                raise
            [found] = self.account.call("ecr", "describe_repositories", repositoryNames=[self.name])["repositories"]
            tags = self.account.call("ecr", "list_tags_for_resource", resourceArn=found["repositoryArn"])["tags"]
            self._require_own(self._is_own(tags), f"An image repository {self.name}")
            return str(found["repositoryUri"])
        self._created(f"image repository {self.name}", self._delete_repository)
        return str(answer["repository"]["repositoryUri"])

    def ensure(self, wanted: Wanted) -> None:
        """Create or update the endpoint and wait until it serves what is wanted.

        Raises:
            StartError: AWS refuses something, the endpoint fails, or it is not ready in time.
        """
        if wanted.role_arn is None:
            self._ensure_role(wanted)
        self._ensure_named(wanted.model(), "ModelName")
        self._ensure_named(wanted.endpoint_config(), "EndpointConfigName")
        self._ensure_endpoint(wanted)
        for service, operation, parameters in wanted.scaling():
            self.account.call(service, operation, **parameters)
        if wanted.is_scaled:
            self.report(f"Scales from {wanted.num_instances} to {wanted.max_instances} instances.")
        else:
            self._delete_scaling()

    def _ensure_role(self, wanted: Wanted) -> None:
        service, operation, parameters = wanted.role()
        try:
            self.account.call(service, operation, **parameters)
            self._created(f"role {role_name(wanted.name)}", self._delete_role)
        except AwsError as error:
            if not error.is_name_taken:
                raise
            self._require_own(self._owns_role(), f"A role {role_name(wanted.name)}")
        service, operation, parameters = wanted.role_policy()
        self.account.call(service, operation, **parameters)

    def _ensure_named(self, request: Request, key: str) -> None:
        """A model or configuration; a digest in its name makes an existing one the wanted one."""
        service, operation, parameters = request
        kind, name = operation.removeprefix("create_"), {key: parameters[key]}
        if self.account.find(service, f"describe_{kind}", **name) is not None:
            return
        self._with_new_role(request)
        what = f"{kind.replace('_', ' ')} {parameters[key]}"
        self._created(what, lambda: self._delete(service, f"delete_{kind}", **name))

    def _ensure_endpoint(self, wanted: Wanted) -> None:
        _, _, parameters = wanted.endpoint()
        config = parameters["EndpointConfigName"]
        found = self._settled()
        if found is not None and found["EndpointStatus"] == "Failed":
            self.report(f"Endpoint {self.name} had failed: replacing it.")
            self._delete_endpoint()
            found = None
        if found is None:
            self._undo += [self._delete_endpoint, self._delete_scaling]  # before the call, whose answer may be lost
            self._with_new_role(wanted.endpoint())
            self.report(f"Creating endpoint {self.name} on {wanted.num_instances} × {wanted.instance_type} …")
        elif found["EndpointConfigName"] != config:
            self.account.call("sagemaker", "update_endpoint", EndpointName=self.name, EndpointConfigName=config)
            self._undo.clear()  # what it needs must stay, whatever happens; a later deployment removes it
            self.report(f"Updating endpoint {self.name}; it serves meanwhile …")
        found = self._settled()
        if found is None:
            raise StartError(f"Endpoint {self.name} was deleted while it was created.")
        status = found["EndpointStatus"]
        if status != "InService" or found["EndpointConfigName"] != config:
            reason = found.get("FailureReason", f"its status is {status}")
            raise StartError(
                f"Endpoint {self.name} does not serve: {reason.rstrip('.')}. Its log group is {log_group(self.name)}."
            )

    def _with_new_role(self, request: Request) -> None:
        """A call that creates something, and may name a role which was made a moment ago. A name that is taken is that
        of a call which was sent again because its answer was lost."""
        service, operation, parameters = request
        waited_s = 0.0
        while True:
            try:
                self.account.call(service, operation, **parameters)
            except AwsError as error:
                is_role_unknown = "role" in error.detail.lower() and "assume" in error.detail.lower()
                if not is_role_unknown or waited_s >= ROLE_WAIT_S:
                    if error.is_name_taken:
                        return
                    raise
            else:
                return
            self.sleep(self.poll_s)
            waited_s += self.poll_s

    def _settled(self) -> dict[str, Any] | None:
        """The endpoint once nothing is in progress; None: there is none.

        Raises:
            StartError: that takes longer than `wait_s`.
        """
        status, waited_s = "", 0.0
        while (found := self.account.find("sagemaker", "describe_endpoint", EndpointName=self.name)) is not None:
            if found["EndpointStatus"] != status:
                status = found["EndpointStatus"]
                self.report(f"Endpoint {self.name}: {status} after {waited_s:.0f} s.")
            if status not in _BUSY:
                return found
            if waited_s >= self.wait_s:
                raise StartError(
                    f"Endpoint {self.name} is {status} after {waited_s:.0f} s; see its log group "
                    f"{log_group(self.name)}, or wait longer with --wait-s."
                )
            self.sleep(self.poll_s)
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
                    raise StartError(f"{error} Its log group is {log_group(self.name)}.") from error
                self.sleep(self.poll_s)
            except (ValueError, KeyError, TypeError) as error:
                raise StartError(
                    f"Endpoint {self.name} answers, but not as Tercet does: build the image from "
                    "deploy/packaging/Dockerfile."
                ) from error
        raise AssertionError("unreachable")

    def remove_outdated(self, wanted: Wanted) -> None:
        """Remove models and configurations of earlier deployments of this name.

        Raises:
            StartError: AWS refuses.
        """
        config = wanted.endpoint_config()[2]["EndpointConfigName"]
        model = wanted.model()[2]["ModelName"]
        self._remove(self._named_resources(kept=frozenset({config, model})))

    # Removing.

    def destroy(self) -> None:
        """Remove everything that has this deployment's tag. What is gone already is no error.

        Raises:
            StartError: something could not be removed; the rest is.
        """
        found = self.account.find("sagemaker", "describe_endpoint", EndpointName=self.name)
        steps: list[Step] = []
        if found is not None:
            self._require_own(self._is_own_arn(found["EndpointArn"]), f"An endpoint {self.name}")
            steps = [self._delete_scaling, self._delete_endpoint]
        steps += self._named_resources()
        steps += [self._delete_role, self._delete_repository]
        steps.append(partial(self._delete, "logs", "delete_log_group", logGroupName=log_group(self.name)))
        self._remove(steps)

    def _remove(self, steps: list[Step]) -> None:
        """
        Raises:
            StartError: of the first step that failed, after all others were tried.
        """
        failures: list[StartError] = []
        for step in steps:
            try:
                step()
            except StartError as error:
                failures.append(error)
        if failures:
            raise StartError(
                f"Not everything could be removed, and what is left may cost money: {failures[0]} Run again: "
                f"{self.destroy_command}"
            )

    def _named_resources(self, kept: frozenset[str] = frozenset()) -> list[Step]:
        """Steps that delete this deployment's configurations and models, except `kept`."""
        steps: list[Step] = []
        for kind, key, listed in (
            ("endpoint_config", "EndpointConfigName", "EndpointConfigs"),
            ("model", "ModelName", "Models"),
        ):
            found = self.account.all("sagemaker", f"list_{kind}s", listed, NameContains=f"{self.name}-")
            steps += [
                partial(self._delete, "sagemaker", f"delete_{kind}", **{key: item[key]})
                for item in found
                if item[key] not in kept and self._is_own_arn(item[key.replace("Name", "Arn")])
            ]
        return steps

    def _delete(self, service: str, operation: str, **parameters: Any) -> None:
        if self.account.find(service, operation, **parameters) is not None:
            self.report(
                f"Removed {operation.removeprefix('delete_').replace('_', ' ')} {next(iter(parameters.values()))}."
            )

    def _delete_endpoint(self) -> None:
        """Also while it is being created, when AWS refuses that: then it waits. Returns when it is gone."""
        self._settled()
        self._delete("sagemaker", "delete_endpoint", EndpointName=self.name)
        self._settled()

    def _delete_scaling(self) -> None:
        target = scaling_target(self.name)
        ids = {"ServiceNamespace": target["ServiceNamespace"], "ResourceIds": [target["ResourceId"]]}
        if self.account.call("application-autoscaling", "describe_scalable_targets", **ids)["ScalableTargets"]:
            self._delete("application-autoscaling", "deregister_scalable_target", **target)

    def _delete_role(self) -> None:
        if not self._owns_role():
            return
        name = role_name(self.name)
        for policy in self.account.call("iam", "list_role_policies", RoleName=name)["PolicyNames"]:
            self.account.find("iam", "delete_role_policy", RoleName=name, PolicyName=policy)
        self._delete("iam", "delete_role", RoleName=name)

    def _owns_role(self) -> bool:
        found = self.account.find("iam", "list_role_tags", RoleName=role_name(self.name))
        return found is not None and self._is_own(found["Tags"])

    def _delete_repository(self) -> None:
        found = self.account.find("ecr", "describe_repositories", repositoryNames=[self.name])
        if found is None:
            return
        arn = found["repositories"][0]["repositoryArn"]
        if self._is_own(self.account.call("ecr", "list_tags_for_resource", resourceArn=arn)["tags"]):
            self._delete("ecr", "delete_repository", repositoryName=self.name, force=True)

    # Ownership.

    def _created(self, what: str, undo: Step) -> None:
        self._undo.append(undo)
        self.report(f"Created {what}.")

    def _is_own_arn(self, arn: str) -> bool:
        return self._is_own(self.account.all("sagemaker", "list_tags", "Tags", ResourceArn=arn))

    def _is_own(self, tags: list[dict[str, str]]) -> bool:
        return {"Key": TAG, "Value": self.name} in tags

    def _require_own(self, is_own: bool, what: str) -> None:
        if not is_own:
            raise StartError(
                f"{what} exists and was not made by this command (it has no tag {TAG}={self.name}): choose another "
                "--name."
            )
