"""The templates in `deploy/cloud/aws/` as documents, and stacks of them in moto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cfnlint.decode.cfn_yaml import loads

from deploy.cloud.aws.wake_archive import pack
from tests.deploy.cloud.aws.cloud import Cloud
from tests.e2e.harness import ROOT

TEMPLATES = ROOT / "deploy/cloud/aws"
STACK = "tercet"
BUCKET = "archives"


def load_template(name: str) -> dict[str, Any]:
    """Its tags as JSON has them: `!Ref x` is `{"Ref": "x"}`."""
    template: dict[str, Any] = loads((TEMPLATES / name).read_text())
    return template


def allowed_actions(statements: list[dict[str, Any]]) -> set[str]:
    """The actions of a policy's statements, those included that depend on a parameter (`!If`)."""
    listed = [statement.get("Fn::If", [None, statement])[1]["Action"] for statement in statements]
    return {action for found in listed for action in ([found] if isinstance(found, str) else found)}


def role_actions(template: dict[str, Any], role: str) -> set[str]:
    """What a role of a template may do."""
    policies = template["Resources"][role]["Properties"]["Policies"]
    return set().union(*(allowed_actions(policy["PolicyDocument"]["Statement"]) for policy in policies))


def for_moto(template: dict[str, Any]) -> str:
    """The template as far as moto has it, without outputs."""
    resources = dict(template["Resources"])
    # moto takes no properties of an instance from a launch template.
    for name, resource in resources.items():
        if resource["Type"] == "AWS::EC2::Instance" and "LaunchTemplate" in (given := resource["Properties"]):
            data = resources[given["LaunchTemplate"]["LaunchTemplateId"]["Ref"]]["Properties"]["LaunchTemplateData"]
            own = {"Tags": given["Tags"], **{key: data[key] for key in ("ImageId", "InstanceType", "UserData")}}
            resources[name] = {**resource, "Properties": own}
    return json.dumps(template | {"Resources": resources, "Outputs": {}})


@contextmanager
def wake_stack(cloud: Cloud, directory: Any, **parameters: str) -> Iterator[dict[str, str]]:
    """`lambda-ec2.yaml` as a stack, deleted at the end.

    Yields:
        The variables of the function, and of boto3 for this cloud.
    """
    s3, stacks = cloud.client("s3"), cloud.client("cloudformation")
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    archive = pack(directory, [])
    s3.put_object(Bucket=BUCKET, Key=archive.name, Body=archive.read_bytes())
    subnet = cloud.client("ec2").describe_subnets()["Subnets"][0]
    given = {
        "Bucket": BUCKET,
        "FunctionKey": archive.name,
        "SourceKey": "tercet.tar.gz",
        "VpcId": subnet["VpcId"],
        "SubnetId": subnet["SubnetId"],
        **parameters,
    }
    stacks.create_stack(
        StackName=STACK,
        TemplateBody=for_moto(load_template("lambda-ec2.yaml")),
        Capabilities=["CAPABILITY_IAM"],
        Parameters=[{"ParameterKey": name, "ParameterValue": value} for name, value in given.items()],
    )
    function = cloud.client("lambda").get_function_configuration(FunctionName=f"{STACK}-wake")
    cloud.forget()
    try:
        variables = function["Environment"]["Variables"]
        yield {**{name: str(value) for name, value in variables.items()}, **cloud.environ}
    finally:
        cloud.forget()
        stacks.delete_stack(StackName=STACK)
