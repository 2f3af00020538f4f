"""Benchmarks for developers: tables on standard error, one JSON document last on standard output.

Tercet, its ceiling and its baselines are measured in one run and reported as ratios. Drives the engine, the gateway and
transformers through their public interfaces. Each contender lives in a process of its own, so that no thread pool,
allocator or interpreter lock is shared, and the contenders take turns.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from deploy.gpus import list_gpus
from deploy.load.run import measured_run
from deploy.load.server import ROOT
from deploy.lsp.text import trim_suffix
from deploy.tune.command import MAX_CLIENTS, parse_clients
from shared.errors import StartError
from tests.bench.gpu.cli import bench_gpu, choose
from tests.bench.quality import replay
from tests.bench.quality.familiarity import familiarity_table, run_familiarity
from tests.bench.quality.gap import gap_table, run_gaps
from tests.bench.quality.misspellings import MISSPELLED, UNKNOWN, misspellings_row
from tests.bench.quality.passages import choose_passages
from tests.bench.quality.predictions import SUITES, choose_places, keytype_rows, predictions_table, stated_rows
from tests.bench.quality.suggestions import PREDICTIONS, ask, sample_openings, samples_table
from tests.bench.quality.typist import (
    KINDS,
    PUBLISHED,
    RULES,
    TypistBench,
    TypistOptions,
    in_typographic_marks,
    read_kind,
    savings_table,
    usage_table,
)
from tests.bench.run import BenchDocument, Options, print_reasons, series_table
from tests.bench.server import start_server
from tests.bench.speed import against as other_checkout
from tests.bench.speed import memory, writer, writer_session
from tests.bench.speed.cost import CostBench, cost_table
from tests.bench.speed.engine import EngineBench
from tests.bench.speed.first_start import measure_starts, starts_table
from tests.bench.speed.http import LEVELS, HttpBench, levels_table
from tests.bench.speed.letters import letters_table, run_letters
from tests.bench.speed.page import PageBench, page_tables
from tests.bench.speed.rows import TARGETS, rows_table
from tests.instruction_sets import limits
from workers.training.corpus import read_books, split_books

bench = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure Tercet, its ceiling and its baselines.")
bench.command("gpu")(bench_gpu)
# A file has no width; this is the width of the widest table.
err = Console(stderr=True, width=None if sys.stderr.isatty() else 150)

QUICK_ROUNDS = 1
QUICK_PASSAGES, QUICK_WORDS = 2, 5
QUICK_SENTENCES = 2
QUICK_KEYS = 40
# `writer` takes contexts of up to 1,200 characters.
MIN_TEXT_CHARS = 2000
PARTS = {
    "stream": writer.measure_streams,
    "typing": writer.measure_typing,
    "crowd": writer.measure_crowds,
    "distinct": writer.measure_distinct,
}

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        help="Prose unknown to the model; default: the page that Tercet ships with.", exists=True, dir_okay=False
    ),
]
Corpus = Annotated[
    Path | None, typer.Option(help="Training corpus, as for `make embedded`: its held-out books are the prose.")
]
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
Plot = Annotated[Path | None, typer.Option(help="Also draw the figures, into this image file.", dir_okay=False)]
ManyModels = Annotated[str, typer.Option(help="Models under test, as in TERCET_MODELS, one after the other.")]
MinUsefulness = Annotated[float, typer.Option(min=0, help="Keys that a prediction must save to be shown (rule page).")]
MinProbability = Annotated[float, typer.Option(min=0, max=1, help="Rule page: often 0.3, normal 0.5, seldom 0.7.")]
Seed = Annotated[int, typer.Option(help="Seed of the prompts.")]
Checkout = Annotated[
    Path | None,
    typer.Option(help="Root of another checkout, measured in turns with this one.", exists=True, file_okay=False),
]


@bench.command("engine")
def bench_engine(
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Rows to measure, repeatable or separated by commas: {', '.join(TARGETS)}."),
    ] = None,
    against: Checkout = None,
    rounds: Rounds = 7,
    quick: Quick = False,
    models: Models = "synthetic:small",
    setting: Setting = None,
    seed: Seed = 0,
    plot: Plot = None,
    instruction_set: Annotated[str | None, typer.Option(help="avx2, avx_vnni or another lower than the CPU's.")] = None,
) -> None:
    """Latency and throughput on the CPU, as ratios to baselines (transformers) and ceilings (linear layers).

    With --against: latency and throughput of this checkout as ratios to another's.
    """
    os.environ.update(limits(instruction_set) if instruction_set else {})
    if against is not None:
        comparisons = other_checkout.compare(against.resolve(), QUICK_ROUNDS if quick else rounds, err)
        err.print(other_checkout.comparison_table(comparisons))
        _write(comparisons)
        return
    names = choose("--only", "row", only, TARGETS)
    options = _options(models, "cpu", rounds, quick, setting, seed)
    with _run("engine", options) as result:
        EngineBench(options, names, err).run(result)
    result.not_measured |= {row.target.name: row.why_not for row in result.rows if row.why_not}
    tables = [series_table(list(result.series.values()), result.series.get("gateway"))] if result.series else []
    _report(result, [*tables, rows_table(result.rows)], plot)


@bench.command("http")
def bench_http(
    clients: Annotated[
        str, typer.Option(help="Numbers of concurrent closed-loop clients, separated by commas.")
    ] = ",".join(map(str, LEVELS)),
    rounds: Rounds = 3,
    quick: Quick = False,
    models: Models = "synthetic:small",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
    plot: Plot = None,
) -> None:
    """Requests per second, latency percentiles and time to first token of the gateway under closed-loop clients."""
    options = _options(models, device, rounds, quick, setting, seed)
    runner = HttpBench(options, parse_clients(clients), err)
    with _run("http", options) as result:
        runner.run(result)
    _report(result, [levels_table(result.rows)], plot)


@bench.command("cost")
def bench_cost(
    against: Checkout = None,
    remote: Annotated[
        bool, typer.Option("--remote", help="Instead: the ways from the gateway to the workers, Unix socket, TCP, TLS.")
    ] = False,
    memory_after: Annotated[
        int | None,
        typer.Option(
            "--memory", min=1, help="Instead: memory of each process, at rest and after this number of requests."
        ),
    ] = None,
    rounds: Rounds = 5,
    quick: Quick = False,
    models: Models = "embedded",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """CPU time of the gateway and of the workers per answer, and answers per second, with one and two slots."""
    if memory_after is not None:
        root = ROOT if against is None else against.resolve()
        rows = memory.measure_memory(models, _settings(setting), memory_after, root, seed)
        err.print(memory.memory_table(rows, memory_after))
        _write(rows)
        return
    options = _options(models, "cpu", rounds, quick, setting, seed)
    runner = CostBench(options, err, against=None if against is None else against.resolve(), is_remote=remote)
    with _run("cost", options) as result:
        runner.run(result)
    _report(result, [cost_table(result.rows)])


@bench.command("writer")
def bench_writer(
    files: Files = None,
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
    ] = writer_session.MIN_CONTEXT_CHARS,
    field: Fields = None,
    quick: Quick = False,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
) -> None:
    """Latency for a writer: time to first token, requests at typing speed, three distinct sentences."""
    names = choose("--only", "part", only, PARTS)
    options = _options(models, device, 1, quick, setting, 0)
    writing = writer_session.WriterOptions(
        fields=_fields(field), num_writers=writers, keys_per_s=keys_per_second, context_chars=context_chars
    )
    texts = _read_prose(files, corpus)
    num_chars = context_chars + writer.NUM_KEYS
    if short := [name for name, text in texts.items() if len(text) < num_chars]:
        raise typer.BadParameter(f"{short[0]} has fewer than {num_chars} characters", param_hint="--context-chars")
    parts = [PARTS[name] for name in names]
    with _run("writer", options) as result:
        writer_session.run_parts(parts, options, writing, list(texts.values()), result, err)
    _report(result, writer_session.part_tables(result.rows, writer.PERCENTAGES))


@bench.command("typist")
def bench_typist(
    files: Files = None,
    corpus: Corpus = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Kinds of text, repeatable or separated by commas: {', '.join(KINDS)}. "
            "Novels are passages of FILES or of the corpus; the others come with the benchmark and are typed whole."
        ),
    ] = None,
    typographic: Annotated[
        bool, typer.Option("--typographic", help="Type the texts with “ ” ‘ ’ — … in place of plain marks.")
    ] = False,
    openings: Annotated[
        bool, typer.Option("--openings", help="Instead: fifty suggestions for everyday openings, for a person to read.")
    ] = False,
    rule: Annotated[
        list[str] | None, typer.Option(help=f"Rules, repeatable or separated by commas: {', '.join(RULES)}.")
    ] = None,
    passages: Annotated[
        int | None,
        typer.Option(min=2, help="Passages of each file, by default 12, or texts of each kind, by default all."),
    ] = None,
    words: Annotated[
        int | None,
        typer.Option(min=1, help="Words of each passage, by default 100; of a kind's texts, by default all."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, max=8, help="Suggestions of each request.")] = 3,
    writers: Annotated[
        int, typer.Option(min=1, max=MAX_CLIENTS, help="Writers at the same time; latencies are longer with several.")
    ] = 1,
    min_usefulness: MinUsefulness = 1,
    min_probability: MinProbability = 0.5,
    context_chars: Annotated[
        int | None,
        typer.Option(min=1, help="Characters before the cursor in each request; default: as many as the editor sends."),
    ] = None,
    field: Fields = None,
    idea_field: Annotated[
        list[str] | None,
        typer.Option("--idea-field", help="Rule page: NAME=VALUE, as --field, of the requests for ideas; repeatable."),
    ] = None,
    quick: Quick = False,
    models: ManyModels = "embedded",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
    plot: Plot = None,
) -> None:
    """Keystroke savings: the share of keystrokes that a writer saves by accepting suggestions, by three rules."""
    all_options = [_options(model, device, 1, quick, setting, seed) for model in models.split(",")]
    fields = _fields(field)
    if openings:
        options = _options(models, device, 1, quick, setting, seed)
        with _run("typist", options) as result:
            sample_openings(options, fields, result, err)
        _report(result, [samples_table(result.rows)])
        return
    typist = TypistOptions(
        rules=choose("--rule", "rule", rule, RULES),
        num_samples=samples,
        num_writers=writers,
        min_usefulness=min_usefulness,
        min_probability=min_probability,
        context_chars=context_chars,
        fields=fields,
        idea_fields=_fields(idea_field),
    )
    kinds = choose("--kind", "kind", kind, KINDS) if kind else []
    if "novels" in kinds and not files and corpus is None:
        raise typer.BadParameter("novels need FILES or --corpus", param_hint="--kind")
    if quick:
        passages, words = QUICK_PASSAGES, QUICK_WORDS
    rng = random.Random(seed)
    chosen = []
    if not kinds or "novels" in kinds:
        books = choose_passages(_read_prose(files, corpus), passages or 12, words or 100, rng)
        chosen = [replace(passage, file="novels") for passage in books] if kinds else books
    for folder in (name for name in kinds if name != "novels"):
        chosen += read_kind(folder, passages, words, rng)
    if typographic:
        chosen = [in_typographic_marks(passage) for passage in chosen]
    with _run("typist", replace(all_options[0], models=models)) as result:
        for options in all_options:
            TypistBench(options, typist, chosen, err).run(result)
        result.notes.append(PUBLISHED)
    _report(result, [savings_table(result.rows), usage_table(result.rows)], plot)


@bench.command("gap")
def bench_gap(
    files: Files = None,
    corpus: Corpus = None,
    sentences: Annotated[
        int, typer.Option(min=1, help="Sentences of each file; each has a gap of one to six words in turn.")
    ] = 50,
    field: Fields = None,
    quick: Quick = False,
    models: Models = "embedded",
    device: Device = "auto",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """Words missing inside a sentence: how often three suggestions have them, with the text after them and without."""
    options = _options(models, device, 1, quick, setting, seed)
    texts = _read_prose(files, corpus)
    with _run("gap", options) as result:
        run_gaps(options, texts, QUICK_SENTENCES if quick else sentences, _fields(field), result, err)
    _report(result, [gap_table(result.rows)])


@bench.command("stated")
def bench_stated(
    files: Files = None,
    corpus: Corpus = None,
    places: Annotated[int, typer.Option(min=2, help="Places of each kind.")] = 600,
    models: ManyModels = "embedded",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """What predictions state, in probabilities and keys, against what comes next, in FILES or books and in letters."""
    rng = random.Random(seed)
    letters = [passage.text for passage in read_kind("letters", None, None, rng)]
    chosen = choose_places([[*_read_prose(files, corpus).values()], letters], places, rng)
    cursors = [(place.text[: place.at], place.after, 0) for place in chosen]
    all_options = [_options(model, "auto", 1, False, setting, seed) for model in models.split(",")]
    with _run("stated", replace(all_options[0], models=models)) as result:
        for options in all_options:
            result.rows += stated_rows(options.models, chosen, ask(options, cursors, PREDICTIONS, result, err))
    _report(result, [predictions_table("What predictions state, and what comes true", result.rows)])


@bench.command("keytype")
def bench_keytype(
    folder: Annotated[Path, typer.Argument(help="Folder with core.jsonl and edge.jsonl of KeyTypeBench.")],
    min_usefulness: MinUsefulness = 1,
    min_probability: MinProbability = 0.5,
    models: ManyModels = "embedded",
    setting: Setting = None,
) -> None:
    """Cases of KeyTypeBench: how much of what is shown is right, and where nothing is shown."""
    files = [folder / f"{suite}.jsonl" for suite in SUITES]
    if not all(map(Path.exists, files)):
        raise typer.BadParameter("pass a folder with core.jsonl and edge.jsonl of KeyTypeBench", param_hint="FOLDER")
    cases = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    contexts = [case["context"] for case in cases]
    cursors = [(context["beforeCursor"], trim_suffix(context["afterCursor"]), 0) for context in contexts]
    all_options = [_options(model, "auto", 1, False, setting, 0) for model in models.split(",")]
    with _run("keytype", replace(all_options[0], models=models)) as result:
        for options in all_options:
            answers = ask(options, cursors, {**PREDICTIONS, "min_probability": min_probability}, result, err)
            result.rows += keytype_rows(options.models, cases, answers, min_usefulness)
    _report(result, [predictions_table("Cases of KeyTypeBench", result.rows)])


@bench.command("misspellings")
def bench_misspellings(models: ManyModels = "embedded", setting: Setting = None) -> None:
    """After 40 misspelled words nothing or the right word is predicted, after 40 names and rare words something."""
    cursors = [(context, "", 0) for context in [*(context for context, _ in MISSPELLED), *UNKNOWN]]
    all_options = [_options(model, "auto", 1, False, setting, 0) for model in models.split(",")]
    with _run("misspellings", replace(all_options[0], models=models)) as result:
        for options in all_options:
            answers = ask(options, cursors, {**PREDICTIONS, "corrections": True}, result, err)
            result.rows.append(misspellings_row(options.models, answers))
    _report(result, [predictions_table("Misspelled words, and others that no list has", result.rows)])


@bench.command("familiarity")
def bench_familiarity(
    files: Files = None,
    corpus: Corpus = None,
    quick: Quick = False,
    models: Models = "embedded",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """How well a model knows prose, other languages, other scripts and code, by the score of `familiar_only`."""
    options = _options(models, "cpu", 1, quick, setting, seed)
    novels = _read_prose(files, corpus) if files or corpus is not None else {}
    with _run("familiarity", options) as result:
        run_familiarity(options, novels, result, err, options.load_settings().server.cache_dir)
    _report(result, [familiarity_table(result.rows)])


@bench.command("page")
def bench_page(
    files: Files = None,
    corpus: Corpus = None,
    keys: Annotated[int, typer.Option(min=10, help="Keys to type with each eagerness.")] = 700,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in the long document.")] = 3,
    quick: Quick = False,
    models: Models = "embedded",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """The web editor in Chromium: from a key to the painted suggestion, flicker, and keys in a long document."""
    options = _options(models, "cpu", rounds, quick, setting, seed)
    texts = _read_prose(files, corpus)
    with _run("page", options) as result:
        PageBench(options, texts, QUICK_KEYS if quick else keys, err).run(result)
    _report(result, page_tables(result.rows))


@bench.command("letters")
def bench_letters(
    letters: Annotated[int, typer.Option(min=1, max=18, help="Letters that come with the benchmark.")] = 3,
    words: Annotated[int, typer.Option(min=10, help="Words of each.")] = 150,
    shots: Annotated[Path, typer.Option(help="Directory for screenshots.")] = Path("build/letters"),
    quick: Quick = False,
    models: Models = "embedded",
    setting: Setting = None,
    seed: Seed = 0,
) -> None:
    """Letters typed into the web editor at a human rhythm, by a writer who takes what they were about to write."""
    options = _options(models, "cpu", 1, quick, setting, seed)
    if quick:
        letters, words = 1, QUICK_WORDS
    chosen = read_kind("letters", letters, words, random.Random(seed))
    with _run("letters", options) as result:
        run_letters(options, chosen, shots, result, err)
    _report(result, [letters_table(result.rows)])


@bench.command("start")
def bench_start() -> None:
    """From `make serve` to a suggestion, in an installation that has served nothing yet, and once more."""
    with _run("start", _options("embedded", "cpu", 1, False, None, 0)) as result:
        result.model = "default"
        result.rows = measure_starts(err)
    _report(result, [starts_table(result.rows)])


@bench.command("replay")
def bench_replay(
    record: Annotated[Path, typer.Argument(help="File of recorded answers; recorded now if it does not exist.")],
    url: Annotated[
        str | None, typer.Option(help="Base URL of a running server, of any version; default: start one for this run.")
    ] = None,
    models: Models = "embedded,synthetic:small",
    setting: Setting = None,
) -> None:
    """Answer 200 seeded requests of every kind and compare the answers with a record, byte by byte, times aside."""
    with ExitStack() as stack:
        base_url = url or stack.enter_context(start_server(err, models, _settings(setting))).url
        if not record.exists():
            num_requests = replay.record(base_url, replay.PROSE.read_text(encoding="utf-8"), models.split(","), record)
            err.print(f"Recorded {num_requests} answers in {record}; run the same command again to compare.")
            return
        num_requests, different = replay.differences(base_url, record)
    for line in different:
        err.print(line, highlight=False, soft_wrap=True, markup=False)
    _write({"requests": num_requests, "different": len(different)})
    if different:
        raise typer.Exit(1)


@contextmanager
def _run(name: str, options: Options) -> Iterator[BenchDocument]:
    """A run. SIGTERM ends it like Ctrl-C: what it started is stopped."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    document = BenchDocument(
        bench=name,
        is_quick=options.is_quick,
        model=options.models,
        device=options.device,
        settings=options.server_settings,
        workload=msgspec.to_builtins(options.workload),
    )
    with measured_run(document, err):
        yield document


def _report(document: BenchDocument, tables: Sequence[Table], plot: Path | None = None) -> None:
    for table in tables:
        err.print(table)
    print_reasons(err, document)
    if plot is not None:
        from tests.bench.plot import save_plot  # imports Pillow, which a bare machine with a GPU lacks

        save_plot(document, plot)
    _write(document)


def _write(result: object) -> None:
    """Write a JSON document as one line: `tail -n 1` extracts it."""
    sys.stdout.flush()
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.buffer.flush()


def _options(models: str, device: str, rounds: int, quick: bool, settings: Sequence[str] | None, seed: int) -> Options:
    """
    Raises:
        StartError: a setting is invalid, or there is no GPU.
    """
    if device == "auto":
        device = "cuda" if list_gpus() else "cpu"
    elif device == "cuda" and not list_gpus():
        raise StartError("--device cuda: this machine has no GPU (nvidia-smi lists none).")
    options = Options(
        models=models,
        device=device,
        num_rounds=QUICK_ROUNDS if quick else rounds,
        is_quick=quick,
        seed=seed,
        settings=_settings(settings),
    )
    options.load_settings()
    return options


def _settings(entries: Sequence[str] | None) -> dict[str, str]:
    """Settings by lower-case name, from name=value."""
    pairs = (entry.partition("=")[::2] for entry in entries or [])
    return {name.lower().removeprefix("tercet_"): value for name, value in pairs}


def _fields(entries: Sequence[str] | None) -> dict[str, object]:
    """Fields of `POST /autocomplete` from name=value; a value that is no JSON is a string."""
    found: dict[str, object] = {}
    for entry in entries or []:
        name, _, value = entry.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _read_prose(files: Sequence[Path] | None, corpus: Path | None) -> dict[str, str]:
    """File name → text, of the files, or of the corpus's held-out books, or of the page that Tercet ships with."""
    if corpus is not None and not files:
        _, books = split_books(read_books(corpus))
        return {book.title: f"{book.author} - {book.title}\n\n{book.text}" for book in books}
    texts = {path.name: path.read_text(encoding="utf-8") for path in files or [replay.PROSE]}
    if short := [name for name, text in texts.items() if len(text) < MIN_TEXT_CHARS]:
        raise typer.BadParameter(f"{short[0]} has fewer than {MIN_TEXT_CHARS} characters", param_hint="FILES")
    return texts
