"""The container image: built from this checkout and pushed to the account's registry (ECR).

Whichever of docker, podman and buildah is installed does both. Knows no SageMaker.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from deploy.cloud.aws.calls import Account
from shared.errors import StartError
from shared.gpu_builds import INDEX

ROOT = Path(__file__).parents[3]
DOCKERFILE = Path("deploy/packaging/Dockerfile")
PROGRAMS = ("docker", "podman", "buildah")
# Package indexes of torch: for CPUs, and the CUDA build that the drivers of SageMaker's hosts run.
CPU_INDEX = f"{INDEX}/cpu"
GPU_INDEX = f"{INDEX}/cu126"
# Stage of the Dockerfile that SageMaker runs.
SAGEMAKER = "sagemaker"


def find_program() -> str:
    """
    Raises:
        StartError: none is installed, or this is not a checkout.
    """
    if not (ROOT / "requirements").exists():  # a wheel has the Dockerfile, too
        raise StartError("An image is built from a checkout of Tercet: run this there, or name an image with --image.")
    for program in PROGRAMS:
        if shutil.which(program):
            return program
    raise StartError(f"To build the image, install one of {', '.join(PROGRAMS)}; or name an image with --image.")


def build_command(program: str, uri: str, torch_index: str, target: str | None = None) -> list[str]:
    """Return the command that builds a stage of the Dockerfile, or its last.

    SageMaker runs images for x86-64 whose manifest is Docker's, not an index of several.
    """
    ignored = ["--ignorefile", f"{DOCKERFILE}.dockerignore", "--format", "docker"] if program != "docker" else []
    return [
        program,
        "build",
        "--platform",
        "linux/amd64",
        "--file",
        str(DOCKERFILE),
        *ignored,
        *(("--target", target) if target else ()),
        "--build-arg",
        f"TORCH_INDEX={torch_index}",
        "--tag",
        uri,
        ".",
    ]


def push(account: Account, program: str, uri: str) -> str:
    """Push a built image with the registry's own password, which is not kept.

    Returns:
        The image's URI by digest, so that an endpoint runs this image whatever its tag points to later.

    Raises:
        StartError: AWS or the program refuses.
    """
    [token] = account.call("ecr", "get_authorization_token")["authorizationData"]
    user, _, password = base64.b64decode(token["authorizationToken"]).decode().partition(":")
    repository_uri, _, tag = uri.rpartition(":")
    registry, _, repository = repository_uri.partition("/")
    run([program, "login", "--username", user, "--password-stdin", registry], password)
    try:
        run([program, "push", uri])
    finally:
        run([program, "logout", registry])
    [details] = account.call("ecr", "describe_images", repositoryName=repository, imageIds=[{"imageTag": tag}])[
        "imageDetails"
    ]
    return f"{repository_uri}@{details['imageDigest']}"


def run(command: Sequence[str], secret: str | None = None) -> None:
    """Run a program in the checkout; its output is shown.

    Args:
        secret: its standard input.

    Raises:
        StartError: it failed.
    """
    # With attestations, docker would push an index of manifests.
    environ = {**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, input=secret, text=True, check=False)
    if done.returncode:
        raise StartError(f"{' '.join(command[:2])} failed with exit code {done.returncode}; its output is above.")
