"""`tercet simulate`: measure a machine, fit the model, check it, and scale it to a million writers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from deploy.load import plot
from deploy.simulation.observations import Observations, read_observations, write_json
from deploy.tune.trial import QUIET_SHARE
from shared.errors import StartError

simulate = typer.Typer(
    no_args_is_help=True, help="Simulate gateways, slots and writers from measured service times, to a million writers."
)
err = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
TOTALS = (100, 1_000, 10_000, 100_000, 1_000_000)
CURVE = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)  # of a cell's writers, in the plot

Measured = Annotated[Path, typer.Argument(help="Output of `tercet simulate measure`.")]
InputFile = Annotated[Path, typer.Argument(help="Output of `tercet simulate fit`.")]


@simulate.command("measure")
def measure(
    to: Annotated[Path, typer.Argument(help="File to write.")],
    models: Annotated[str, typer.Option(help="A model by its name, as in TERCET_MODELS.")] = "embedded",
    devices: Annotated[str, typer.Option(help="One device, as in TERCET_DEVICES.")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    writers: Annotated[
        str, typer.Option(help="Numbers of live writers: the first is for the fit, the others for the check.")
    ] = "",
    max_others: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the cores that others may use before a turn is repeated."),
    ] = QUIET_SHARE,
    quick: Annotated[bool, typer.Option("--quick", help="Turns of a tenth of the time: do not quote.")] = False,
) -> None:
    """Put a real server with two slots under loads in turns, and write what was measured. Takes six minutes."""
    from deploy.simulation.measurement import Measurement, fixed_length_plans, writer_plans

    numbers = _numbers(writers)
    measurement = Measurement(models, err, max_others, devices)
    plans = (lambda _: writer_plans(numbers)) if numbers else fixed_length_plans
    observations = measurement.run(rounds, plans, 0.1 if quick else 1.0)
    write_json(to, observations)
    err.print(_loads_table(observations))


@simulate.command("fit")
def fit(
    measured: Measured,
    to: Annotated[Path, typer.Argument(help="File to write.")],
    writers: Annotated[Path | None, typer.Option(help="Output of `measure --writers`: live writers too.")] = None,
) -> None:
    """Choose the model's costs from the calibration runs, and write the simulation's input file. Takes minutes."""
    _require_simpy()
    from deploy.simulation.fit import fit as fit_costs
    from deploy.simulation.fit import fit_key

    observations = read_observations(measured)
    with err.status("Searching the costs that fit the measured latencies…"):
        inputs = fit_costs(observations)
    if writers is not None:
        inputs = fit_key(inputs, read_observations(writers))
    write_json(to, inputs)
    err.print(f"{inputs.models}: {inputs.costs}", highlight=False)


@simulate.command("check")
def check(
    inputs: InputFile,
    measured: Measured,
    max_others: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Leave out turns in which others used more of the cores, but the calmest."),
    ] = None,
) -> None:
    """Compare simulated with measured p50 and p99, at loads outside the fit. Exit code 1 beyond 15 %.

    Loads of live writers are only shown.
    """
    _require_simpy()
    from deploy.simulation.check import MAX_ERROR, check_writers
    from deploy.simulation.check import check as compare
    from deploy.simulation.costs import read_inputs

    found, observations = read_inputs(inputs), read_observations(measured)
    if max_others is not None:
        observations = msgspec.structs.replace(observations, max_others_share=max_others)
    if found.key is not None:
        table = Table("writers", "", "p50 ms", "simulated", "p99 ms", "simulated", "answered", "simulated")
        for typed in check_writers(found, observations):
            table.add_row(
                typed.name, typed.role,
                f"{typed.measured_ms[0]:.1f}", f"{typed.simulated_ms[0]:.1f}",
                f"{typed.measured_ms[1]:.1f}", f"{typed.simulated_ms[1]:.1f}",
                f"{typed.measured_answered:.1%}", f"{typed.simulated_answered:.1%}",
            )  # fmt: skip
        if table.row_count:
            err.print(table)
    rows = compare(found, observations)
    table = Table("load", "answers", "refused", "p50 ms", "simulated", "error", "p99 ms", "simulated", "error")
    for row in rows:
        (p50, p99), (simulated_p50, simulated_p99) = row.measured_ms, row.simulated_ms
        error50, error99 = row.errors
        table.add_row(
            row.name, f"{row.num_answers:,}", f"{row.num_refused:,}",
            f"{p50:.1f}", f"{simulated_p50:.1f}", f"{error50:+.1%}",
            f"{p99:.1f}", f"{simulated_p99:.1f}", f"{error99:+.1%}",
        )  # fmt: skip
    if rows:
        err.print(table)
    if not all(row.is_met for row in rows):
        raise StartError(f"The simulation is more than {MAX_ERROR:.0%} off, or requests were refused while measuring.")


@simulate.command("scale")
def scale(
    inputs: InputFile,
    price_per_hour: Annotated[
        float, typer.Option(min=0.0, help="Of one machine, in any currency. The default is an assumption.")
    ] = 0.10,
    p99_ms: Annotated[float, typer.Option(min=1.0, help="The goal for answers to keys.")] = 100.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Simulated time of each cell.")] = 20.0,
    seed: int = 1,
    plot_to: Annotated[Path | None, typer.Option("--plot", help="PNG file.")] = None,
) -> None:
    """Machines and cost per thousand suggestions for up to a million live writers, and what breaks first."""
    _require_simpy()
    if plot_to is not None:
        plot.check(plot_to)
    from deploy.simulation import scale as scaling
    from deploy.simulation.costs import read_inputs

    found = read_inputs(inputs)
    if found.key is None:
        raise StartError(f"{inputs} has no live writers: run `tercet simulate fit` with --writers.")
    assumptions = scaling.Assumptions(price_per_hour=price_per_hour)
    goal = scaling.Goal(p99_ms=p99_ms)
    cells = scaling.best_cell(found, assumptions, goal, seconds, seed)
    if not cells:
        raise StartError(f"No worker machine serves one writer with a p99 of {p99_ms:g} ms: allow more.")
    cell = max(cells, key=lambda each: each.num_writers / scaling.machines_of(each, found))
    rows = scaling.scale(found, assumptions, cell, TOTALS, seconds, seed)
    sys.stdout.write(scaling.markdown(cells, cell, rows, scaling.limits(assumptions, cell)))
    if plot_to is not None:
        from deploy.simulation.plot import plot_scale

        curve = [
            scaling.run_cell(found, assumptions, cell.num_machines, round(share * cell.num_writers), seconds, seed)
            for share in CURVE
        ]
        title = f"{found.models} on machines with {found.num_cores} cores; costs of {found.source}"
        plot_scale(curve, rows, title, plot_to)


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number]
    except ValueError as error:
        raise StartError(f"--writers {text}: write numbers with commas, as in 4,8,16.") from error


def _require_simpy() -> None:
    try:
        import simpy  # noqa: F401
    except ImportError as error:
        raise StartError("`tercet simulate` needs simpy: pip install 'tercet[simulation]'.") from error


def _loads_table(observations: Observations) -> Table:
    table = Table("load", "answers/s", "p50 ms", "p99 ms", "superseded", "failed", "gateway CPU ms", "workers CPU ms")
    for load in observations.loads:
        num_answers = max(1, sum(len(turn.wall_ms) for turn in load.turns))
        costs_ms = (
            1e3 * sum(times) / num_answers
            for times in ([turn.gateway_cpu_s for turn in load.turns], [turn.workers_cpu_s for turn in load.turns])
        )
        table.add_row(
            load.plan.name, f"{load.answers_per_s:.1f}", f"{load.median_ms(0.5):.1f}", f"{load.median_ms(0.99):.1f}",
            str(sum(turn.num_superseded for turn in load.turns)), str(sum(turn.num_failed for turn in load.turns)),
            *(f"{cost:.2f}" for cost in costs_ms),
        )  # fmt: skip
    return table
