"""`tercet tune`: finds the plan for a model and a load by serving candidate plans, and predicts what it will do.

Tables, plot and reasons go to standard error, the environment lines to standard output: `tercet tune >tercet.env`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from deploy.bench.harness import plot
from deploy.bench.harness.memory import available_bytes
from deploy.bench.harness.options import Options
from deploy.bench.harness.report import Document, print_reasons
from deploy.bench.harness.run import measured_run, progress
from deploy.bench.harness.server import ROOT
from deploy.bench.harness.workload import Subject, W, Workload
from deploy.planning import find_devices
from deploy.tune.check import Check, conclude, plan_rounds, run_rounds
from deploy.tune.kernels import NUM_ROUNDS, ROWS, tune_kernels
from deploy.tune.report import environment, one_line, save_plot, table, terminal_plot
from deploy.tune.results import Candidate, Measurement
from deploy.tune.search import MAX_STABLE_SHARE, Choice, Goal, Search, Space, choose, continue_search, next_final
from deploy.tune.state import State, alone, code_digest, run_key
from deploy.tune.trial import MAX_ATTEMPTS, OPEN_LOOP_FACTOR, OPEN_SHARES, QUIET_SHARE, Trial
from shared.errors import StartError
from shared.settings import ModelSpec, Settings
from shared.weights import weights_digest
from shared.worker_environment import cache_directory
from workers.checkpoints.resolve import resolve, resolve_default

CLIENTS = (1, 2, 4, 8)
MAX_CLIENTS = 256
SECONDS, QUICK_SECONDS = 4.0, 0.4
CHECK_ROUNDS = 5
START_ESTIMATE_S = 20.0  # of a server; with the first candidates there is nothing better
# Settings that are tuned, or that concern who may reach a server; candidates take all others from the environment.
NOT_PASSED = frozenset({
    "bind", "cpu_threads", "devices", "insecure", "jobs", "keys", "max_batch", "models", "placement", "run_dir",
    "sagemaker", "tls_cert", "tls_key",
})  # fmt: skip
PREDICTION_BOUND = 0.1
MPS_SOCKET = Path("/tmp/nvidia-mps/control")

err = Console(stderr=True, width=None if sys.stderr.isatty() else 150)


def tune(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Instead choose the kernels of each model on each GPU.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short round of everything, as a functional check.")
    ] = False,
    rows: Annotated[str, typer.Option(help="With --kernels: batch sizes to time, separated by commas.")] = ",".join(
        map(str, ROWS)
    ),
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Interleaved rounds whose medians count: of the check (default {CHECK_ROUNDS}), with --kernels of "
            f"each batch size (default {NUM_ROUNDS}).",
        ),
    ] = None,
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
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a closed loop; open loops take twice.")] = SECONDS,
    budget: Annotated[float, typer.Option(min=0.1, help="Minutes that the search and the check may take.")] = 15.0,
    again: Annotated[bool, typer.Option("--again", help="Measure anew what an earlier run has measured.")] = False,
    state: Annotated[
        Path | None, typer.Option(help="File for the results; default: tune.jsonl in TERCET_CACHE_DIR.", dir_okay=False)
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write the result to this file.", dir_okay=False)
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Also write a plot to this PNG file.", dir_okay=False)
    ] = None,
) -> None:
    """Find workers per device, threads, placement and batch for a model and a load, by serving each candidate plan.

    Measures load time, memory, latency and throughput of real servers, under closed loops and Poisson arrivals; checks
    its prediction at a load that it did not measure; prints the recommended settings as environment lines. Ctrl-C ends
    it, and the same command continues. To be run while nothing else uses the machine. With --kernels: chooses the
    kernels of each model on each GPU; a changed choice changes the texts of seeds on that GPU.
    """
    if kernels:
        tune_kernels(rows, rounds or NUM_ROUNDS, is_quick=quick)
        return
    for path, option in ((plot_path, "--plot"), (json_path, "--json")):
        if path is not None and not path.parent.is_dir():
            raise StartError(f"{option} {path}: {path.parent} is not a directory.")
    if plot_path is not None:
        plot.check(plot_path)
    settings = Settings.load(os.environ)
    spec, subject, revision = _model(model, settings)
    devices = find_devices(settings, os.environ)
    uses_gpu = devices != ("cpu",) and settings.compute != "cpu"
    workload = Workload(num_prompt_tokens=prompt_tokens, num_samples=samples, num_new_tokens=length)
    if prompt_tokens + length > subject.n_ctx:
        raise typer.BadParameter(
            f"with --length {length} at most {subject.n_ctx - length}, the model's context",
            param_hint="--prompt-tokens",
        )
    passed = {name: value for name, value in _passed(os.environ).items() if name not in NOT_PASSED}
    trial = Trial(
        spec, subject, uses_gpu, workload, {**passed, "jobs": "none"}, _clients(clients),
        QUICK_SECONDS if quick else seconds,
    )  # fmt: skip
    goal = Goal(slo_ms, qps)
    space = Space(
        devices=devices,
        cores=0 if uses_gpu else len(os.sched_getaffinity(0)),
        memory_bytes=None if uses_gpu else available_bytes(),
        max_clients=max(trial.clients),
        num_samples=samples,
        max_workers=max_workers,
    )
    path = state or (cache_directory(settings) or Path.cwd()) / "tune.jsonl"
    options = Options(models=str(spec), device=devices[0].partition(":")[0], is_quick=quick, workload=workload)
    with alone(path), measured_run("tune", options, err) as document:
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # as Ctrl-C: servers are stopped
        kept = State(path, run_key(_identity(document, trial, revision, devices)), is_new=again)
        if kept.outcomes:
            err.print(f"Plans measured before: {len(kept.outcomes)} ({path}); --again measures them anew.")
        num_rounds = 1 if quick else rounds or CHECK_ROUNDS
        tuning = Tuning(trial, space, goal, kept, Budget(60 * budget), num_rounds)
        try:
            tuning.run()
        except KeyboardInterrupt:
            err.print(f"Interrupted. The same command continues. Plans measured so far: {len(kept.outcomes)} ({path}).")
            raise typer.Exit(130) from None
    tuning.report(document, json_path, plot_path)


@dataclass(slots=True)
class Budget:
    """Seconds that a run may take."""

    seconds: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        self.start_s = time.monotonic()

    def has(self, needed_s: float) -> bool:
        return time.monotonic() - self.start_s + needed_s <= self.seconds


class Tuning:
    """One run: search, check, report."""

    def __init__(self, trial: Trial, space: Space, goal: Goal, state: State, budget: Budget, num_rounds: int) -> None:
        self._trial, self._space, self._goal, self._state = trial, space, goal, state
        self._budget, self._num_rounds = budget, num_rounds
        self._search = Search()
        self._chosen: Choice | None = None
        self._check: Check | None = None
        self._refuted: dict[Candidate, str] = {}

    def run(self) -> None:
        """Measure candidates until the search is complete or the budget is spent, then check the best.

        A plan whose check contradicts the SLO is refuted, and the search continues without it.
        """
        while True:
            self._measure_candidates()
            self._chosen = choose(self._state.outcomes, self._goal, self._refuted)
            if self._chosen is None:
                return
            candidate = self._chosen.candidate
            plan = self._plans[candidate]
            rounds = plan_rounds(plan, self._goal, self._num_rounds)
            total = 1 + self._num_rounds * len(rounds.loads)
            with progress(err, f"Checking {candidate}", total) as turn:
                done = run_rounds(
                    self._trial, candidate, rounds, self._state, turn, lambda: not self._budget.has(self._round_s)
                )
            self._check = conclude(plan, done)
            found_ms, slo_ms = self._check.measured.mean_ms, self._goal.slo_ms
            if slo_ms is None or found_ms <= slo_ms:
                return
            self._refuted[candidate] = (
                f"its check: an average of {found_ms:.0f} ms at {rounds.loads[-1].rate_qps:g} requests/s, more than "
                f"{slo_ms:g} ms"
            )

    def _measure_candidates(self) -> None:
        longest_s = 0.0
        while True:
            outcomes = self._state.outcomes
            self._search = search = continue_search(self._space, outcomes, self._goal, self._refuted)
            final = next_final(outcomes, self._state.num_passes, self._goal, self._refuted)
            candidate, stage = (final, "The best two again") if search.next is None else (search.next, search.stage)
            if candidate is None:
                return
            needed_s = (longest_s or self._candidate_s) + self._num_rounds * self._round_s + START_ESTIMATE_S
            if outcomes and not self._budget.has(needed_s):
                reason = "--budget: the remaining time is for the check; the same command continues"
                search.pruned[candidate] = reason
                return
            started_s = time.monotonic()
            with progress(err, f"{stage}: {candidate}", self._trial.num_turns) as turn:
                try:
                    measurement = self._trial.measure(candidate, turn)
                except StartError as error:
                    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                    reason = " … ".join(dict.fromkeys((lines[0], lines[-1])))
                    self._state.add(candidate, failure=reason)
                    err.print(f"[red]✗[/] {candidate}: {reason}", highlight=False)
                    continue
            self._state.add(candidate, measurement=measurement)
            longest_s = max(longest_s, time.monotonic() - started_s)
            err.print(one_line(candidate, measurement), highlight=False)

    @property
    def _plans(self) -> dict[Candidate, Measurement]:
        outcomes = self._state.outcomes.items()
        return {candidate: outcome for candidate, outcome in outcomes if not isinstance(outcome, str)}

    @cached_property
    def _round_s(self) -> float:
        """Seconds of one round of the check."""
        return self._trial.seconds * (len(self._trial.clients) + OPEN_LOOP_FACTOR * (len(OPEN_SHARES) + 1))

    @property
    def _candidate_s(self) -> float:
        return START_ESTIMATE_S + self._round_s

    def report(self, document: Document, json_path: Path | None, plot_path: Path | None) -> None:
        """Print the result, and write it to the files.

        Raises:
            StartError: no plan could be served, or none meets the goal.
        """
        plans, chosen, check = self._plans, self._chosen, self._check
        best = None if chosen is None else chosen.candidate
        for candidate, plan in plans.items():
            num_passes = self._state.num_passes[candidate]
            again = f", medians of {num_passes} passes" if num_passes > 1 else ""
            err.print(table(f"{'→ ' if candidate == best else ''}{candidate}{again}", plan.figures))
        failures = {candidate: why for candidate, why in self._state.outcomes.items() if isinstance(why, str)}
        for candidate, reason in {**failures, **self._search.pruned, **self._refuted}.items():
            verb = "Left out"
            if candidate in plans:
                verb = "Refuted" if candidate in self._refuted else "Not measured again"
            elif candidate in failures:
                verb = "Not served"
            err.print(f"[yellow]{verb}:[/] {candidate}: {reason}", highlight=False)
        if not plans:
            raise StartError("No plan could be served; the reasons are above.")
        err.print(terminal_plot(plans, best, self._goal.slo_ms))
        if note := mps_note(plans, os.environ):
            err.print(note, highlight=False)
        if check is not None and best is not None:
            err.print(table(f"Check of {best}, medians of {check.num_rounds} rounds", [*check.figures, check.measured]))
            err.print(_verdict(check), highlight=False)
        document.notes += _notes(plans)
        print_reasons(err, document)
        lines = [] if best is None else [*environment(self._trial.models(best), best)]
        if json_path is not None:
            result = {
                **msgspec.structs.asdict(document),
                "goal": {"slo_ms": self._goal.slo_ms, "qps": self._goal.qps},
                "plans": [
                    {"candidate": candidate, "passes": self._state.num_passes[candidate], "measurement": plan}
                    for candidate, plan in plans.items()
                ],
                "left_out": [
                    {"candidate": candidate, "reason": reason}
                    for candidate, reason in {**failures, **self._search.pruned, **self._refuted}.items()
                ],
                "recommended": best,
                "reason": None if chosen is None else chosen.reason,
                "check": check,
                "check_error": None if check is None else round(check.error, 4),
                "environment": lines,
            }
            json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        if plot_path is not None:
            save_plot(document, plans, best, check, self._goal.slo_ms, plot_path)
        if chosen is None:
            raise StartError(_unmet(self._goal, plans))
        err.print(f"[bold green]Recommended:[/] {best}: {chosen.reason}.", highlight=False)
        sys.stdout.write("\n".join(lines) + "\n")


def _notes(plans: Mapping[Candidate, Measurement]) -> list[str]:
    """How the figures are to be read."""
    client_cores = max(row.client_cpu_s for plan in plans.values() for row in plan.figures)
    return [
        "Latencies in ms, of answered requests; every prompt is new, so none is in a prefix cache.",
        f"Other load: share of all cores. Above {QUIET_SHARE:.0%} a turn is repeated, up to {MAX_ATTEMPTS - 1} times.",
        "Poisson arrivals do not wait for responses; their latency counts from the planned arrival.",
        f"The clients run on the same machine and used up to {client_cores:.2f} cores, which the server did not have.",
    ]


def _verdict(check: Check) -> str:
    """Prediction and measurement, as a sentence each."""
    if check.predicted_ms == inf:
        return (
            f"[yellow]Not checked:[/] in its rounds the plan answered fewer than {check.measured.load.rate_qps:g} "
            "requests/s, the load of the check, and more in the search. The machine has become slower; run the same "
            "command with --again while nothing else uses it."
        )
    is_met = abs(check.error) <= PREDICTION_BOUND
    colour, word = ("green", "met") if is_met else ("yellow", "not met")
    return (
        f"At {check.measured.load.rate_qps:g} requests/s, a load outside the fit: predicted {check.predicted_ms:.1f} "
        f"ms, measured {check.measured.mean_ms:.1f} ms on average ({check.error:+.1%}; [{colour}]{word}[/] within "
        f"{PREDICTION_BOUND:.0%}). Predicted before the check: {check.earlier_ms:.1f} ms."
    )


def _unmet(goal: Goal, plans: Mapping[Candidate, Measurement]) -> str:
    """Why no plan is recommended, and what to do."""
    most_qps = max(plan.capacity_qps for plan in plans.values())
    least_ms = min(plan.light_ms for plan in plans.values())
    asked = f"--qps {goal.qps:g}" if goal.qps is not None else ""
    held = f"--slo-ms {goal.slo_ms:g}" if goal.slo_ms is not None else ""
    return (
        f"No plan on this machine holds {' at '.join(filter(None, (held, asked)))}: the most that one answered is "
        f"{most_qps:.1f} requests/s (a plan may use {MAX_STABLE_SHARE:.0%} of that), the least average latency "
        f"{least_ms:.0f} ms. Ask for less, serve a smaller model, "
        "or take a larger machine or more than one."
    )


def mps_note(plans: Mapping[Candidate, Measurement], environ: Mapping[str, str]) -> str:
    """What MPS would change; empty where no GPU has several workers, or MPS is running."""
    shared = [candidate for candidate in plans if candidate.workers > 1 and candidate.devices[0] != "cpu"]
    if not shared or has_mps(environ):
        return ""
    alone_qps = max((plan.capacity_qps for candidate, plan in plans.items() if candidate.workers == 1), default=0.0)
    shared_qps = max(plans[candidate].capacity_qps for candidate in shared)
    return (
        f"[yellow]No MPS:[/] without NVIDIA's Multi-Process Service the workers of a GPU take turns, and their kernels "
        f"never run at the same time. Measured so: one worker per GPU {alone_qps:.1f} requests/s, several "
        f"{shared_qps:.1f}. With MPS their kernels overlap and the second figure can rise; each worker still reads the "
        "weights itself. To measure it: start the service (nvidia-cuda-mps-control -d), then run the same command: "
        "plans with MPS are measured apart."
    )


def has_mps(environ: Mapping[str, str], socket: Path = MPS_SOCKET) -> bool:
    """Whether processes started here use NVIDIA's Multi-Process Service."""
    directory = environ.get("CUDA_MPS_PIPE_DIRECTORY")
    return (Path(directory) / "control" if directory else socket).exists()


def _passed(environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of this environment, as text, by lower-case name."""
    names = {f"TERCET_{field.name.upper()}": field.name for field in fields(Settings)}
    return {names[name]: value for name, value in environ.items() if name in names}


def _model(text: str | None, settings: Settings) -> tuple[ModelSpec, Subject, str]:
    """The model to serve, and the digest of its weights.

    Raises:
        typer.BadParameter: the option or the settings name another number of models than one.
        StartError: the model is not on this machine and cannot be fetched.
    """
    specs = settings.models
    if text is not None:
        try:
            specs = Settings.load({"TERCET_MODELS": text}).models
        except StartError as error:
            raise typer.BadParameter(str(error).replace("TERCET_MODELS=", ""), param_hint="--model") from error
    if len(specs) > 1:
        raise typer.BadParameter(
            f"name one model; plans with several are not searched ({', '.join(spec.name for spec in specs)})",
            param_hint="--model",
        )
    spec = specs[0] if specs else None
    if spec is None:
        checkpoint = resolve_default()
        spec = ModelSpec(checkpoint.name)
    else:
        checkpoint = resolve(spec.name, spec.source)
    revision = "" if checkpoint.source == "synthetic" else weights_digest(Path(checkpoint.directory))
    return ModelSpec(spec.name, spec.source), Subject.of(checkpoint), revision


def _identity(document: Document, trial: Trial, revision: str, devices: tuple[str, ...]) -> dict[str, Any]:
    """What the figures depend on; a run continues only with equal values."""
    return {
        "machine": document.machine,
        "versions": document.versions,
        "code": code_digest(ROOT),
        "model": str(trial.model),
        "revision": revision,
        "devices": devices,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "mps": has_mps(os.environ),
        "workload": trial.workload,
        "settings": dict(trial.settings),
        "clients": list(trial.clients),
        "seconds": trial.seconds,
        "open": (OPEN_SHARES, OPEN_LOOP_FACTOR),
    }


def _clients(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1 or numbers[-1] > MAX_CLIENTS:
        raise typer.BadParameter(
            f"must be numbers from 1 to {MAX_CLIENTS}, separated by commas, like 1,2,4,8", param_hint="--clients"
        )
    return numbers
