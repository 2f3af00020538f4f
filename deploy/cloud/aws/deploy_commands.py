"""`tercet deploy`: commands that put Tercet into an AWS account."""

from __future__ import annotations

import re
import shlex
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deploy.cloud.aws import images
from deploy.cloud.aws.calls import Account
from deploy.cloud.aws.endpoint import POLL_S, TEMPLATE, WAIT_S, Endpoint
from deploy.terminal import make_console
from shared.errors import StartError
from shared.version import tercet_version

deploy_commands = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Deploy Tercet to AWS. Guide: docs/AWS.md."
)
CPU_INSTANCE = "ml.c6i.xlarge"
# Driver 550, CUDA 12.4; without it, older families get driver 470, which no supported build of torch runs on.
GPU_AMI = "al2-ami-sagemaker-inference-gpu-3-1"
_NAME = re.compile(r"[a-z0-9](-?[a-z0-9]){1,39}")
# Families of instances with NVIDIA GPUs.
_GPU_FAMILY = re.compile(r"ml\.[gp]\d")

out = make_console()
err = make_console(stderr=True)


@deploy_commands.callback()
def group() -> None:
    """Keeps the commands' names even if there is only one."""


@deploy_commands.command()
def sagemaker(
    name: Annotated[
        str, typer.Option(help="Of the endpoint and, with a suffix, of all that belongs to it.")
    ] = "tercet",
    instance_type: Annotated[
        str, typer.Option(help="Its first letter after ml. decides on the build of torch: g and p are GPUs.")
    ] = CPU_INSTANCE,
    instances: Annotated[int, typer.Option(help="Number of instances, or the least with --max-instances.", min=1)] = 1,
    max_instances: Annotated[
        int | None, typer.Option(help="Let Application Auto Scaling add instances up to this number.", min=1)
    ] = None,
    invocations_per_minute: Annotated[
        int, typer.Option(help="Of each instance: what autoscaling aims at.", min=1)
    ] = 600,
    region: Annotated[str | None, typer.Option(help="Default: the profile's, or AWS_DEFAULT_REGION.")] = None,
    profile: Annotated[str | None, typer.Option(help="A section of ~/.aws/config.")] = None,
    image: Annotated[
        str | None, typer.Option(help="URI of an image in ECR; default: built from this checkout and pushed.")
    ] = None,
    model_data: Annotated[str | None, typer.Option(help="s3://…/model.tar.gz with a checkpoint of GPT-2.")] = None,
    model_id: Annotated[
        str | None, typer.Option(help="A repository of the hub, like openai-community/gpt2, fetched by the container.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="ARN of an execution role; default: a minimal one is made.")] = None,
    ami: Annotated[str | None, typer.Option(help=f"InferenceAmiVersion; default with a GPU: {GPU_AMI}.")] = None,
    wait_s: Annotated[float, typer.Option(help="Longest wait for the endpoint.", min=1)] = WAIT_S,
    keep: Annotated[bool, typer.Option("--keep", help="After a failure, keep what was created.")] = False,
    destroy: Annotated[
        bool, typer.Option("--destroy", help="Remove the endpoint and all that was made with it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the template and its parameters, and call nothing.")
    ] = False,
) -> None:
    """Serve Tercet on a SageMaker endpoint, wait until it serves, and ask it once.

    Repeat the command to update the endpoint, or to go on after an interruption. Instances cost money until --destroy.
    """
    _check_options(name, instances, max_instances, model_data, model_id, role)
    has_gpu = _GPU_FAMILY.match(instance_type) is not None
    tag = f"{tercet_version()}-{'cuda' if has_gpu else 'cpu'}"
    torch_index = images.GPU_INDEX if has_gpu else images.CPU_INDEX
    parameters = {
        "Name": name,
        "InstanceType": instance_type,
        "Instances": str(instances),
        "MaxInstances": str(max_instances if max_instances and max_instances > instances else 0),
        "InvocationsPerMinute": str(invocations_per_minute),
        "ModelData": model_data or "",
        "ModelId": model_id or "",
        "RoleArn": role or "",
        "Ami": ami or (GPU_AMI if has_gpu else ""),
    }
    if dry_run and destroy:
        raise StartError("--dry-run shows what creation does; --destroy removes only what creation has made.")
    if dry_run:
        uri = image or f"ACCOUNT.dkr.ecr.{region or 'REGION'}.amazonaws.com/{name}:{tag}"
        _print_stack(parameters | _image_parameters(uri), None if image else torch_index)
        return
    program = None if image or destroy else images.find_program()
    account = Account(region, profile)
    # The credentials are checked before anything is built.
    account.call("sts", "get_caller_identity")
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    ) as progress:
        task = progress.add_task(f"Endpoint {name}", total=None)

        def report(line: str) -> None:
            progress.console.print(line, highlight=False, soft_wrap=True)
            progress.update(task, description=line.rstrip("."))

        endpoint = Endpoint(account, name, report, poll_s=POLL_S, wait_s=wait_s)
        endpoint.check_ownership()
        if destroy:
            endpoint.destroy()
            report(f"Nothing of {name} is left in {account.region}.")
            return
        with endpoint.undone_on_failure(keep):
            if program is not None:
                uri = f"{endpoint.ensure(Name=name, HasRepository='true')['RepositoryUri']}:{tag}"
                progress.stop()  # the program shows its own progress
                images.run(images.build_command(program, uri, torch_index, images.SAGEMAKER))
                image = images.push(account, program, uri)
                progress.start()
            assert image is not None
            endpoint.ensure(**parameters, **_image_parameters(image))
            sentences = endpoint.invoke()
    for sentence in sentences:
        out.print(sentence, highlight=False, soft_wrap=True)
    err.print(
        f"Endpoint {name} serves in {account.region}. {instances} × {instance_type} cost money until: "
        f"{endpoint.destroy_command}",
        highlight=False,
        soft_wrap=True,
    )


def _check_options(
    name: str,
    instances: int,
    max_instances: int | None,
    model_data: str | None,
    model_id: str | None,
    role: str | None,
) -> None:
    """
    Raises:
        StartError: options that contradict each other, or that AWS would refuse after minutes.
    """
    if not _NAME.fullmatch(name):
        raise StartError(
            f"--name {name!r} must be 2 to 40 lower-case letters, digits and single hyphens, and begin and end with a "
            "letter or digit."
        )
    if model_data is not None and model_id is not None:
        raise StartError("--model-data and --model-id name two models: give one of them.")
    if model_data is not None and not (model_data.startswith("s3://") and model_data.endswith(".tar.gz")):
        raise StartError(f"--model-data {model_data!r} must be the URI of an archive in S3: s3://bucket/model.tar.gz.")
    if role is not None and not role.startswith("arn:"):
        raise StartError(f"--role {role!r} must be an ARN: arn:aws:iam::ACCOUNT:role/NAME.")
    if max_instances is not None and max_instances < instances:
        raise StartError(f"--max-instances {max_instances} must be at least --instances ({instances}).")


def _image_parameters(uri: str) -> dict[str, str]:
    """An image in ECR, or in another registry that SageMaker may read."""
    match = re.match(r"(\d{12})\.dkr\.ecr\.([\w-]+)\.amazonaws\.com(?:\.cn)?/([^:@]+)", uri)
    repository = f"arn:aws:ecr:{match[2]}:{match[1]}:repository/{match[3]}" if match else "*"
    return {"Image": uri, "ImageRepositoryArn": repository}


def _print_stack(parameters: dict[str, str], torch_index: str | None) -> None:
    """The template, below the commands that would do the same.

    Args:
        torch_index: for the image, which is built and pushed; None: it exists.
    """
    uri, given = parameters["Image"], [f"{name}={value}" for name, value in parameters.items() if value]
    stack = ["aws", "cloudformation", "deploy", "--stack-name", f"{parameters['Name']}-sagemaker", "--template-file"]
    stack += [TEMPLATE.name, "--capabilities", "CAPABILITY_NAMED_IAM", "--parameter-overrides"]
    commands = [[*stack, *given]]
    if torch_index is not None:
        build = images.build_command("docker", uri, torch_index, images.SAGEMAKER)
        repository = [*stack, f"Name={parameters['Name']}", "HasRepository=true"]
        commands = [repository, build, ["docker", "push", uri], [*stack, "HasRepository=true", *given]]
    for command in commands:
        out.print(f"# {shlex.join(command)}", highlight=False, soft_wrap=True)
    out.print(TEMPLATE.read_text(encoding="utf-8"), highlight=False, markup=False, soft_wrap=True, end="")
