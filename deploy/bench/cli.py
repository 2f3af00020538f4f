"""`tercet bench`: tables on standard error, one JSON document on standard output."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from deploy.bench.gpu.cli import bench_gpu
from deploy.bench.harness import writer
from deploy.bench.quality import distinct, replay
from deploy.bench.quality.samples import SamplesBench, samples_table
from deploy.bench.quality.typist import (
    RULES,
    TypistBench,
    TypistOptions,
    plot_savings,
    savings_table,
    usage_table,
)
from deploy.bench.speed import compare, memory, setup
from deploy.bench.speed import writer as latency
from deploy.bench.speed.cost import CostBench, cost_table
from deploy.bench.speed.cpu import CpuSuite
from deploy.bench.speed.gpu import GpuSuite
from deploy.bench.speed.http import LEVELS, HttpBench
from deploy.bench.speed.page import PageBench, page_tables
from deploy.bench.speed.plots import plot_levels, plot_rows
from deploy.bench.speed.remote import RemoteBench, remote_table
from deploy.bench.speed.rows import NUM_WORDS
from deploy.bench.speed.tables import levels_table, rows_table, series_table
from deploy.bench.speed.targets import TARGETS, not_measured
from deploy.load import plot, report
from deploy.load.corpus import read_held_out
from deploy.load.machine import gpus
from deploy.load.options import Options
from deploy.load.report import Document
from deploy.load.run import measured_run, progress, start_server
from deploy.load.server import ROOT
from gateway.api.schema import parse_autocomplete_request
from shared.errors import InvalidRequest, StartError

bench = typer.Typer(no_args_is_help=True, help="Measure Tercet, its ceiling and its baselines in one run, as ratios.")
bench.command("gpu")(bench_gpu)
# A file has no width; this is the width of the widest table.
err = Console(stderr=True, width=None if sys.stderr.isatty() else 150)

QUICK_ROUNDS = 1
QUICK_PASSAGES, QUICK_WORDS = 2, 5
QUICK_KEYS = 40
MAX_CLIENTS = 256
PAGE = ROOT / "workers" / "checkpoints" / "page.txt"
# `bench writer` takes contexts of up to 1,200 characters.
MIN_TEXT_CHARS = 2000
# The parts of `bench writer`.
PARTS = {
    "stream": latency.measure_streams,
    "typing": latency.measure_typing,
    "deadlines": latency.measure_deadlines,
    "distinct": distinct.measure_distinct,
}

Models = Annotated[str, typer.Option(help="Model under test, as in TERCET_MODELS.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the first GPU, or the CPU without one.")]
Rounds = Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are over the samples of all rounds.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="One short round, as a functional check; do not quote its figures.")
]
Setting = Annotated[
    list[str] | None, typer.Option("--set", help="Setting of the server under test, like dtype=fp32; repeatable.")
]
Fields = Annotated[
    list[str] | None, typer.Option("--field", help="Field of each request, like temperature=0.8; repeatable.")
]
Corpus = Annotated[
    Path | None,
    typer.Option(
        help="Training corpus, as for `make embedded`: its held-out books are written if there is no other prose.",
        exists=True,
        dir_okay=False,
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the prompts.")]
PlotPath = Annotated[Path | None, typer.Option("--plot", help="Also write a plot to this PNG file.", dir_okay=False)]


@bench.command("engine")
def bench_engine(
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Rows to measure, repeatable or separated by commas: {', '.join(TARGETS)}."),
    ] = None,
    rounds: Rounds = 7,
    quick: Quick = False,
    models: Models = "synthetic:small",
    device: Device = "auto",
    setting: Setting = None,
    document: Annotated[
        Path | None,
        typer.Option(help="Text to type in the row `document`; default: generated words.", exists=True, dir_okay=False),
    ] = None,
    num_words: Annotated[
        int, typer.Option("--words", min=1, help="Number of words of the document to type, at most.")
    ] = NUM_WORDS,
    seed: Seed = 0,
    plot_path: PlotPath = None,
) -> None:
    """Latency and throughput of the engine and the gateway, as ratios to baselines (transformers) and ceilings
    (linear layers, memory bandwidth)."""
    names = _choose("--only", "row", only, TARGETS)
    options = _options(models, device, rounds, quick, setting, seed)
    words = document.read_text(encoding="utf-8").split() if document is not None else []
    names_here = [name for name in names if TARGETS[name].device == ("cpu" if options.device == "cpu" else "gpu")]
    with _run("engine", options, plot_path) as result:
        if names_here and options.device == "cpu":
            CpuSuite(options, names_here, words, num_words, err).run(result)
        elif names_here:
            GpuSuite(options, names_here, err).run(result)
    result.rows += [not_measured(name, _why_not(name)) for name in names if name not in names_here]
    result.rows.sort(key=lambda row: list(TARGETS).index(row.target.name))
    result.not_measured |= {row.target.name: row.why_not for row in result.rows if row.why_not}
    tables = [series_table(list(result.series.values()), result.series.get("gateway"))] if result.series else []
    _report(result, [*tables, rows_table(result.rows)], plot_rows, plot_path)


@bench.command("http")
def bench_http(
    clients: Annotated[
        str, typer.Option(help="Numbers of concurrent closed-loop clients, separated by commas.")
    ] = ",".join(map(str, LEVELS)),
    rounds: Rounds = 3,
    quick: Quick = False,
    url: Annotated[
        str | None, typer.Option(help="A server that already runs on this machine; default: start one.")
    ] = None,
    models: Models = "synthetic:small",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
    plot_path: PlotPath = None,
) -> None:
    """Requests per second, latency percentiles and time to first token of the gateway under closed-loop clients."""
    options = _options(models, device, rounds, quick, setting, seed)
    runner = HttpBench(options, _levels(clients), url, err)
    with _run("http", options, plot_path) as result:
        runner.run(result)
    _report(result, [levels_table(result.rows)], plot_levels, plot_path)


@bench.command("cost")
def bench_cost(
    against: Annotated[
        Path | None,
        typer.Option(help="Root of another checkout, measured in the same rounds.", exists=True, file_okay=False),
    ] = None,
    rounds: Rounds = 5,
    quick: Quick = False,
    setting: Setting = None,
) -> None:
    """CPU time of the gateway and of the workers per answer, and answers per second, with one and two slots."""
    options = _options("embedded", "cpu", rounds, quick, setting, 0)
    with _run("cost", options) as result:
        CostBench(options, None if against is None else against.resolve(), err).run(result)
    _report(result, [cost_table(result.rows)])


@bench.command("remote")
def bench_remote(
    ray: Annotated[
        str | None, typer.Option(help="A pool that already runs, like http://127.0.0.1:8000/embedded, as one more way.")
    ] = None,
    ray_key: Annotated[Path | None, typer.Option(help="File of that pool's key.", exists=True, dir_okay=False)] = None,
    rounds: Rounds = 5,
    quick: Quick = False,
    setting: Setting = None,
) -> None:
    """What a gateway's way to the workers costs: Unix socket, TCP, TLS."""
    options = _options("embedded", "cpu", rounds, quick, setting, 0)
    with _run("remote", options) as result:
        RemoteBench(options, None if ray is None else (ray, ray_key), err).run(result)
    _report(result, [remote_table(result.rows)])


@bench.command("writer")
def bench_writer(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Prose to write; default: the page that Tercet ships with.", exists=True, dir_okay=False),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Parts to measure, repeatable or separated by commas: {', '.join(PARTS)}."),
    ] = None,
    corpus: Corpus = None,
    writers: Annotated[
        int, typer.Option(min=1, max=MAX_CLIENTS, help="Part typing: writers at once, after one alone.")
    ] = 8,
    keys_per_second: Annotated[float, typer.Option(min=0.1, help="Part typing: keys of each writer.")] = 8.0,
    context_chars: Annotated[
        int, typer.Option(min=1, help="Part typing: characters before each writer's first key.")
    ] = writer.MIN_CONTEXT_CHARS,
    field: Fields = None,
    quick: Quick = False,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
) -> None:
    """Latency for a writer: time to first token, requests at typing speed, deadlines, three distinct sentences."""
    names = _choose("--only", "part", only, PARTS)
    options = _options(models, device, 1, quick, setting, 0)
    writing = writer.WriterOptions(
        fields=_fields(field), num_writers=writers, keys_per_s=keys_per_second, context_chars=context_chars
    )
    texts = _read_prose(files, corpus) or _read_texts([PAGE])
    num_chars = context_chars + latency.NUM_KEYS
    if short := [name for name, text in texts.items() if len(text) < num_chars]:
        raise typer.BadParameter(f"{short[0]} has fewer than {num_chars} characters", param_hint="--context-chars")
    with _run("writer", options) as result:
        writer.run_parts([PARTS[name] for name in names], options, writing, list(texts.values()), result, err)
    _report(result, writer.part_tables(result.rows, latency.PERCENTAGES | distinct.PERCENTAGES))


@bench.command("predict")
def bench_predict(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Prose to write; default: the page that Tercet ships with.", exists=True, dir_okay=False),
    ] = None,
    corpus: Corpus = None,
    quick: Quick = False,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """What the strategy predict costs besides the model's work, and what it adds to the benchmark workload W."""
    from deploy.bench.speed import predict  # only here: it imports torch

    options = _options(models, device, 1, quick, setting, seed)
    texts = _read_prose(files, corpus) or _read_texts([PAGE])
    with _run("predict", options) as result:
        predict.PredictBench(options, list(texts.values()), err).run(result)
    _report(result, writer.part_tables(result.rows, frozenset()))


@bench.command("typist")
def bench_typist(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Prose unknown to the model.", exists=True, dir_okay=False, show_default=False),
    ] = None,
    books: Annotated[list[Path] | None, typer.Option(help="The same, repeatable.", exists=True, dir_okay=False)] = None,
    corpus: Corpus = None,
    rule: Annotated[
        list[str] | None, typer.Option(help=f"Rules, repeatable or separated by commas: {', '.join(RULES)}.")
    ] = None,
    passages: Annotated[int, typer.Option(min=2, help="Number of passages of each file.")] = 12,
    words: Annotated[int, typer.Option(min=1, help="Number of words of each passage.")] = 100,
    characters: Annotated[
        int | None, typer.Option(min=1, help="Instead of --words: characters of each passage, to the end of a word.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=8, help="Suggestions of each request.")] = 3,
    writers: Annotated[
        int, typer.Option(min=1, max=MAX_CLIENTS, help="Writers at the same time; latencies are longer with several.")
    ] = 1,
    min_usefulness: Annotated[
        float,
        typer.Option(min=0, help="Rule page: keys that a prediction must save to be shown; the editor's normal: 1."),
    ] = 0,
    latency_limit: Annotated[
        float | None, typer.Option(min=0, help="Milliseconds; answers that take longer are not used.")
    ] = None,
    context_chars: Annotated[
        int | None,
        typer.Option(min=1, help="Characters before the cursor in each request; default: as many as the editor sends."),
    ] = None,
    engine: Annotated[
        bool, typer.Option("--engine", help="Use an engine in this process: faster, but without latencies.")
    ] = False,
    field: Fields = None,
    quick: Quick = False,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
    plot_path: PlotPath = None,
) -> None:
    """Keystroke savings: the share of keystrokes that a writer saves by accepting suggestions, by three rules."""
    options = _options(models, device, 1, quick, setting, seed)
    typist = TypistOptions(
        num_passages=QUICK_PASSAGES if quick else passages,
        num_words=QUICK_WORDS if quick else words,
        num_characters=None if quick else characters,
        rules=_choose("--rule", "rule", rule, RULES),
        num_samples=samples,
        num_writers=writers,
        min_usefulness=min_usefulness,
        latency_limit_ms=latency_limit,
        context_chars=context_chars,
        fields=_fields(field),
        is_engine=engine,
    )
    texts = _read_prose([*(files or []), *(books or [])], corpus)
    if not texts:
        raise typer.BadParameter("name the prose to type, or a corpus with held-out books", param_hint="FILES")
    with _run("typist", options, plot_path) as result:
        TypistBench(options, typist, texts, err).run(result)
    _report(result, [savings_table(result.rows), usage_table(result.rows)], plot_savings, plot_path)


@bench.command("samples")
def bench_samples(
    field: Fields = None,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """Fifty suggestions for everyday openings, for a person to read."""
    options = _options(models, device, 1, False, setting, seed)
    fields = _fields(field)
    with _run("samples", options) as result:
        SamplesBench(options, fields, err).run(result)
    _report(result, [samples_table(result.rows)])


@bench.command("page")
def bench_page(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Prose to type; default: a page.", exists=True, dir_okay=False),
    ] = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Training corpus, whose held-out books are the prose.", dir_okay=False)
    ] = None,
    keys: Annotated[int, typer.Option(min=10, help="Keys to type with each eagerness.")] = 700,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in the long document.")] = 3,
    quick: Quick = False,
    models: Models = "embedded",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """The web editor in Chromium: from a key to the painted suggestion, flicker, and keys in a long document."""
    options = _options(models, "cpu", rounds, quick, setting, seed)
    texts = _read_texts(files or []) or (read_held_out(corpus) if corpus else _read_texts([replay.PROSE]))
    with _run("page", options) as result:
        PageBench(options, texts, QUICK_KEYS if quick else keys, err).run(result)
    _report(result, page_tables(result.rows))


@bench.command("replay")
def bench_replay(
    record: Annotated[Path, typer.Argument(help="File of recorded answers; recorded now if it does not exist.")],
    url: Annotated[
        str | None, typer.Option(help="Base URL of a running server; default: start one for this run.")
    ] = None,
    models: Models = "embedded,synthetic:small",
    setting: Setting = None,
) -> None:
    """Answer 200 seeded requests of every kind and compare the answers with a record, byte by byte, times aside."""
    settings = dict(entry.partition("=")[::2] for entry in setting or [])
    with ExitStack() as stack:
        base_url = url or stack.enter_context(start_server(err, models, settings)).url
        if not record.exists():
            num_requests = replay.record(base_url, replay.PROSE.read_text(encoding="utf-8"), models.split(","), record)
            err.print(f"Recorded {num_requests} answers in {record}; run the same command again to compare.")
            return
        num_requests, different = replay.differences(base_url, record)
    for line in different:
        err.print(line, highlight=False, soft_wrap=True, markup=False)
    sys.stdout.write(json.dumps({"requests": num_requests, "different": len(different)}) + "\n")
    if different:
        raise typer.Exit(1)


@bench.command("memory")
def bench_memory(
    other: Annotated[
        Path | None,
        typer.Argument(help="Root of another checkout to measure; default: this one.", exists=True, file_okay=False),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests after which memory is read again.")] = 1000,
    models: Models = "embedded",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """Memory (PSS) of each process of a server on the CPU, at rest and after requests."""
    settings = dict(entry.partition("=")[::2] for entry in setting or [])
    rows = memory.measure_memory(models, settings, requests, (other or ROOT).resolve(), seed)
    err.print(memory.memory_table(rows, requests))
    sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")


@bench.command("setup")
def bench_setup(
    against: Annotated[
        Path | None,
        typer.Option(help="Root of another checkout, measured in turns with this one.", exists=True, file_okay=False),
    ] = None,
    rounds: Rounds = 3,
) -> None:
    """Time of a first `make serve`: a new clone of what is committed, empty caches, downloads included."""
    roots = {"this": ROOT} if against is None else {"this": ROOT, "other": against.resolve()}
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with progress(err, "Set-ups", rounds * len(roots)) as on_turn:
        rows = setup.measure_setups(roots, rounds, on_turn)
    err.print(setup.setup_table(rows))
    sys.stdout.write(json.dumps([asdict(row) for row in rows]) + "\n")


@bench.command("compare")
def bench_compare(
    other: Annotated[Path, typer.Argument(help="Root of another checkout of Tercet.", exists=True, file_okay=False)],
    rounds: Rounds = 5,
) -> None:
    """Measure this checkout and another one on the CPU in interleaved rounds and print the ratios of their medians."""
    comparisons = compare.compare(other.resolve(), rounds)
    err.print(compare.comparison_table(comparisons, rounds))
    sys.stdout.write(json.dumps([{**asdict(row), "ratio": round(row.ratio, 4)} for row in comparisons]) + "\n")


@contextmanager
def _run(name: str, options: Options, plot_path: Path | None = None) -> Iterator[Document]:
    """A run, after the checks that need no measurement. SIGTERM ends it like Ctrl-C: what it started is stopped."""
    if plot_path is not None:
        plot.check(plot_path)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with measured_run(name, options, err) as document:
        yield document


def _report(
    document: Document,
    tables: Sequence[Table],
    plot_result: Callable[[Document, list[Any], Path], None] | None = None,
    plot_path: Path | None = None,
) -> None:
    for table in tables:
        err.print(table)
    report.print_reasons(err, document)
    if plot_result is not None and plot_path is not None:
        plot_result(document, document.rows, plot_path)
    report.write(document)


def _options(models: str, device: str, rounds: int, quick: bool, settings: Sequence[str] | None, seed: int) -> Options:
    """
    Raises:
        StartError: a setting is invalid, or there is no GPU.
    """
    if device == "auto":
        device = "cuda" if gpus() else "cpu"
    elif device == "cuda" and not gpus():
        raise StartError("--device cuda: this machine has no GPU (nvidia-smi lists none).")
    pairs = dict(entry.partition("=")[::2] for entry in settings or [])
    options = Options(
        models=models, device=device, num_rounds=QUICK_ROUNDS if quick else rounds, is_quick=quick, seed=seed,
        settings={name.lower().removeprefix("tercet_"): value for name, value in pairs.items()},
    )  # fmt: skip
    options.load_settings()
    return options


def _choose(option: str, noun: str, entries: Sequence[str] | None, names: Sequence[str] | dict[str, Any]) -> list[str]:
    """The names that the entries list, in the order of `names`; all names if there are no entries."""
    chosen = {name for entry in entries or [] for name in entry.split(",") if name}
    if unknown := chosen.difference(names):
        raise typer.BadParameter(f"{min(unknown)} is not a {noun}; use {', '.join(names)}", param_hint=option)
    return [name for name in names if not chosen or name in chosen]


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or min(levels) < 1 or max(levels) > MAX_CLIENTS:
        raise typer.BadParameter(
            f"must be numbers from 1 to {MAX_CLIENTS}, separated by commas, like 1,2,16", param_hint="--clients"
        )
    return levels


def _fields(entries: Sequence[str] | None) -> dict[str, object]:
    """Fields of `POST /autocomplete` from name=value, validated as the gateway does."""
    found: dict[str, object] = {}
    for entry in entries or []:
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


def _read_texts(files: Sequence[Path]) -> dict[str, str]:
    """File name → text."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    if short := [name for name, text in texts.items() if len(text) < MIN_TEXT_CHARS]:
        raise typer.BadParameter(f"{short[0]} has fewer than {MIN_TEXT_CHARS} characters", param_hint="FILES")
    return texts


def _read_prose(files: Sequence[Path] | None, corpus: Path | None) -> dict[str, str]:
    """File name → text, of the files or else of the corpus's held-out books; empty if there is neither."""
    return read_held_out(corpus) if corpus is not None and not files else _read_texts(files or [])


def _why_not(name: str) -> str:
    if TARGETS[name].device == "cpu":
        return "this run measures a GPU; --device cpu measures the CPU"
    return "this run measures the CPU; --device cuda measures the GPU" if gpus() else "this machine has no GPU"
