"""The tests' own cloud: what it records, and that its faults look to boto3 as AWS's do."""

from __future__ import annotations

import time

import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.deploy.aws.cloud import Cloud

TRUST = "{}"


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    return str(error.value.response["Error"]["Code"])


def test_calls_reach_moto_and_are_recorded_in_order(cloud: Cloud) -> None:
    cloud.client("iam").create_role(RoleName="one", AssumeRolePolicyDocument=TRUST)
    cloud.client("ecr").create_repository(repositoryName="tercet")
    cloud.client("s3").create_bucket(Bucket="weights", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    cloud.client("s3").put_object(Bucket="weights", Key="a/b.tar", Body=b"0123")
    assert cloud.client("s3").get_object(Bucket="weights", Key="a/b.tar")["Body"].read() == b"0123"
    assert cloud.operations() == [
        "CreateRole", "CreateRepository", "PUT /weights", "PUT /weights/a/b.tar", "GET /weights/a/b.tar",
    ]  # fmt: skip
    assert [call.service for call in cloud.calls] == ["iam", "ecr", "s3", "s3", "s3"]
    assert cloud.calls[1].body == {"repositoryName": "tercet"}


def test_a_new_account_is_empty(cloud: Cloud) -> None:
    cloud.client("ecr").create_repository(repositoryName="tercet")
    cloud.reset()
    assert cloud.operations() == []
    assert cloud.client("ecr").describe_repositories()["repositories"] == []


def test_errors_have_each_services_own_form(cloud: Cloud) -> None:
    cloud.fail("*", "QuotaExceeded", "no more", status=400, times=100)
    calls = {
        "sagemaker": "list_endpoints", "iam": "list_roles", "ec2": "describe_instances", "s3": "list_buckets",
        "lambda": "list_functions",
    }  # fmt: skip
    for service, call in calls.items():
        with pytest.raises(ClientError, match="no more") as caught:
            getattr(cloud.client(service), call)()
        assert code_of(caught) == "QuotaExceeded"


def test_only_the_chosen_calls_fail(cloud: Cloud) -> None:
    cloud.throttle("DescribeRepositories", first=2, times=2)
    ecr = cloud.client("ecr")
    ecr.describe_repositories()
    for _ in range(2):
        with pytest.raises(ClientError) as caught:
            ecr.describe_repositories()
        assert code_of(caught) == "ThrottlingException"
    ecr.describe_repositories()
    assert [call.status for call in cloud.calls] == [200, 400, 400, 200]


def test_boto3_retries_a_throttled_call(cloud: Cloud) -> None:
    cloud.throttle("ListEndpoints")
    retrying = Config(retries={"total_max_attempts": 3, "mode": "standard"}, proxies={})
    assert cloud.client("sagemaker", config=retrying).list_endpoints()["Endpoints"] == []
    assert cloud.operations() == ["ListEndpoints"] * 2


def test_an_answer_is_lost_after_the_call_was_performed(cloud: Cloud) -> None:
    cloud.fail("CreateRole", is_performed=True)
    with pytest.raises(ClientError, match="injected"):
        cloud.client("iam").create_role(RoleName="one", AssumeRolePolicyDocument=TRUST)
    assert [role["RoleName"] for role in cloud.client("iam").list_roles()["Roles"]] == ["one"]


def test_an_answer_is_rewritten_and_delayed(cloud: Cloud) -> None:
    cloud.rewrite_json("DescribeRepositories", repositories=None, nextToken="more")
    cloud.delay("DescribeRepositories", 0.2)
    started_at = time.monotonic()
    found = cloud.client("ecr").describe_repositories()
    assert time.monotonic() - started_at >= 0.2
    assert found["nextToken"] == "more"
    assert "repositories" not in found
