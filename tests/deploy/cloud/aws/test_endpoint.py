"""`tercet deploy sagemaker`: its stack, what goes wrong with it, and that nothing is left afterwards.

moto changes stacks at once, and never fails: what CloudFormation says of a stack is changed here. moto makes no
autoscaling, and gives the endpoint a name of its own.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.cloud.aws import deploy_commands
from deploy.cloud.aws.calls import Account
from deploy.cloud.aws.deploy_commands import sagemaker
from shared.errors import StartError
from shared.extras import install_command
from tests.deploy.cloud.aws.cloud import INVOKE, OUTPUT, REGION, Cloud
from tests.deploy.cloud.aws.stacks import allowed_actions, load_template
from tests.e2e.harness import ROOT

IMAGE = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/tercet:1"
INSTANCE = "ml.c5.xlarge"

# boto3 takes half a second of CPU time to make the clients of one account.
cached_account = functools.cache(Account)


@pytest.fixture(autouse=True)
def nothing_left(deployer: Cloud, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is left that the command made, whatever a test did to it, once --destroy has run."""
    monkeypatch.setattr(deploy_commands, "Account", cached_account)
    yield
    deployer.forget()
    deploy(destroy=True)
    assert_nothing_left(deployer)


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


def changes(cloud: Cloud) -> list[str]:
    """The operations that change something, and the invocation."""
    reading = ("Describe", "List", "Get")
    return [name for name in cloud.operations() if not name.startswith(reading)]


def deployed_variant(cloud: Cloud) -> dict[str, Any]:
    """What the endpoint runs on."""
    client = cloud.client("sagemaker")
    [config] = client.list_endpoint_configs()["EndpointConfigs"]
    found = client.describe_endpoint_config(EndpointConfigName=config["EndpointConfigName"])
    return dict(found["ProductionVariants"][0])


def deployed_model(cloud: Cloud) -> dict[str, Any]:
    client = cloud.client("sagemaker")
    [model] = client.list_models()["Models"]
    return dict(client.describe_model(ModelName=model["ModelName"]))


def test_a_stack_is_created_and_asked_and_removed_with_all_that_it_made(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy(image=IMAGE)
    assert changes(cloud) == ["CreateStack", INVOKE]
    assert cloud.operations()[0] == "GetCallerIdentity"
    captured = capsys.readouterr()
    assert captured.out.splitlines() == OUTPUT
    assert "CREATE_COMPLETE" in captured.err
    assert "tercet deploy sagemaker --destroy --name tercet --region eu-central-1" in " ".join(captured.err.split())
    container = deployed_model(cloud)["PrimaryContainer"]
    assert (container["Image"], container["Environment"]) == (IMAGE, {"TERCET_MODELS": "embedded"})
    variant = deployed_variant(cloud)
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == (INSTANCE, 1)
    cloud.forget()
    deploy(destroy=True)
    assert changes(cloud) == ["DeleteStack", "DeleteLogGroup"]
    assert_nothing_left(cloud)
    cloud.forget()
    deploy(destroy=True)  # again: what is gone is no error
    assert changes(cloud) == ["DeleteLogGroup"]


def test_a_repeated_command_changes_nothing_and_other_options_update_the_stack(cloud: Cloud) -> None:
    deploy(image=IMAGE)
    before = deployed_variant(cloud)
    cloud.fail("UpdateStack", "ValidationError", "No updates are to be performed.", status=400)
    deploy(image=IMAGE)
    assert deployed_variant(cloud) == before
    cloud.forget()
    deploy(image=IMAGE, instances=2)
    assert changes(cloud) == ["UpdateStack", INVOKE]
    assert deployed_variant(cloud)["InitialInstanceCount"] == 2


def test_a_dry_run_prints_the_template_with_its_parameters_and_calls_nothing(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy(image=IMAGE, max_instances=3, region=REGION, dry_run=True)
    assert cloud.operations() == []
    command, *template = capsys.readouterr().out.splitlines()
    assert template == (ROOT / "deploy/cloud/aws/sagemaker.yaml").read_text().splitlines()
    given = {"Name=tercet", f"Image={IMAGE}", f"InstanceType={INSTANCE}", "MaxInstances=3"}
    assert given <= set(command.split())
    deploy(dry_run=True)
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("# aws", "# docker"))]
    assert [line.split()[1:3] for line in commands] == [
        ["aws", "cloudformation"],
        ["docker", "build"],
        ["docker", "push"],
        ["aws", "cloudformation"],
    ]


def test_autoscaling_is_part_of_the_stack_only_where_more_instances_may_be_added(cloud: Cloud) -> None:
    for options, number in (({}, "0"), ({"max_instances": 1}, "0"), ({"max_instances": 4}, "4")):
        deploy(image=IMAGE, **options)
        [stack] = cloud.client("cloudformation").describe_stacks(StackName="tercet-sagemaker")["Stacks"]
        parameters = {each["ParameterKey"]: each["ParameterValue"] for each in stack["Parameters"]}
        assert parameters["MaxInstances"] == number
    template = load_template("sagemaker.yaml")
    scaled = {name for name, each in template["Resources"].items() if each.get("Condition") == "IsScaled"}
    assert scaled == {"ScalableTarget", "ScalingPolicy"}
    assert template["Conditions"]["MayScale"] == {"Fn::Not": [{"Fn::Equals": [{"Ref": "MaxInstances"}, 0]}]}


# What goes wrong.


def passing_through(cloud: Cloud, *states: str) -> None:
    """The first descriptions of an existing stack have these states, one after another."""
    left = list(states)

    def change(found: dict[str, Any]) -> dict[str, Any]:
        if left:
            found["Stacks"][0]["StackStatus"] = left.pop(0)
        return found

    cloud.rewrite("DescribeStacks", change, times=1000)


def failing_with(cloud: Cloud, reason: str) -> None:
    """The last change of the stack failed for this reason, and other resources were cancelled for it."""
    failed = {"LogicalResourceId": "Endpoint", "ResourceStatus": "CREATE_FAILED", "ResourceStatusReason": reason}
    cancelled = {**failed, "LogicalResourceId": "Other", "ResourceStatusReason": "Resource creation cancelled"}
    began = {"LogicalResourceId": "tercet-sagemaker", "ResourceStatus": "CREATE_IN_PROGRESS"}
    old = {**failed, "ResourceStatusReason": "of an earlier change"}
    cloud.rewrite("DescribeStackEvents", lambda _: {"StackEvents": [cancelled, failed, began, old]}, times=1000)


def test_a_failed_stack_is_removed_with_all_else_and_its_reason_is_shown_with_what_to_do(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = "The account-level service limit 'ml.g4dn.xlarge for endpoint usage' is 0 Instances."
    passing_through(cloud, "CREATE_IN_PROGRESS", "CREATE_FAILED")
    failing_with(cloud, f"{limit} (HandlerErrorCode: ServiceLimitExceeded)")
    with pytest.raises(StartError, match=f"{re.escape(limit)}.*Service Quotas.*/aws/sagemaker/Endpoints/tercet"):
        deploy(image=IMAGE, instance_type="ml.g4dn.xlarge")
    assert changes(cloud) == ["CreateStack", "DeleteStack"]
    assert_nothing_left(cloud)
    assert "CREATE_IN_PROGRESS after 0 s" in capsys.readouterr().err


def test_a_failed_stack_stays_with_keep_and_is_replaced_by_the_next_command(cloud: Cloud) -> None:
    passing_through(cloud, "CREATE_FAILED", "CREATE_FAILED", "CREATE_FAILED")
    failing_with(cloud, "no capacity")
    with pytest.raises(StartError, match="no capacity"):
        deploy(image=IMAGE, keep=True)
    assert len(cloud.client("sagemaker").list_endpoints()["Endpoints"]) == 1
    deploy(image=IMAGE)
    assert changes(cloud) == ["CreateStack", "DeleteStack", "CreateStack", INVOKE]


def test_an_update_that_is_rolled_back_is_an_error_and_the_endpoint_stays(cloud: Cloud) -> None:
    deploy(image=IMAGE)
    cloud.forget()
    passing_through(cloud, "UPDATE_COMPLETE", "UPDATE_COMPLETE", "UPDATE_ROLLBACK_COMPLETE")
    failing_with(cloud, "no capacity")
    with pytest.raises(StartError, match="Endpoint tercet does not serve: no capacity"):
        deploy(image=IMAGE, instances=2)
    assert changes(cloud) == ["UpdateStack"]


def test_a_stack_that_is_not_ready_in_time_is_removed_once_it_is(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    passing_through(cloud, *["CREATE_IN_PROGRESS"] * 3)
    with pytest.raises(StartError, match=r"CREATE_IN_PROGRESS after 300 s; see the log group .*--wait-s"):
        deploy(image=IMAGE, wait_s=300)
    assert_nothing_left(cloud)


def test_ctrl_c_removes_what_was_created_and_a_second_one_says_what_may_be_left(
    cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.sleep", interrupt)
        passing_through(cloud, "CREATE_IN_PROGRESS")
        with pytest.raises(KeyboardInterrupt):
            deploy(image=IMAGE)
        assert_nothing_left(cloud)
        passing_through(cloud, "CREATE_IN_PROGRESS", "CREATE_IN_PROGRESS")
        with pytest.raises(KeyboardInterrupt):
            deploy(image=IMAGE)
    assert "what is left may cost money: tercet deploy sagemaker --destroy" in " ".join(capsys.readouterr().err.split())
    assert cloud.count("DeleteStack") == 1


def test_what_cannot_be_removed_is_said_with_the_command_that_tries_again(cloud: Cloud) -> None:
    passing_through(cloud, "CREATE_FAILED", "CREATE_FAILED")
    failing_with(cloud, "no capacity")
    cloud.fail("DeleteStack", "AccessDenied", "no", status=403)
    with pytest.raises(StartError, match=r"no capacity.*Not everything could be removed.*--destroy --name tercet"):
        deploy(image=IMAGE)
    assert cloud.client("sagemaker").list_endpoints()["Endpoints"] != []


def test_calls_that_fail_for_a_moment_are_repeated(cloud: Cloud) -> None:
    """Also one whose answer is lost, and which finds its own work when it is sent again."""
    cloud.fail("DescribeStacks", "Throttling", status=400, times=2)
    cloud.fail("CreateStack", is_performed=True)
    cloud.fail("CreateStack", status=200, first=2)  # AWS knows the request by its token
    deploy(image=IMAGE)
    assert changes(cloud) == ["CreateStack", "CreateStack", INVOKE]


def test_what_this_command_did_not_make_is_neither_changed_nor_removed(cloud: Cloud) -> None:
    deploy(image=IMAGE)
    cloud.forget()

    def without_tags(found: dict[str, Any]) -> dict[str, Any]:
        found["Stacks"][0]["Tags"] = []
        return found

    cloud.rewrite("DescribeStacks", without_tags, times=2)
    for options in ({"image": IMAGE}, {"destroy": True}):
        with pytest.raises(
            StartError, match=r"A stack tercet-sagemaker exists and was not made by this command.*--name"
        ):
            deploy(**options)
    deploy(destroy=True)
    cloud.forget()
    cloud.fail("DescribeEndpoint", status=200, times=2)
    for options in ({"image": IMAGE}, {"destroy": True}):
        with pytest.raises(StartError, match=r"An endpoint tercet exists and was not made by this command.*--name"):
            deploy(**options)
    assert changes(cloud) == []


def test_an_endpoint_that_does_not_answer_is_removed(cloud: Cloud) -> None:
    cloud.fail(INVOKE, "ModelError", "Received server error (503) from primary", status=424, times=3)
    with pytest.raises(StartError, match=r"ModelError: Received server error \(503\).*log group is /aws/sagemaker/End"):
        deploy(image=IMAGE)
    assert cloud.count(INVOKE) == 3
    assert_nothing_left(cloud)


def test_wrong_or_no_credentials_no_region_no_profile_and_no_boto3_say_what_to_do(tmp_path: Path, cloud: Cloud) -> None:
    cloud.fail("GetCallerIdentity", "InvalidClientTokenId", "The security token is invalid.", status=403)
    with pytest.raises(StartError, match="AWS does not know these credentials"):
        deploy(image=IMAGE)
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
        patch.setitem(sys.modules, "boto3", None)
        with pytest.raises(StartError, match=re.escape(install_command("aws"))):
            deploy(image=IMAGE)
        deploy(image=IMAGE, dry_run=True)


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
    container = deployed_model(cloud)["PrimaryContainer"]
    assert container["ModelDataUrl"] == "s3://weights/gpt2/model.tar.gz"
    assert container.get("Environment", {}) == {}
    policy = cloud.client("iam").get_role_policy(RoleName="tercet-sagemaker", PolicyName="tercet")["PolicyDocument"]
    assert "'arn:aws:s3:::weights/gpt2/model.tar.gz'" in str(policy)
    assert f"'arn:aws:ecr:{REGION}:123456789012:repository/tercet'" in str(policy)
    deploy(destroy=True)
    deploy(image=IMAGE, model_id="openai-community/gpt2", role="arn:aws:iam::123456789012:role/given")
    model = deployed_model(cloud)
    assert model["PrimaryContainer"]["Environment"]["HF_MODEL_ID"] == "openai-community/gpt2"
    assert model["ExecutionRoleArn"] == "arn:aws:iam::123456789012:role/given"
    assert cloud.client("iam").list_roles()["Roles"] == []


def test_the_published_policy_allows_every_call_and_what_the_stack_makes(cloud: Cloud) -> None:
    deploy(image=IMAGE)
    deploy(image=IMAGE, instances=2)
    deploy(destroy=True)
    policy = json.loads((ROOT / "deploy/cloud/aws/sagemaker-policy.json").read_text())
    allowed = allowed_actions(policy["Statement"])
    own = {f"{call.service}:{call.operation}" for call in cloud.calls if call.service != "sts"}
    assert len(own) > 5
    assert own - allowed == set()
    kinds = [each["Type"].split("::")[1:] for each in load_template("sagemaker.yaml")["Resources"].values()]
    needed = {f"{service.lower()}:{verb}{kind}" for service, kind in kinds for verb in ("Create", "Delete")}
    registered = {action for action in needed if action.startswith("applicationautoscaling:")}
    assert needed - registered - allowed == set()
    scaling = {"RegisterScalableTarget", "DeregisterScalableTarget", "PutScalingPolicy", "DeleteScalingPolicy"}
    assert {f"application-autoscaling:{action}" for action in scaling} <= allowed
