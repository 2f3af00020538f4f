"""The model at the first boot of the instance of jobs: weights of one's own in S3, or a private repository of the hub.

moto is S3 and Parameter Store. What is not shown: the boot on Amazon Linux, and IAM's decisions.
"""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.cloud.aws.cloud import REGION, Cloud
from tests.deploy.cloud.aws.stacks import BUCKET, load_template, wake_stack
from tests.e2e.harness import ROOT
from tests.programs import run_program, write_program
from tests.workers.checkpoints.conftest import hub
from tests.workers.checkpoints.hub_server import Hub
from workers.checkpoints.resolve import EMBEDDED

__all__ = ["hub"]

# In place of Amazon's program, for the two commands of the script.
AWS = """
import boto3, sys
words = sys.argv[1:]
if words[:2] == ["s3", "cp"]:
    bucket, _, key = words[2].removeprefix("s3://").partition("/")
    sys.stdout.buffer.write(boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read())
else:
    name, is_decrypted = words[words.index("--name") + 1], "--with-decryption" in words
    print(boto3.client("ssm").get_parameter(Name=name, WithDecryption=is_decrypted)["Parameter"]["Value"])
"""
KEY, PARAMETER, SECRET = "models/legal.tar.gz", "/tercet/hub-token", "hf_secret"
ARCHIVE = f"s3://{BUCKET}/{KEY}"


def archive_of(directory: Path, *, prefix: str = "") -> bytes:
    """As `tar -czf model.tar.gz -C DIRECTORY .` makes it."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(directory.iterdir()):
            archive.add(path, f"{prefix}./{path.name}")
    return content.getvalue()


def put_archive(cloud: Cloud, data: bytes) -> None:
    s3 = cloud.client("s3")
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": REGION})
    s3.put_object(Bucket=BUCKET, Key=KEY, Body=data)


def first_boot(cloud: Cloud, base: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command of `set_up_instance.sh`, with `base` as the home of the service's user."""
    write_program(base / "bin/aws", f"exec {sys.executable} -c '{AWS}' \"$@\"")
    path = f"{base}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    own = {"PATH": path, "HOME": str(base), "TERCET_RUN_DIR": str(base / "run"), "TERCET_DEVICES": "cpu"}
    return run_program(
        ["bash", "deploy/cloud/aws/first_model.sh", *arguments],
        cwd=ROOT,
        env={**kept, **cloud.environ, **own, **environ},
        timeout=180,
    )


def test_weights_of_ones_own_are_unpacked_and_checked(cloud: Cloud, tmp_path: Path) -> None:
    put_archive(cloud, archive_of(EMBEDDED))
    done = first_boot(cloud, tmp_path, "small", ARCHIVE)
    assert (done.returncode, done.stdout) == (0, f"model={tmp_path}/model\n"), done.stderr
    assert "model" in done.stderr  # the table of `tercet plan`
    weights = (tmp_path / "model/model.safetensors").read_bytes()
    assert weights == (EMBEDDED / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("make_data", "reason"),
    [
        (lambda: archive_of(EMBEDDED, prefix="legal/"), "has no config.json at its top"),
        (lambda: b"not an archive", "cannot be unpacked"),
        (lambda: archive_of(EMBEDDED)[:1000], "cannot be unpacked"),
        (lambda: archive_of(EMBEDDED, prefix="../outside/"), "cannot be unpacked"),
        (None, "NoSuchBucket"),
    ],
    ids=["a folder", "no archive", "cut", "outside of the directory", "no bucket"],
)
def test_an_archive_that_cannot_be_served_ends_the_boot(
    cloud: Cloud, tmp_path: Path, make_data: Callable[[], bytes] | None, reason: str
) -> None:
    if make_data is not None:
        put_archive(cloud, make_data())
    done = first_boot(cloud, tmp_path, "small", ARCHIVE)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    assert not (tmp_path / "outside").exists()


def test_a_private_repository_is_fetched_with_the_token_of_a_parameter(cloud: Cloud, hub: Hub, tmp_path: Path) -> None:
    """The token is in no file of the model's cache and in no output."""
    hub.token = SECRET
    missing = first_boot(cloud, tmp_path, "legal=org/tiny", "", PARAMETER)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert f"The parameter {PARAMETER} cannot be read" in missing.stderr
    cloud.client("ssm").put_parameter(Name=PARAMETER, Value=SECRET, Type="SecureString")
    without = first_boot(cloud, tmp_path, "legal=org/tiny")
    assert without.returncode == 1
    assert "shows it only with a token" in without.stderr
    done = first_boot(cloud, tmp_path, "legal=org/tiny", "", PARAMETER)
    assert (done.returncode, done.stdout) == (0, "legal=org/tiny\n"), done.stderr
    assert SECRET not in without.stderr + done.stderr
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    # The service itself has no token, and does not ask the hub.
    hub.requests.clear()
    assert first_boot(cloud, tmp_path, "legal=org/tiny", HF_HUB_OFFLINE="1").returncode == 0
    assert hub.requests == []


def instance_statements(cloud: Cloud) -> list[dict[str, Any]]:
    """The policy of the instance's role in the stack that was made."""
    iam = cloud.client("iam")
    [role] = [role["RoleName"] for role in iam.list_roles()["Roles"] if "Instance" in role["RoleName"]]
    document = iam.get_role_policy(RoleName=role, PolicyName="jobs")["PolicyDocument"]
    # moto keeps it as Python writes it, with None for AWS::NoValue.
    statements: list[dict[str, Any]] = ast.literal_eval(document)["Statement"]
    return [statement for statement in statements if statement]


@pytest.mark.parametrize("is_given", [False, True])
def test_the_instance_may_read_its_archive_and_its_token_alone(cloud: Cloud, tmp_path: Path, is_given: bool) -> None:
    given = {"ModelKey": KEY, "HubTokenParameter": PARAMETER} if is_given else {}
    with wake_stack(cloud, tmp_path, **given):
        statements = {str(one["Action"]): one["Resource"] for one in instance_statements(cloud)}
    objects = [one for one in statements["s3:GetObject"] if one]
    assert objects == [f"arn:aws:s3:::{BUCKET}/{key}" for key in ("tercet.tar.gz", *([KEY] if is_given else []))]
    if is_given:
        assert statements["ssm:GetParameter"].endswith(f":parameter{PARAMETER}")
    else:
        assert "ssm:GetParameter" not in statements


def test_the_template_and_the_script_pass_them_on() -> None:
    data = load_template("lambda-ec2.yaml")["Resources"]["LaunchTemplate"]["Properties"]["LaunchTemplateData"]
    user_data = data["UserData"]["Fn::Base64"]["Fn::Sub"]
    values = {"Bucket": BUCKET, "ModelKey": KEY, "HubTokenParameter": PARAMETER, "Models": "small", "Jobs": "t"}
    values |= {"IdleStopSeconds": "60", "JobTtlSeconds": "60", "SourceKey": "s", "AWS::Region": REGION}
    for name, value in values.items():
        user_data = user_data.replace(f"${{{name}}}", value)
    # The end of the first boot, with the arguments printed in place of the set-up.
    script = user_data[user_data.index("archive=") :].replace("bash /opt", "printf '%s\\n' /opt")
    done = run_program(["bash", "-euc", script], check=True)
    assert done.stdout.splitlines()[-2:] == [ARCHIVE, PARAMETER]
    set_up = (ROOT / "deploy/cloud/aws/set_up_instance.sh").read_text()
    assert 'bash deploy/cloud/aws/first_model.sh "$2" "${5:-}" "${6:-}")' in set_up
