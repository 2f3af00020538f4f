"""Brings the model to an EC2 instance at its first boot (`set_up_instance.sh`), and prints the value of TERCET_MODELS:

    python -m deploy.cloud.aws.first_model MODELS [ARCHIVE [TOKEN_PARAMETER]]

ARCHIVE is `s3://bucket/model.tar.gz` with weights of one's own, as SageMaker has them: `config.json`,
`model.safetensors` and `tokenizer.json` at its top. It is served instead of MODELS. TOKEN_PARAMETER is the name of a
parameter of Systems Manager with a token of the hub, for a private repository in MODELS; it is written nowhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from shared.errors import StartError

DIRECTORY = Path("/var/lib/tercet/model")
NAME = "model"


def first_model(
    models: str, archive: str, token_parameter: str, environ: Mapping[str, str], directory: Path = DIRECTORY
) -> str:
    """Download what TERCET_MODELS names, and return that value.

    Args:
        models: value of TERCET_MODELS, where there is no archive.
        archive: URL in S3; empty for none.
        token_parameter: empty for none.
        environ: environment of the service, without TERCET_MODELS.
        directory: where the archive is unpacked.

    Raises:
        StartError: AWS refuses, the archive holds no checkpoint, or the model cannot be served.
    """
    found = dict(environ)
    if archive:
        unpack(archive, directory)
        models = f"{NAME}={directory}"
    if token_parameter:
        found["HF_TOKEN"] = token(token_parameter)
    # `plan` downloads and checks every model. What it prints is for the log.
    command = [sys.executable, "-m", "deploy", "plan"]
    done = subprocess.run(command, env={**found, "TERCET_MODELS": models}, stdout=sys.stderr, check=False)
    if done.returncode:
        raise StartError(f"{models} cannot be served; the reason is above.")
    return models


def unpack(archive: str, directory: Path) -> None:
    """Unpack an archive in S3 while it is downloaded.

    Raises:
        StartError: AWS refuses, or it is no archive with a checkpoint at its top.
    """
    bucket, _, key = archive.removeprefix("s3://").partition("/")
    try:
        body = boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"]
        with tarfile.open(fileobj=body, mode="r|*") as content:
            content.extractall(directory, filter="data")
    except (BotoCoreError, ClientError, tarfile.TarError) as error:
        raise StartError(f"{archive} cannot be unpacked: {error}") from error
    if not (directory / "config.json").is_file():
        raise StartError(f"{archive} has no config.json at its top: pack the files, not the folder that they are in.")


def token(parameter: str) -> str:
    """
    Raises:
        StartError: AWS refuses.
    """
    try:
        answer = boto3.client("ssm").get_parameter(Name=parameter, WithDecryption=True)
    except (BotoCoreError, ClientError) as error:
        raise StartError(f"The parameter {parameter} cannot be read: {error}") from error
    return str(answer["Parameter"]["Value"])


def main(arguments: list[str], environ: Mapping[str, str]) -> None:
    models, archive, token_parameter = [*arguments, "", ""][:3]
    try:
        sys.stdout.write(f"{first_model(models, archive, token_parameter, environ)}\n")
    except StartError as error:
        sys.exit(f"tercet: {error}")


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
