"""`tercet deploy sagemaker`: the calls in order, what goes wrong, and that nothing is left afterwards."""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name

from deploy.cloud.aws import deploy_commands
from deploy.cloud.aws.calls import Account
from deploy.cloud.aws.deploy_commands import sagemaker
from deploy.cloud.aws.requests import Wanted
from shared.errors import StartError
from shared.extras import install_command
from tests.deploy.cloud.aws.cloud import INVOKE, OUTPUT, REGION, Cloud
from tests.deploy.cloud.aws.stacks import allowed_actions
from tests.e2e.harness import ROOT

IMAGE = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/tercet:1"
INSTANCE = "ml.c5.xlarge"
CREATION = ["CreateRole", "PutRolePolicy", "CreateModel", "CreateEndpointConfig", "CreateEndpoint", INVOKE]
REMOVAL = ["DeleteEndpoint", "DeleteEndpointConfig", "DeleteModel", "DeleteRolePolicy", "DeleteRole"]


# boto3 takes half a second of CPU time to make the clients of one account.
cached_account = functools.cache(Account)


@pytest.fixture(autouse=True)
def nothing_left(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """boto3 uses the tests' cloud, and nothing sleeps."""
    for name, value in cloud.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setattr(deploy_commands, "POLL_S", 0.0)
    monkeypatch.setattr(deploy_commands, "Account", cached_account)
    monkeypatch.setattr("time.sleep", lambda _: None)
    yield
    # Nothing is left that this command made, whatever a test did to it, once --destroy has run.
    cloud.forget()
    deploy(destroy=True)
    assert_nothing_left(cloud)


def deploy(**options: Any) -> None:
    """The command, on an instance that moto knows; its list ends before ml.c6i."""
    sagemaker(**{"instance_type": INSTANCE, **options})


def assert_nothing_left(cloud: Cloud) -> None:
    client = cloud.client("sagemaker")
    assert client.list_endpoints()["Endpoints"] == []
    assert client.list_endpoint_configs()["EndpointConfigs"] == []
    assert client.list_models()["Models"] == []
    roles = cloud.client("iam").list_roles()["Roles"]
    assert [role["RoleName"] for role in roles if role["RoleName"].startswith("tercet")] == []
    assert cloud.client("ecr").describe_repositories()["repositories"] == []
    targets = cloud.client("application-autoscaling").describe_scalable_targets(ServiceNamespace="sagemaker")
    assert targets["ScalableTargets"] == []


def changes(cloud: Cloud) -> list[str]:
    """The operations that change something, and the invocation; repeated attempts once."""
    reading = ("Describe", "List", "Get")
    found = [name for name in cloud.operations() if not name.startswith(reading)]
    return [name for name, before in zip(found, [None, *found], strict=False) if name != before]


def test_creation_makes_the_documented_calls_in_order(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(image=IMAGE)
    assert changes(cloud) == CREATION
    assert cloud.operations()[0] == "GetCallerIdentity"
    captured = capsys.readouterr()
    assert captured.out.splitlines() == OUTPUT
    assert "InService" in captured.err
    assert "tercet deploy sagemaker --destroy --name tercet --region eu-central-1" in " ".join(captured.err.split())
    bodies = {call.operation: call.body for call in cloud.calls}
    assert bodies["CreateModel"]["PrimaryContainer"] == {"Image": IMAGE, "Environment": {"TERCET_MODELS": "embedded"}}
    [variant] = bodies["CreateEndpointConfig"]["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == (INSTANCE, 1)


def test_a_dry_run_prints_these_calls_and_makes_none(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    deploy(image=IMAGE, max_instances=3, region=REGION, dry_run=True)
    lines = capsys.readouterr().out.splitlines()
    assert cloud.operations() == []
    printed = [line.split()[1] for line in lines]
    assert all(json.loads(line.split(" ", 2)[2]) for line in lines)
    deploy(image=IMAGE, max_instances=3)
    assert printed == [xform_name(name) for name in changes(cloud)]


def test_a_repeated_command_changes_nothing_and_removal_takes_all_in_the_order_of_dependence(cloud: Cloud) -> None:
    deploy(image=IMAGE, max_instances=2)
    cloud.forget()
    deploy(image=IMAGE, max_instances=2)
    scaling = ["RegisterScalableTarget", "PutScalingPolicy"]
    assert changes(cloud) == ["CreateRole", "PutRolePolicy", *scaling, INVOKE]  # the role exists: 409
    cloud.forget()
    deploy(destroy=True)
    assert changes(cloud)[:-1] == ["DeregisterScalableTarget", *REMOVAL]
    assert_nothing_left(cloud)
    cloud.forget()
    deploy(destroy=True)  # again: what is gone is no error
    assert changes(cloud) == ["DeleteLogGroup"]


def passing_through(cloud: Cloud, *states: dict[str, Any]) -> None:
    """The first descriptions of an endpoint have these fields, one after another."""
    left = list(states)

    def change(found: dict[str, Any]) -> dict[str, Any]:
        return found | left.pop(0) if left else found

    cloud.rewrite("DescribeEndpoint", change, times=1000)


CREATING = {"EndpointStatus": "Creating"}


def test_an_interrupted_creation_goes_on(cloud: Cloud) -> None:
    """After an end between two calls, and while the endpoint is being created."""
    cloud.fail("CreateEndpoint", "AccessDeniedException", "no", status=400)
    with pytest.raises(StartError, match=r"docs/AWS\.md"):
        deploy(image=IMAGE, keep=True)
    assert len(cloud.client("sagemaker").list_models()["Models"]) == 1
    passing_through(cloud, CREATING, CREATING)
    deploy(image=IMAGE)
    assert cloud.count("CreateModel") == 1
    assert cloud.count("CreateEndpoint") == 2


def test_a_failed_endpoint_is_removed_with_all_else_and_its_reason_is_shown(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = "The primary container did not pass the ping health check."
    failed = {"EndpointStatus": "Failed", "FailureReason": reason}
    passing_through(cloud, CREATING, failed)
    with pytest.raises(StartError) as caught:
        deploy(image=IMAGE)
    assert reason in str(caught.value)
    assert "/aws/sagemaker/Endpoints/tercet" in str(caught.value)
    assert changes(cloud) == [*CREATION[:-1], *REMOVAL]
    assert_nothing_left(cloud)
    assert "Creating after 0 s" in capsys.readouterr().err


def test_a_failed_endpoint_stays_with_keep_and_is_replaced_by_the_next_command(cloud: Cloud) -> None:
    passing_through(cloud, {"EndpointStatus": "Failed"}, {"EndpointStatus": "Failed"}, {"EndpointStatus": "Failed"})
    with pytest.raises(StartError, match="its status is Failed"):
        deploy(image=IMAGE, keep=True)
    assert [one["EndpointName"] for one in cloud.client("sagemaker").list_endpoints()["Endpoints"]] == ["tercet"]
    deploy(image=IMAGE)
    assert cloud.count("DeleteEndpoint") == 1
    assert cloud.count("CreateEndpoint") == 2


def test_an_endpoint_that_is_not_ready_in_time_is_removed_once_aws_permits_it(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS refuses to delete an endpoint that is being created."""
    passing_through(cloud, *[CREATING] * 3)
    monkeypatch.setattr(deploy_commands, "POLL_S", 1.0)  # polls count a second each, and no time passes
    with pytest.raises(StartError, match=r"is Creating after 1 s; see its log group .*--wait-s"):
        deploy(image=IMAGE, wait_s=1)
    assert_nothing_left(cloud)


def test_ctrl_c_removes_what_was_created_and_a_second_one_says_what_may_be_left(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", interrupt)
        passing_through(cloud, CREATING)
        with pytest.raises(KeyboardInterrupt):
            deploy(image=IMAGE)
        assert_nothing_left(cloud)
        passing_through(cloud, CREATING, CREATING, CREATING)
        with pytest.raises(KeyboardInterrupt):
            deploy(image=IMAGE)
    assert "what is left may cost money: tercet deploy sagemaker --destroy" in " ".join(capsys.readouterr().err.split())
    assert cloud.count("DeleteEndpoint") == 1


def test_what_cannot_be_removed_is_said_with_the_command_that_tries_again(cloud: Cloud) -> None:
    passing_through(cloud, {"EndpointStatus": "Failed"})
    cloud.fail("DeleteModel", "AccessDeniedException", "no", status=400)
    with pytest.raises(
        StartError, match=r"its status is Failed.*Not everything could be removed.*--destroy --name tercet"
    ):
        deploy(image=IMAGE)
    assert cloud.client("sagemaker").list_endpoints()["Endpoints"] == []
    assert [role["RoleName"] for role in cloud.client("iam").list_roles()["Roles"]] == []


def test_without_boto3_the_command_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_commands, "Account", Account)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "boto3", None)
        with pytest.raises(StartError, match=re.escape(install_command("aws"))):
            deploy(image=IMAGE)
        deploy(image=IMAGE, dry_run=True)


ROLE_UNKNOWN = "Could not assume role arn:aws:iam::1:role/tercet-sagemaker. Please ensure that the role exists."


def test_calls_that_fail_for_a_moment_are_repeated(cloud: Cloud) -> None:
    """Also those that name a role which is not yet known everywhere."""
    for operation in ("CreateEndpoint", "DescribeEndpoint", "ListTags"):
        cloud.fail(operation, "ThrottlingException", status=400, times=2)
    cloud.fail("CreateEndpointConfig", times=2)
    cloud.fail("CreateModel", "ValidationException", ROLE_UNKNOWN, status=400, times=3)
    deploy(image=IMAGE)
    assert changes(cloud) == CREATION
    assert (cloud.count("CreateEndpoint"), cloud.count("CreateModel")) == (3, 4)


@pytest.mark.parametrize("operation", CREATION[:-1])
def test_a_creation_that_fails_anywhere_leaves_nothing(cloud: Cloud, operation: str) -> None:
    cloud.fail(operation, times=100)
    with pytest.raises(StartError, match="InternalFailure"):
        deploy(image=IMAGE)
    assert_nothing_left(cloud)


def test_a_call_whose_answer_is_lost_is_no_error(cloud: Cloud) -> None:
    """It is sent again, and finds its own work: AWS answers that the name is taken (moto takes names twice)."""
    taken = 'Cannot create already existing endpoint "arn:aws:sagemaker:eu-central-1:1:endpoint/tercet".'
    for operation in ("CreateModel", "CreateEndpointConfig", "CreateEndpoint"):
        cloud.fail(operation, is_performed=True)
        cloud.fail(operation, "ValidationException", taken, status=400, first=2)
    cloud.fail("CreateRole", is_performed=True)
    deploy(image=IMAGE)
    assert changes(cloud) == CREATION


def test_what_this_command_did_not_make_is_neither_changed_nor_removed(cloud: Cloud) -> None:
    client = cloud.client("sagemaker")
    client.create_model(
        ModelName="tercet-other", PrimaryContainer={"Image": IMAGE}, ExecutionRoleArn="arn:aws:iam::1:role/x"
    )
    client.create_endpoint_config(
        EndpointConfigName="other",
        ProductionVariants=[
            {"VariantName": "a", "ModelName": "tercet-other", "InstanceType": "ml.m5.large", "InitialInstanceCount": 1}
        ],
    )
    client.create_endpoint(EndpointName="tercet", EndpointConfigName="other")
    for options in ({"image": IMAGE}, {"destroy": True}):
        with pytest.raises(StartError, match=r"was not made by this command.*--name"):
            deploy(**options)
    client.delete_endpoint(EndpointName="tercet")
    cloud.client("iam").create_role(RoleName="tercet-sagemaker", AssumeRolePolicyDocument="{}")
    with pytest.raises(StartError, match="A role tercet-sagemaker exists and was not made"):
        deploy(image=IMAGE)
    deploy(destroy=True)
    assert [model["ModelName"] for model in client.list_models()["Models"]] == ["tercet-other"]
    cloud.client("iam").delete_role(RoleName="tercet-sagemaker")
    client.delete_endpoint_config(EndpointConfigName="other")
    client.delete_model(ModelName="tercet-other")


def test_a_change_updates_the_endpoint_and_removes_what_it_replaced(cloud: Cloud) -> None:
    """moto has no UpdateEndpoint: its answer is made here, as is the endpoint's configuration after it."""
    deploy(image=IMAGE)
    cloud.forget()
    cloud.fail("UpdateEndpoint", status=200)
    account_id = cloud.client("sts").get_caller_identity()["Account"]
    wanted = Wanted("tercet", REGION, account_id, IMAGE, INSTANCE, num_instances=2)
    config = wanted.endpoint_config()[2]["EndpointConfigName"]
    passing_through(cloud, {}, {}, {"EndpointStatus": "Updating"}, {"EndpointConfigName": config})
    deploy(image=IMAGE, instances=2)
    made = ["CreateRole", "PutRolePolicy", "CreateEndpointConfig", "UpdateEndpoint", INVOKE, "DeleteEndpointConfig"]
    assert changes(cloud) == made
    found = cloud.client("sagemaker").list_endpoint_configs()["EndpointConfigs"]
    assert [one["EndpointConfigName"] for one in found] == [config]


def test_an_update_that_is_rolled_back_is_an_error_and_the_endpoint_stays(cloud: Cloud) -> None:
    deploy(image=IMAGE)
    cloud.fail("UpdateEndpoint", status=200)
    with pytest.raises(StartError, match="Endpoint tercet does not serve"):
        deploy(image=IMAGE, instances=2)
    assert cloud.count("DeleteEndpoint") == 0


def test_an_endpoint_that_does_not_answer_is_removed(cloud: Cloud) -> None:
    cloud.fail(INVOKE, "ModelError", "Received server error (503) from primary", status=424, times=3)
    with pytest.raises(StartError, match=r"ModelError: Received server error \(503\).*log group is /aws/sagemaker/End"):
        deploy(image=IMAGE)
    assert cloud.count(INVOKE) == 3
    assert_nothing_left(cloud)


def test_a_quota_and_a_wrong_key_are_one_sentence_with_what_to_do(cloud: Cloud) -> None:
    limit = "The account-level service limit 'ml.g4dn.xlarge for endpoint usage' is 0 Instances."
    cloud.fail("CreateEndpoint", "ResourceLimitExceeded", limit, status=400)
    with pytest.raises(StartError) as caught:
        deploy(image=IMAGE, instance_type="ml.g4dn.xlarge")
    assert "ml.g4dn.xlarge for endpoint usage" in str(caught.value)
    assert "Service Quotas" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_nothing_left(cloud)
    cloud.fail("GetCallerIdentity", "InvalidClientTokenId", "The security token is invalid.", status=403)
    with pytest.raises(StartError, match="AWS does not know these credentials"):
        deploy(image=IMAGE)


def test_no_credentials_no_region_and_no_profile_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cloud: Cloud
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deploy_commands, "Account", Account)
        patch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        patch.delenv("AWS_ACCESS_KEY_ID")
        with pytest.raises(StartError, match="aws configure"):
            deploy(image=IMAGE)
        with pytest.raises(StartError, match=r"Name a section of ~/\.aws/config with --profile"):
            deploy(image=IMAGE, profile="absent")
        patch.delenv("AWS_DEFAULT_REGION")
        with pytest.raises(StartError, match="give one with --region"):
            deploy(image=IMAGE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "Tercet"}, "--name 'Tercet' must be"),
        ({"name": "a" * 41}, "2 to 40"),
        ({"model_data": "weights.tar.gz"}, "must be the URI of an archive in S3"),
        ({"model_data": "s3://a/model.tar.gz", "model_id": "gpt2"}, "name two models"),
        ({"role": "tercet"}, "must be an ARN"),
        ({"instances": 3, "max_instances": 2}, "must be at least --instances"),
        ({"destroy": True, "dry_run": True}, "--dry-run shows what creation does"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_before_any_call(
    options: dict[str, Any], message: str, cloud: Cloud
) -> None:
    with pytest.raises(StartError, match=message):
        deploy(image=IMAGE, **options)
    assert cloud.operations() == []


def test_weights_in_s3_and_a_repository_of_the_hub_reach_the_container(cloud: Cloud) -> None:
    deploy(image=IMAGE, model_data="s3://weights/gpt2/model.tar.gz")
    model = next(call.body for call in cloud.calls if call.operation == "CreateModel")
    assert model["PrimaryContainer"]["ModelDataUrl"] == "s3://weights/gpt2/model.tar.gz"
    assert model["PrimaryContainer"]["Environment"] == {}
    policy = next(call.body for call in cloud.calls if call.operation == "PutRolePolicy")
    assert "arn:aws:s3:::weights/gpt2/model.tar.gz" in policy["PolicyDocument"]
    deploy(destroy=True)
    cloud.forget()
    deploy(image=IMAGE, model_id="openai-community/gpt2", role="arn:aws:iam::123456789012:role/given")
    model = next(call.body for call in cloud.calls if call.operation == "CreateModel")
    assert model["PrimaryContainer"]["Environment"]["HF_MODEL_ID"] == "openai-community/gpt2"
    assert model["ExecutionRoleArn"] == "arn:aws:iam::123456789012:role/given"
    assert "CreateRole" not in changes(cloud)


def test_the_published_policy_allows_every_call(cloud: Cloud) -> None:
    deploy(image=IMAGE, max_instances=2)
    deploy(destroy=True)
    made = {
        f"{call.service}:{call.operation}"
        for call in cloud.calls
        if call.service in {"iam", "sagemaker", "application-autoscaling"}
    }
    policy = json.loads((ROOT / "deploy/cloud/aws/sagemaker-policy.json").read_text())
    assert len(made) > 15
    assert made - allowed_actions(policy["Statement"]) == set()
