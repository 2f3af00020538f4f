"""`tercet tune`: finds the plan for a model and a load by serving candidate plans.

Tables and reasons go to standard error, the environment lines to standard output: `tercet tune >tercet.env`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from deploy.terminal import labelled, make_console
from deploy.tuning.gpus import has_mps
from deploy.tuning.load.run import Document, measured_run
from deploy.tuning.load.server import ROOT
from deploy.tuning.load.workload import W, Workload
from deploy.tuning.planning import find_devices, resolve_models, revision_of
from deploy.tuning.tune.report import comments, encode_result, environment, notes, print_result, unmet
from deploy.tuning.tune.search import Goal, Space
from deploy.tuning.tune.state import State, code_digest, run_key
from deploy.tuning.tune.trial import Trial, find_plan
from shared.cpu_features import num_cores
from shared.errors import StartError
from shared.free_memory import free_bytes
from shared.setting_values import ModelSpec
from shared.settings import PREFIX, Settings
from shared.worker_environment import cache_directory
from workers.checkpoints.resolve import Checkpoint

CLIENTS = (1, 2, 4, 8)
MAX_CLIENTS = 256
SECONDS, QUICK_SECONDS = 4.0, 0.4
# Settings that are tuned, or that concern who may reach a server; candidates take all others from the environment.
NOT_PASSED = frozenset(
    {
        *("bind", "cpu_threads", "devices", "insecure", "jobs", "keys", "max_batch", "models", "placement", "run_dir"),
        *("sagemaker", "tls_cert", "tls_key"),
    }
)
NO_MPS = (
    "No MPS: without NVIDIA's Multi-Process Service the workers of a GPU take turns. Start it "
    "(nvidia-cuda-mps-control -d) and run the same command: plans with MPS are measured apart."
)

err = make_console(stderr=True)


def tune(
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round of everything, as a functional check.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model to serve, as in TERCET_MODELS, without a count; default: the server's.")
    ] = None,
    qps: Annotated[float | None, typer.Option(min=0.01, help="Load to tune for, in requests per second.")] = None,
    slo_ms: Annotated[
        float | None,
        typer.Option(min=1, help="Average latency to hold: finds the cheapest plan that does, at --qps if it is set."),
    ] = None,
    clients: Annotated[
        str, typer.Option(help="Numbers of concurrent closed-loop clients, separated by commas.")
    ] = ",".join(map(str, CLIENTS)),
    samples: Annotated[int, typer.Option(min=1, max=8, help="Completions per request.")] = W.num_samples,
    length: Annotated[int, typer.Option(min=1, max=512, help="New tokens per completion.")] = W.num_new_tokens,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=900, help="Tokens of a prompt.")] = W.num_prompt_tokens,
    max_workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Most workers per device; default: the device's own bound.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a closed loop; of --qps, twice that.")] = SECONDS,
    budget: Annotated[float, typer.Option(min=0.1, help="Minutes that the search may take.")] = 15.0,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what an earlier run has measured.")] = False,
    state: Annotated[
        Path | None, typer.Option(help="File for the results; default: tune.json in TERCET_CACHE_DIR.", dir_okay=False)
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the result to this file.", dir_okay=False)
    ] = None,
) -> None:
    """Find workers per device, threads, placement and batch for a model and a load, by serving each candidate plan.

    Measures load time, memory, latency and throughput of real servers, under closed loops and, with --qps, Poisson
    arrivals at that rate; prints the recommended settings as environment lines. Ctrl-C ends it, and the same command
    continues. Run it while nothing else uses the machine.
    """
    if json_path is not None and not json_path.parent.is_dir():
        raise StartError(f"--json {json_path}: {json_path.parent} is not a directory.")
    settings = Settings.load(os.environ)
    spec, subject, revision = _model(model, settings)
    devices = find_devices(settings, os.environ)
    uses_gpu = devices != ("cpu",) and settings.pool.compute != "cpu"
    workload = Workload(num_prompt_tokens=prompt_tokens, num_samples=samples, num_new_tokens=length)
    if prompt_tokens + length > subject.n_ctx:
        raise typer.BadParameter(
            f"with --length {length} at most {subject.n_ctx - length}, the model's context",
            param_hint="--prompt-tokens",
        )
    passed = {name: value for name, value in _passed(os.environ).items() if name not in NOT_PASSED}
    trial = Trial(
        spec,
        subject,
        uses_gpu,
        workload,
        {**passed, "jobs": "none"},
        parse_clients(clients),
        qps,
        QUICK_SECONDS if quick else seconds,
    )
    goal = Goal(slo_ms, qps)
    space = Space(
        devices=devices,
        cores=0 if uses_gpu else num_cores(),
        memory_bytes=None if uses_gpu else free_bytes(),
        max_clients=max(trial.clients),
        num_samples=samples,
        max_workers=max_workers,
    )
    path = state or (cache_directory(settings) or Path.cwd()) / "tune.json"
    document = Document(
        bench="tune",
        is_quick=quick,
        model=str(spec),
        device=devices[0].partition(":")[0],
        settings={"devices": ",".join(devices)},
        workload=msgspec.to_builtins(workload),
    )
    with measured_run(document, err):
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # as Ctrl-C: servers are stopped
        key = run_key(_identity(document, trial, revision, devices))
        with closing(State(path, key, is_new=again)) as kept:
            if kept.outcomes:
                err.print(f"Plans measured before: {len(kept.outcomes)} ({path}); --again measures them anew.")
            try:
                result = find_plan(trial, space, goal, kept, 60 * budget, err)
            except KeyboardInterrupt:
                num_plans = len(kept.outcomes)
                err.print(f"Interrupted. The same command continues. Plans measured so far: {num_plans} ({path}).")
                raise typer.Exit(130) from None
        document.notes += notes(result.plans)
    lines = environment(trial, result)
    print_result(err, result, document)
    if uses_gpu and not has_mps(os.environ) and any(candidate.workers > 1 for candidate in result.plans):
        err.print(NO_MPS)
    if json_path is not None:
        json_path.write_bytes(encode_result(result, document, goal, lines))
    if result.chosen is None:
        raise StartError(unmet(goal, result.plans))
    err.print(labelled("Recommended:", "bold green", f"{result.chosen.candidate}: {result.chosen.reason}."))
    sys.stdout.write("\n".join([*comments(result, document), *lines]) + "\n")


def _passed(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of this environment, as text, by lower-case name."""
    variables = {row.variable for _, rows in Settings.reference() for row in rows}
    return {name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if name in variables}


def _model(text: str | None, settings: Settings) -> tuple[ModelSpec, Checkpoint, str]:
    """The model to serve, and the digest of its weights.

    Raises:
        typer.BadParameter: the option or the settings name another number of models than one.
        StartError: the model is not on this machine and cannot be fetched.
    """
    if text is not None:
        try:
            named = Settings.load({"TERCET_MODELS": text}).model.models
        except StartError as error:
            raise typer.BadParameter(str(error).replace("TERCET_MODELS=", ""), param_hint="--model") from error
        settings = replace(settings, model=replace(settings.model, models=named))
    specs = settings.model.models
    if len(specs) > 1:
        raise typer.BadParameter(
            f"name one model; plans with several are not searched ({', '.join(spec.name for spec in specs)})",
            param_hint="--model",
        )
    [(checkpoint, _)] = resolve_models(settings)
    spec = specs[0] if specs else ModelSpec(checkpoint.name)
    return ModelSpec(spec.name, spec.source), checkpoint, revision_of(checkpoint)


def _identity(document: Document, trial: Trial, revision: str, devices: tuple[str, ...]) -> dict[str, Any]:
    """What the figures depend on; a run continues only with equal values."""
    return {
        "machine": document.machine,
        "versions": document.versions,
        "code": code_digest(ROOT),
        "trial": trial,
        "revision": revision,
        "devices": devices,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "mps": has_mps(os.environ),
    }


def parse_clients(text: str) -> list[int]:
    """The value of --clients, ascending."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1 or numbers[-1] > MAX_CLIENTS:
        raise typer.BadParameter(
            f"must be numbers from 1 to {MAX_CLIENTS}, separated by commas, like 1,2,4,8", param_hint="--clients"
        )
    return numbers
