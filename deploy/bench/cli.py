"""`tercet bench engine | http | writer | typist | samples`: tables on standard error, one JSON document on standard
output."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from deploy.bench.harness import plot, report
from deploy.bench.harness.machine import Clock, gpus
from deploy.bench.harness.options import Options, begin, finish
from deploy.bench.harness.rows import NUM_WORDS
from deploy.bench.harness.server import ROOT
from deploy.bench.harness.targets import TARGETS, not_measured
from deploy.bench.quality.samples import SamplesBench
from deploy.bench.quality.samples import table as samples_table
from deploy.bench.quality.typist import TypistBench
from deploy.bench.quality.typist import table as typist_table
from deploy.bench.speed.gpu import GpuSuite
from deploy.bench.speed.http import LEVELS, HttpBench
from deploy.bench.speed.suite import CpuSuite
from deploy.bench.speed.writer import PARTS, WriterBench, tables
from gateway.api.schema import parse_autocomplete_request
from shared.errors import InvalidRequest, StartError

bench = typer.Typer(no_args_is_help=True, help="Measure: ceiling, baselines and ours, in one run, as ratios.")
# A file has no width; the widest table has this one.
err = Console(stderr=True, width=None if sys.stderr.isatty() else 150)

QUICK_ROUNDS = 1
# A writer who types 500 keys needs as much and something before it.
MIN_TEXT_CHARS = 2000
Models = Annotated[str, typer.Option(help="The model under test, as in TERCET_MODELS.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the first GPU if there is one.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each contender; medians are taken over all.")]
Quick = Annotated[bool, typer.Option("--quick", help="One short round: shows that it works, not to be quoted.")]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the server under test, like dtype=fp32; repeatable.")
]
Fields = Annotated[list[str] | None, typer.Option("--field", help="Of each request, like temperature=0.8; repeatable.")]
Seed = Annotated[int, typer.Option(help="Of the prompts.")]
PlotPath = Annotated[Path | None, typer.Option("--plot", help="Write a PNG there too.", dir_okay=False)]


@bench.command("engine")
def bench_engine(
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Rows to measure, repeatable or with commas, of: {', '.join(TARGETS)}."),
    ] = None,
    rounds: Rounds = 7,
    quick: Quick = False,
    models: Models = "synthetic:small",
    device: Device = "auto",
    setting: Setting = None,
    document: Annotated[
        Path | None,
        typer.Option(help="A text to be typed, all of it; else 2,000 words made up.", exists=True, dir_okay=False),
    ] = None,
    num_words: Annotated[int, typer.Option("--words", min=1, help="Of the document, at most.")] = NUM_WORDS,
    seed: Seed = 0,
    plot_path: PlotPath = None,
) -> None:
    """Every row of the performance tables: what is asked of Tercet, beside what others and the machine can do."""
    names = _names(only or [])
    options = _options(models, device, rounds, quick, setting or [], seed)
    if plot_path is not None:
        plot.check(plot_path)
    words = document.read_text(encoding="utf-8").split() if document is not None else []
    _stop_in_order()
    clock = Clock()
    result = begin("engine", options, clock, err)
    here = [name for name in names if TARGETS[name].device == ("cpu" if options.device == "cpu" else "gpu")]
    if here and options.device == "cpu":
        CpuSuite(options, here, words, num_words, err).run(result)
    elif here:
        GpuSuite(options, here, err).run(result)
    result.rows += [not_measured(name, _why_not(name)) for name in names if name not in here]
    result.rows.sort(key=lambda row: list(TARGETS).index(row.target.name))
    result.not_measured |= {row.target.name: row.why_not for row in result.rows if row.why_not}
    finish(result, clock)
    if result.series:
        err.print(report.series_table("Measured", list(result.series.values()), result.series.get("gateway")))
    err.print(report.rows_table(result.rows))
    report.print_reasons(err, result)
    if plot_path is not None:
        plot.plot_rows(result, result.rows, plot_path)
    report.write(result)


@bench.command("http")
def bench_http(
    clients: Annotated[str, typer.Option(help="How many at once, level by level.")] = ",".join(map(str, LEVELS)),
    rounds: Rounds = 3,
    quick: Quick = False,
    url: Annotated[str | None, typer.Option(help="Of a server that runs on this machine, instead of an own.")] = None,
    models: Models = "synthetic:small",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
    plot_path: PlotPath = None,
) -> None:
    """The real gateway under closed-loop clients: requests per second and latencies at each level."""
    levels = _levels(clients)
    options = _options(models, device, rounds, quick, setting or [], seed)
    if plot_path is not None:
        plot.check(plot_path)
    runner = HttpBench(options, levels, url, err)
    _stop_in_order()
    clock = Clock()
    result = begin("http", options, clock, err)
    runner.run(result)
    finish(result, clock)
    err.print(report.levels_table(result.rows))
    report.print_reasons(err, result)
    if plot_path is not None:
        plot.plot_levels(result, result.rows, plot_path)
    report.write(result)


@bench.command("writer")
def bench_writer(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Prose to write on; else the page that ships.", exists=True, dir_okay=False),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Parts, repeatable or with commas, of: {', '.join(PARTS)}.")
    ] = None,
    quick: Quick = False,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
) -> None:
    """What a writer gets: first text, eight keys a second, deadlines, three sentences that differ."""
    asked = {name for entry in only or PARTS for name in entry.split(",") if name}
    if unknown := asked - set(PARTS):
        raise typer.BadParameter(f"{min(unknown)} is no part; the parts are {', '.join(PARTS)}", param_hint="--only")
    options = _options(models, device, 1, quick, setting or [], 0)
    texts = [path.read_text(encoding="utf-8") for path in files or [ROOT / "workers" / "checkpoints" / "page.txt"]]
    if short := [path for path, text in zip(files or [], texts, strict=False) if len(text) < MIN_TEXT_CHARS]:
        raise typer.BadParameter(f"{short[0]} has fewer than {MIN_TEXT_CHARS} characters", param_hint="FILES")
    _stop_in_order()
    clock = Clock()
    result = begin("writer", options, clock, err)
    WriterBench(options, texts, [name for name in PARTS if name in asked], err).run(result)
    finish(result, clock)
    for table in tables(result.rows):
        err.print(table)
    report.print_reasons(err, result)
    report.write(result)


@bench.command("typist")
def bench_typist(
    files: Annotated[list[Path], typer.Argument(help="Prose that the model never saw.", exists=True, dir_okay=False)],
    passages: Annotated[int, typer.Option(min=2, help="Of each file.")] = 12,
    words: Annotated[int, typer.Option(min=1, help="Of each passage.")] = 100,
    engine: Annotated[
        bool, typer.Option("--engine", help="Ask the engine in this process: faster, without latencies.")
    ] = False,
    field: Fields = None,
    quick: Quick = False,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
    plot_path: PlotPath = None,
) -> None:
    """The share of keystrokes that suggestions save a writer."""
    options = _options(models, device, 1, quick, setting or [], seed)
    fields = _fields(field or [])
    if plot_path is not None:
        plot.check(plot_path)
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    if short := [name for name, text in texts.items() if len(text) < MIN_TEXT_CHARS]:
        raise typer.BadParameter(f"{short[0]} has fewer than {MIN_TEXT_CHARS} characters", param_hint="FILES")
    if quick:
        passages, words = 2, 5
    _stop_in_order()
    clock = Clock()
    result = begin("typist", options, clock, err)
    TypistBench(options, texts, passages, words, fields, err, is_engine=engine).run(result)
    finish(result, clock)
    err.print(typist_table(result.rows))
    report.print_reasons(err, result)
    if plot_path is not None:
        plot.plot_saved(result, result.rows, plot_path)
    report.write(result)


@bench.command("samples")
def bench_samples(
    field: Fields = None,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """Fifty suggestions for everyday openings, to be read."""
    options = _options(models, device, 1, False, setting or [], seed)
    fields = _fields(field or [])
    _stop_in_order()
    clock = Clock()
    result = begin("samples", options, clock, err)
    SamplesBench(options, fields, err).run(result)
    finish(result, clock)
    err.print(samples_table(result.rows))
    report.write(result)


def _fields(entries: Sequence[str]) -> dict[str, object]:
    """Fields of `POST /autocomplete` from name=value, checked as the gateway would."""
    found: dict[str, object] = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    try:
        parse_autocomplete_request(json.dumps({"context": "", **found}).encode())
    except InvalidRequest as error:
        raise typer.BadParameter(error.detail, param_hint="--field") from error
    return found


def _stop_in_order() -> None:
    """A TERM ends a bench as Ctrl-C does: what it started is stopped."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))


def _options(models: str, device: str, rounds: int, quick: bool, settings: Sequence[str], seed: int) -> Options:
    if device == "auto":
        device = "cuda" if gpus() else "cpu"
    elif device == "cuda" and not gpus():
        raise StartError("--device cuda: this machine has no GPU (nvidia-smi lists none).")
    pairs = dict(entry.partition("=")[::2] for entry in settings)
    options = Options(
        models=models, device=device, num_rounds=QUICK_ROUNDS if quick else rounds, is_quick=quick, seed=seed,
        settings={name.lower().removeprefix("tercet_"): value for name, value in pairs.items()},
    )  # fmt: skip
    options.load_settings()
    return options


def _names(only: Sequence[str]) -> list[str]:
    """The rows asked for, in the table's order; all if none is."""
    asked = {name for entry in only for name in entry.split(",") if name}
    if unknown := asked - TARGETS.keys():
        raise typer.BadParameter(f"{min(unknown)} is not a row; the rows are {', '.join(TARGETS)}", param_hint="--only")
    return [name for name in TARGETS if not asked or name in asked]


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1 or max(levels) > 256:
        raise typer.BadParameter("must be numbers from 1 to 256 with commas, like 1,2,16", param_hint="--clients")
    return levels


def _why_not(name: str) -> str:
    if TARGETS[name].device == "cpu":
        return "a GPU is measured; --device cpu measures the CPU"
    return "the CPU is measured; --device cuda measures the GPU" if gpus() else "no GPU on this machine"
