"""The command line: `tercet --help` lists its commands."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import msgspec
import typer
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from deploy.gateway_client import local_client, remote_client, server_url
from deploy.gpu_memory import memory_tables
from deploy.planning import make_plan
from deploy.rolling_reload import reload_slots
from deploy.sagemaker import sagemaker_environment
from deploy.stored_kernels import stored_kernels
from deploy.supervisor import ROLES, Supervisor
from deploy.terminal import labelled, make_console
from shared.api_keys import new_key, read_keys, revoke_key
from shared.errors import StartError
from shared.plan import read_current_plan, write_plan
from shared.settings import Settings
from shared.telemetry import configure_logging
from shared.tracing import require_opentelemetry

cli = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Self-hosted autocompletion: three completions for every pause."
)
key_commands = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys (the file TERCET_KEYS).")
cli.add_typer(key_commands, name="key")
if sys.argv[1:2] != ["serve"]:  # the supervisor runs as long as the server: it keeps no benchmarks in memory
    from deploy.aws.command import deploy_commands
    from deploy.calibrate.command import calibrate
    from deploy.doctor import doctor
    from deploy.tune.command import tune

    cli.add_typer(deploy_commands, name="deploy")
    cli.command("tune")(tune)
    cli.command("calibrate")(calibrate)
    cli.command("doctor")(doctor)
NUM_LIKELIEST = 5
# A web font would make each viewer's browser contact the host of the font.
SVG_WITHOUT_WEB_FONTS = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
out = make_console()
err = make_console(stderr=True)


def main() -> None:
    """Run the command line. A `StartError` is printed as one sentence, with exit code 1."""
    try:
        cli()
    except StartError as error:
        err.print(labelled("tercet:", "red", str(error)), soft_wrap=True)
        sys.exit(1)


@cli.command()
def serve(
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Permit an address beyond loopback without API keys.")
    ] = False,
    sagemaker: Annotated[
        bool, typer.Option("--sagemaker", help="Serve /ping and /invocations as a SageMaker container does.")
    ] = False,
    role: Annotated[
        Literal["workers", "gateway"] | None,
        typer.Option(help="Start only this pool; the other is on another machine (docs/DISTRIBUTED.md)."),
    ] = None,
    idle_status: Annotated[
        int, typer.Option(min=0, max=125, help="Exit code of a stop by TERCET_IDLE_STOP_S, for a service manager.")
    ] = 0,
    model_path: Annotated[
        Path | None, typer.Argument(help="With --sagemaker: directory of the model; default /opt/ml/model.")
    ] = None,
) -> None:
    """Start the pools, report when every slot is warm, and serve until Ctrl-C."""
    if insecure:
        os.environ["TERCET_INSECURE"] = "1"  # the pools inherit it
    if sagemaker or Settings.load(os.environ).sagemaker:
        os.environ.update(sagemaker_environment(os.environ, model_path))
    elif model_path is not None:
        raise StartError("A model's directory belongs to --sagemaker; else set TERCET_MODELS=name=/path.")
    settings = Settings.load(os.environ)
    if settings.traces:
        require_opentelemetry()
    configure_logging("serve", settings.log)
    if role is not None and settings.sagemaker:
        raise StartError("A SageMaker container runs both pools: omit --role.")
    roles = ROLES if role is None else (role,)
    code = Supervisor(settings, os.environ, out, roles, idle_status=idle_status).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # all is cleaned up, and the interpreter's own shutdown takes a part of a second


@cli.command()
def plan(
    write: Annotated[bool, typer.Option(help="Make a new plan and write it to the run directory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show which worker holds which model on which device, and how they divide the memory of GPUs."""
    settings = Settings.load(os.environ)
    found = None if write else read_current_plan(settings, os.environ)
    if found is None:
        found = make_plan(settings, os.environ, lambda name, share: err.print(f"Fetching {name} … {share:.0%}"))
    if write:
        write_plan(found, settings.run_path)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
        return
    table = Table("slot", "device", "model", "checkpoint", "batch", "socket")
    for slot in found.slots:
        directory = found.model(slot.model).directory
        table.add_row(str(slot.index), slot.device, slot.model, directory, str(slot.max_batch), slot.socket)
    out.print(table)
    for slots, kernels in stored_kernels(found, settings, os.environ):
        out.print(f"Kernels of slot {', '.join(map(str, slots))}: {kernels}.", highlight=False, soft_wrap=True)
    for part in memory_tables(found):
        out.print(part, highlight=False)
    for slot in found.slots:
        if slot.cache_bytes is not None:
            size = f"{slot.cache_bytes / 1e6:,.0f} MB"
            out.print(f"Slot {slot.index}: a KV cache of up to {size}, taken as it is used.", highlight=False)
    for model in found.models:
        if model.warning:
            out.print(labelled("Note:", "yellow", model.warning))


@cli.command("settings")
def show_settings(
    markdown: Annotated[bool, typer.Option(help="Print the table of docs/SETTINGS.md.")] = False,
) -> None:
    """List every setting: its default, unit and reason."""
    rows = Settings.table()
    if markdown:
        lines = ["| setting | default | unit | why |", "|---|---|---|---|"]
        lines += [f"| `{name}` | `{default}` | {unit} | {why} |" for name, default, unit, why in rows]
        sys.stdout.write("\n".join(lines) + "\n")
        return
    # No table: on a narrow terminal its columns would cut the names.
    for name, default, unit, why in rows:
        facts = ", ".join(filter(None, (unit, f"default {default}")))
        out.print(Text.assemble((name, "bold"), f" ({facts})"), soft_wrap=True)
        out.print(Padding(Text(why), (0, 0, 0, 4)))
        if name in os.environ:
            out.print(Text.assemble("    now ", (os.environ[name], "bold")), soft_wrap=True)
    Settings.load(os.environ)


@key_commands.command("new")
def make_key(
    name: Annotated[str, typer.Argument(help="Says who or what uses the key.")],
    rate: Annotated[int | None, typer.Option(help="Requests per minute; 0: no limit.", min=0, max=1_000_000)] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at the same time; 0: no limit.", min=0, max=4096)
    ] = None,
) -> None:
    """Make a key and print it. It is shown only now: the file keeps a digest."""
    key, record = new_key(_key_path(), name, rate, concurrency)
    sys.stdout.write(f"{key}\n")
    err.print(
        f"Key {record.id} ({name}) is valid from now on. This is the only time that it is shown.", highlight=False
    )


@key_commands.command("list")
def list_keys() -> None:
    """List the keys: ids, names and limits."""
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True, min_width=12)  # `revoke` takes it, so it is never cut
    for heading in ("name", "created", "requests/minute", "at the same time", "revoked"):
        table.add_column(heading, overflow="fold")
    for key in read_keys(_key_path()):
        limits = ("default" if limit is None else str(limit or "no limit") for limit in (key.rate, key.concurrency))
        revoked = f"{key.revoked:%Y-%m-%d %H:%M}" if key.revoked else ""
        table.add_row(key.id, Text(key.name), f"{key.created:%Y-%m-%d %H:%M}", *limits, revoked)
    out.print(table)


@key_commands.command("revoke")
def refuse_key(key_id: Annotated[str, typer.Argument(metavar="ID", help="As `tercet key list` shows it.")]) -> None:
    """Revoke a key. A running server refuses it within a second."""
    key = revoke_key(_key_path(), key_id)
    err.print(f"Key {key.id} is revoked.", highlight=False)


def _key_path() -> Path:
    path = Settings.load(os.environ).keys
    if path is None:
        raise StartError("Set TERCET_KEYS to the path of the key file, for example ~/.config/tercet/keys.")
    return path


@cli.command()
def reload(
    model: Annotated[str | None, typer.Option(help="Replace only the workers of this model.")] = None,
) -> None:
    """Replace the workers slot by slot, with the checkpoints as they are now. Stops at the first failure.

    SIGHUP to `tercet serve` replaces all workers, with the same checkpoints; each serves until its successor is warm.
    On a GPU whose memory does not hold a successor it is refused.
    """
    settings = Settings.load(os.environ)
    reload_slots(
        settings, os.environ, model,
        lambda slot: out.print(f"Reloading slot {slot.index} ({slot.model} on {slot.device}) …", highlight=False),
    )  # fmt: skip
    out.print("Reloaded.")


def _post(client: httpx.Client, path: str, body: object) -> dict[str, Any]:
    """The gateway's response to a request.

    Raises:
        StartError: no server answers, it is not Tercet, or it refuses the request.
    """
    url = str(client.base_url).rstrip("/")
    try:
        response = client.post(path, json=body)
    except httpx.TransportError as error:
        raise StartError(
            f"No server answers at {url} ({error}): start it with `tercet serve`, or name another with --url."
        ) from error
    try:
        answer = msgspec.json.decode(response.content, type=dict[str, Any])
        detail = None if response.is_success and "sentences" in answer else answer["detail"]
    except (msgspec.DecodeError, KeyError) as error:
        raise StartError(f"The server at {url} is not Tercet (its status: {response.status_code}).") from error
    if response.status_code == 401:
        raise StartError(f"{detail} Here, set TERCET_API_KEY.")
    if detail is not None:
        raise StartError(detail)
    return answer


@cli.command()
def complete(
    text: Annotated[str, typer.Argument(help="The text to complete.")],
    samples: Annotated[int, typer.Option("-n", "--samples", help="Number of sentences, 1 to 8.")] = 3,
    length: Annotated[int, typer.Option(help="Maximum tokens per sentence.")] = 20,
    temperature: Annotated[float, typer.Option(help="0 to 5; 0 is greedy.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of a served model.")] = None,
    url: Annotated[
        str | None,
        typer.Option(
            callback=server_url, help="The server, like https://tercet.example; default: at TERCET_BIND's address."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the response as JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the most likely tokens at each step.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Also save the output as an SVG image.")] = None,
) -> None:
    """Complete a text with a running server."""
    settings = Settings.load(os.environ)
    body: dict[str, Any] = {"context": text, "n_samples": samples, "length": length, "temperature": temperature}
    if explain:
        body["explain"] = NUM_LIKELIEST
    body |= {name: value for name, value in (("seed", seed), ("model_size", model)) if value is not None}
    with (
        local_client(settings, os.environ, settings.timeout_s + 5)
        if url is None
        else remote_client(url, os.environ, settings.timeout_s + 5)
    ) as client:
        answer = _post(client, "/autocomplete", body)
    if as_json:
        out.print_json(json.dumps(answer))
        return
    page = make_console(record=svg is not None, width=100 if svg else None)
    for sentence in answer["sentences"]:
        page.print(Text.assemble((text, "dim"), (sentence["value"], "bold"), end="\n\n"))
        if explain:
            page.print(_explanation(sentence), end="\n\n")
    if not answer["sentences"]:
        page.print(f"No completion was worth showing: {answer['errors'][0]['detail']}", highlight=False)
    replay = f"--seed {answer['seed']} reproduces it"
    page.print(Text(f"{answer['model']}, {answer['time'] * 1e3:.0f} ms, {replay}", "dim"))
    if svg:
        page.save_svg(str(svg), title=f'tercet complete "{text}"', code_format=SVG_WITHOUT_WEB_FONTS)


def _explanation(sentence: dict[str, Any]) -> Table:
    """The sampled tokens, their probabilities, and the most likely tokens of each step."""
    table = Table(
        "token", "probability", "most likely", title=f"seed {sentence['seed']}, score {sentence['score']:.3f}"
    )
    for token in sentence["explanation"]:
        likeliest = "  ".join(f"{text!r} {math.exp(logprob):.0%}" for text, logprob in token["likeliest"])
        table.add_row(Text(repr(token["text"])), f"{math.exp(token['logprob']):.1%}", Text(likeliest))
    return table
