"""What `tercet deploy sagemaker` wants to exist, as the requests that create it. Pure: calls nothing.

Names of models and endpoint configurations contain a digest of their content: what is wanted either exists under its
name or is created, so the command may be repeated after any interruption, and an update never changes what serves.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from shared.errors import StartError

TAG = "tercet-deployment"
VARIANT = "AllTraffic"
# SageMaker kills a container that does not answer /ping with 200 in this time after its start.
STARTUP_S = 600
_NAME = re.compile(r"[a-z0-9](-?[a-z0-9]){1,39}")
_DIGEST_CHARS = 10
# Families of instances with NVIDIA GPUs.
_GPU_FAMILY = re.compile(r"ml\.[gp]\d")

Request = tuple[str, str, dict[str, Any]]  # service, boto3's name of the operation, parameters


@dataclass(frozen=True, slots=True)
class Wanted:
    """One endpoint.

    Attributes:
        account_id: AWS account id, 12 digits.
        image: URI in a registry that SageMaker may read.
        model_data: s3://…/model.tar.gz; None: `model_id`.
        model_id: a repository of the hub, which the container downloads; None: the embedded checkpoint.
        role_arn: given execution role; None: one is created.
        num_instances: least number of instances.
        max_instances: more than `num_instances`: Application Auto Scaling adds instances up to it.
        invocations_per_minute: rate per instance that autoscaling aims at.
        ami: version of the host image of a GPU instance (`InferenceAmiVersion`); None: SageMaker's default.
    """

    name: str
    region: str
    account_id: str
    image: str
    instance_type: str
    num_instances: int = 1
    model_data: str | None = None
    model_id: str | None = None
    role_arn: str | None = None
    max_instances: int = 0
    invocations_per_minute: int = 600
    ami: str | None = None

    @property
    def execution_role_arn(self) -> str:
        return self.role_arn or f"arn:aws:iam::{self.account_id}:role/{role_name(self.name)}"

    @property
    def is_scaled(self) -> bool:
        return self.max_instances > self.num_instances

    def environment(self) -> dict[str, str]:
        """Return the container's environment. Weights of `model_data` are in /opt/ml/model and need no variable."""
        if self.model_data is not None:
            return {}
        if self.model_id is not None:
            return {"HF_MODEL_ID": self.model_id, "HF_TASK": "text-generation"}
        return {"TERCET_MODELS": "embedded"}

    def role(self) -> Request:
        trust = _policy({"Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"})
        role = {
            "RoleName": role_name(self.name),
            "AssumeRolePolicyDocument": trust,
            "Tags": tags(self.name),
            "Description": f"Execution role of the SageMaker endpoint {self.name}",
        }
        return "iam", "create_role", role

    def role_policy(self) -> Request:
        """What the endpoint's instances may do: read the image and the weights, write logs and metrics."""
        logs = f"arn:aws:logs:{self.region}:{self.account_id}:log-group:{log_group(self.name)}"
        statements: list[dict[str, Any]] = [
            {"Action": "ecr:GetAuthorizationToken", "Resource": "*"},
            {
                "Action": ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"],
                "Resource": repository_arn(self.image) or "*",
            },
            {
                "Action": [
                    "logs:CreateLogGroup",
                    "logs:CreateLogStream",
                    "logs:DescribeLogStreams",
                    "logs:PutLogEvents",
                ],
                "Resource": [logs, f"{logs}:*"],
            },
            {
                "Action": "cloudwatch:PutMetricData",
                "Resource": "*",
                "Condition": {"StringLike": {"cloudwatch:namespace": ["/aws/sagemaker/*", "AWS/SageMaker"]}},
            },
        ]
        if self.model_data is not None:
            statements.append(
                {"Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{self.model_data.removeprefix('s3://')}"}
            )
        policy = {"RoleName": role_name(self.name), "PolicyName": "tercet", "PolicyDocument": _policy(*statements)}
        return "iam", "put_role_policy", policy

    def model(self) -> Request:
        container: dict[str, Any] = {"Image": self.image, "Environment": self.environment()}
        if self.model_data is not None:
            container["ModelDataUrl"] = self.model_data
        content: dict[str, Any] = {"PrimaryContainer": container, "ExecutionRoleArn": self.execution_role_arn}
        name = f"{self.name}-{_digest(content)}"
        return "sagemaker", "create_model", {"ModelName": name, **content, "Tags": tags(self.name)}

    def endpoint_config(self) -> Request:
        variant = {
            "VariantName": VARIANT,
            "ModelName": self.model()[2]["ModelName"],
            "InstanceType": self.instance_type,
            "InitialInstanceCount": self.num_instances,
            "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_S,
        }
        if self.ami is not None:
            variant["InferenceAmiVersion"] = self.ami
        name = f"{self.name}-{_digest(variant)}"
        config = {"EndpointConfigName": name, "ProductionVariants": [variant], "Tags": tags(self.name)}
        return "sagemaker", "create_endpoint_config", config

    def endpoint(self) -> Request:
        config = self.endpoint_config()[2]["EndpointConfigName"]
        endpoint = {"EndpointName": self.name, "EndpointConfigName": config, "Tags": tags(self.name)}
        return "sagemaker", "create_endpoint", endpoint

    def scaling(self) -> list[Request]:
        """Nothing unless it is wanted."""
        if not self.is_scaled:
            return []
        target = scaling_target(self.name)
        policy = {
            "TargetValue": float(self.invocations_per_minute),
            "PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"},
        }
        bounds = {**target, "MinCapacity": self.num_instances, "MaxCapacity": self.max_instances}
        scaling = {
            **target,
            "PolicyName": self.name,
            "PolicyType": "TargetTrackingScaling",
            "TargetTrackingScalingPolicyConfiguration": policy,
        }
        service = "application-autoscaling"
        return [(service, "register_scalable_target", bounds), (service, "put_scaling_policy", scaling)]

    def requests(self) -> list[Request]:
        """All that create something, in order, where nothing exists yet. Without the image's."""
        role = [] if self.role_arn else [self.role(), self.role_policy()]
        return [*role, self.model(), self.endpoint_config(), self.endpoint(), *self.scaling()]


def repository(name: str) -> Request:
    return "ecr", "create_repository", {"repositoryName": name, "tags": tags(name)}


def check_name(name: str) -> None:
    """
    Raises:
        StartError: SageMaker, ECR and IAM do not all take this name.
    """
    if not _NAME.fullmatch(name):
        raise StartError(
            f"--name {name!r} must be 2 to 40 lower-case letters, digits and single hyphens, and begin and end with a "
            "letter or digit."
        )


def has_gpu(instance_type: str) -> bool:
    return _GPU_FAMILY.match(instance_type) is not None


def tags(name: str) -> list[dict[str, str]]:
    """Return the tags by which `--destroy` knows what this command has made."""
    return [{"Key": TAG, "Value": name}]


def role_name(name: str) -> str:
    return f"{name}-sagemaker"


def log_group(name: str) -> str:
    return f"/aws/sagemaker/Endpoints/{name}"


def scaling_target(name: str) -> dict[str, str]:
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def repository_arn(image: str) -> str | None:
    """Return the ARN of an image's repository in ECR. None for another registry."""
    match = re.match(r"(\d{12})\.dkr\.ecr\.([\w-]+)\.amazonaws\.com(?:\.cn)?/([^:@]+)", image)
    return f"arn:aws:ecr:{match[2]}:{match[1]}:repository/{match[3]}" if match else None


def _policy(*statements: dict[str, Any]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **each} for each in statements]})


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGEST_CHARS]
