"""The image of `tercet deploy sagemaker`: built, pushed, pinned, and started as SageMaker starts it.

`docker` here is a stand-in that records its calls: no registry of AWS can be had, and the build itself is shown by
tests/deploy/packaging/test_container.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.cloud.aws import images
from deploy.cloud.sagemaker import sagemaker_environment
from shared.errors import StartError
from shared.setting_values import Address
from shared.settings import Settings
from tests.deploy.cloud.aws.cloud import REGION, Cloud
from tests.deploy.cloud.aws.stacks import load_template
from tests.deploy.cloud.aws.test_endpoint import deploy, deployed_model
from tests.deploy.packaging.dockerfile import image
from tests.e2e.harness import ROOT

REGISTRY = f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
# It fails where DOCKER_FAILS names its first argument. A push makes the image known to ECR.
DOCKER = """#!{python}
import json, os, sys
words = sys.argv[1:]
secret = sys.stdin.read() if "--password-stdin" in words else ""
with open(os.environ["DOCKER_CALLS"], "a") as calls:
    calls.write(json.dumps([words, secret, os.environ.get("BUILDX_NO_DEFAULT_ATTESTATIONS")]) + "\\n")
if words[0] == os.environ.get("DOCKER_FAILS"):
    sys.exit(3)
if words[0] == "push":
    import boto3
    name, tag = words[1].partition("/")[2].split(":")
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    config = {{"digest": "sha256:" + 64 * "a"}}
    manifest = json.dumps({{"schemaVersion": 2, "mediaType": kind, "config": config, "layers": []}})
    ecr = boto3.client("ecr")
    try:
        ecr.put_image(repositoryName=name, imageTag=tag, imageManifest=manifest)
    except ecr.exceptions.ImageAlreadyExistsException:
        pass
"""


@pytest.fixture(autouse=True)
def calls(deployer: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the stand-in for docker, the only program found, records its calls."""
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(python=sys.executable))
    program.chmod(0o755)
    found = tmp_path / "calls"
    monkeypatch.setenv("DOCKER_CALLS", str(found))
    monkeypatch.setenv("PATH", str(program.parent))
    return found


def recorded(calls: Path) -> list[list[Any]]:
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_image_is_built_pushed_and_pinned_by_its_digest(cloud: Cloud, calls: Path) -> None:
    deploy()
    (build, _, attestations), (login, password, _), (push, _, _), (logout, _, _) = recorded(calls)
    assert attestations == "1"
    assert build[:5] == ["build", "--platform", "linux/amd64", "--file", "deploy/packaging/Dockerfile"]
    assert build[build.index("--target") + 1] == "sagemaker"
    assert f"TORCH_INDEX={images.CPU_INDEX}" in build
    assert login == ["login", "--username", "AWS", "--password-stdin", REGISTRY]
    assert password
    assert password not in " ".join(build + login + push)
    assert push == ["push", f"{REGISTRY}/tercet:0.1.0-cpu"]
    assert logout == ["logout", REGISTRY]
    assert deployed_model(cloud)["PrimaryContainer"]["Image"].startswith(f"{REGISTRY}/tercet@sha256:")
    assert cloud.operations("ecr") == ["GetAuthorizationToken", "DescribeImages"]
    deploy()  # to the same repository
    assert [words[0] for words, _, _ in recorded(calls)] == ["build", "login", "push", "logout"] * 2
    assert cloud.count("CreateStack") == 1
    # moto does not know that a stack empties its repository.
    assert load_template("sagemaker.yaml")["Resources"]["Repository"]["Properties"]["EmptyOnDelete"] is True
    cloud.client("ecr").batch_delete_image(repositoryName="tercet", imageIds=[{"imageTag": "0.1.0-cpu"}])
    deploy(destroy=True)
    assert cloud.client("ecr").describe_repositories()["repositories"] == []


@pytest.mark.parametrize("step", ["build", "login", "push"])
def test_a_failing_program_leaves_no_repository(
    step: str, cloud: Cloud, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_FAILS", step)
    with pytest.raises(StartError, match=f"docker {step} failed with exit code 3; its output is above"):
        deploy()
    assert cloud.client("ecr").describe_repositories()["repositories"] == []
    assert cloud.client("sagemaker").list_models()["Models"] == []
    if step == "push":
        assert recorded(calls)[-1][0][0] == "logout"


def test_without_a_program_the_command_says_which_to_install(monkeypatch: pytest.MonkeyPatch, cloud: Cloud) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(StartError, match="install one of docker, podman, buildah; or name an image with --image"):
        deploy()
    assert cloud.operations() == []


@pytest.mark.parametrize("program", ["podman", "buildah"])
def test_other_programs_are_given_the_ignore_file_and_dockers_format(program: str) -> None:
    words = images.build_command(program, "tercet:1", images.GPU_INDEX)
    assert words[words.index("--ignorefile") + 1] == "deploy/packaging/Dockerfile.dockerignore"
    assert words[words.index("--format") + 1] == "docker"
    assert (ROOT / "deploy/packaging/Dockerfile.dockerignore").exists()


def test_the_image_that_sagemaker_starts_serves_as_its_container() -> None:
    """SageMaker runs `docker run IMAGE serve`, which is also what the server's image runs by default."""
    sagemaker, server = image(images.SAGEMAKER), image()
    assert (sagemaker.entrypoint, server.entrypoint, server.command) == (["tercet"], ["tercet"], ["serve"])
    assert (sagemaker.user, server.user) == ("root", "10001")
    environ = sagemaker.environ | {"HF_MODEL_ID": "openai-community/gpt2"}
    assert Settings.load(environ).server.sagemaker
    settings = Settings.load(environ | sagemaker_environment(environ))
    assert (settings.server.bind, settings.access.keys) == (Address("0.0.0.0", 8080), None)
    assert settings.job_store == "none"
    assert not Settings.load(server.environ).server.sagemaker
    # docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html: "nvidia-docker compatible".
    assert sagemaker.environ["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert sagemaker.environ["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
