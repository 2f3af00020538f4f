"""`tercet deploy`: commands that put Tercet into an AWS account."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from deploy.cloud.aws import images
from deploy.cloud.aws.calls import Account
from deploy.cloud.aws.endpoint import POLL_S, WAIT_S, Endpoint
from deploy.cloud.aws.requests import Wanted, check_name, has_gpu, repository
from deploy.terminal import make_console
from shared.errors import StartError
from shared.version import tercet_version

deploy_commands = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Deploy Tercet to AWS. Guide: docs/AWS.md."
)
CPU_INSTANCE = "ml.c6i.xlarge"
# Driver 550, CUDA 12.4; without it, older families get driver 470, which no supported build of torch runs on.
GPU_AMI = "al2-ami-sagemaker-inference-gpu-3-1"
UNKNOWN_ACCOUNT = "ACCOUNT"

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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the calls, and make none.")] = False,
) -> None:
    """Serve Tercet on a SageMaker endpoint, wait until it serves, and ask it once.

    Repeat the command to update the endpoint, or to go on after an interruption. Instances cost money until --destroy.
    """
    check_name(name)
    _check_options(instances, max_instances, model_data, model_id, role)
    tag = f"{tercet_version()}-{'cuda' if has_gpu(instance_type) else 'cpu'}"
    place = region or "REGION"
    wanted = Wanted(
        name=name,
        region=place,
        account_id=UNKNOWN_ACCOUNT,
        image=image or f"{UNKNOWN_ACCOUNT}.dkr.ecr.{place}.amazonaws.com/{name}:{tag}",
        instance_type=instance_type,
        num_instances=instances,
        model_data=model_data,
        model_id=model_id,
        role_arn=role,
        max_instances=max_instances or 0,
        invocations_per_minute=invocations_per_minute,
        ami=ami or (GPU_AMI if has_gpu(instance_type) else None),
    )
    if dry_run and destroy:
        raise StartError("--dry-run shows what creation does; --destroy removes only what creation has made.")
    if dry_run:
        _print_calls(wanted, is_built=image is None)
        return
    program = None if image or destroy else images.find_program()
    account = Account(region, profile)
    # The credentials are checked before anything is built.
    account_id = account.call("sts", "get_caller_identity")["Account"]
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
        if destroy:
            endpoint.destroy()
            report(f"Nothing of {name} is left in {account.region}.")
            return
        endpoint.check_name_is_free()
        with endpoint.undone_on_failure(keep):
            if program is not None:
                uri = f"{endpoint.ensure_repository()}:{tag}"
                progress.stop()  # the program shows its own progress
                images.run(images.build_command(program, uri, _torch_index(instance_type), images.SAGEMAKER))
                image = images.push(account, program, uri)
                progress.start()
            assert image is not None
            wanted = replace(wanted, account_id=account_id, region=account.region, image=image)
            endpoint.ensure(wanted)
            sentences = endpoint.invoke()
        endpoint.remove_outdated(wanted)
    for sentence in sentences:
        out.print(sentence, highlight=False, soft_wrap=True)
    err.print(
        f"Endpoint {name} serves in {account.region}. {instances} × {instance_type} cost money until: "
        f"{endpoint.destroy_command}",
        highlight=False,
        soft_wrap=True,
    )


def _torch_index(instance_type: str) -> str:
    return images.GPU_INDEX if has_gpu(instance_type) else images.CPU_INDEX


def _check_options(
    instances: int, max_instances: int | None, model_data: str | None, model_id: str | None, role: str | None
) -> None:
    """
    Raises:
        StartError: options that contradict each other, or that AWS would refuse after minutes.
    """
    if model_data is not None and model_id is not None:
        raise StartError("--model-data and --model-id name two models: give one of them.")
    if model_data is not None and not (model_data.startswith("s3://") and model_data.endswith(".tar.gz")):
        raise StartError(f"--model-data {model_data!r} must be the URI of an archive in S3: s3://bucket/model.tar.gz.")
    if role is not None and not role.startswith("arn:"):
        raise StartError(f"--role {role!r} must be an ARN: arn:aws:iam::ACCOUNT:role/NAME.")
    if max_instances is not None and max_instances < instances:
        raise StartError(f"--max-instances {max_instances} must be at least --instances ({instances}).")


def _print_calls(wanted: Wanted, *, is_built: bool) -> None:
    """What creation does where nothing exists, in order.

    Args:
        is_built: the image is built and pushed; else it exists.
    """
    first = []
    if is_built:
        build = images.build_command("docker", wanted.image, _torch_index(wanted.instance_type), images.SAGEMAKER)
        first = [
            _call(*repository(wanted.name)),
            " ".join(build),
            "ecr get_authorization_token {}",
            f"docker push {wanted.image}",
        ]
    invoke = _call("sagemaker-runtime", "invoke_endpoint", {"EndpointName": wanted.name})
    for line in [*first, *(_call(*request) for request in wanted.requests()), invoke]:
        out.print(line, highlight=False, soft_wrap=True)


def _call(service: str, operation: str, parameters: dict[str, object]) -> str:
    return f"{service} {operation} {json.dumps(parameters)}"
