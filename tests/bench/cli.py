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
from argparse import ArgumentParser, Namespace, _SubParsersAction
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from deploy.clients.lsp.text import trim_suffix
from deploy.tuning.gpus import list_gpus
from deploy.tuning.load.run import measured_run
from deploy.tuning.load.server import ROOT
from deploy.tuning.tune.tune_command import parse_clients
from shared.errors import StartError
from tests.bench import results
from tests.bench.gpu.cli import add_gpu_options, bench_gpu
from tests.bench.quality.gap import run_gaps
from tests.bench.quality.misspellings import MISSPELLED, UNKNOWN, misspellings_row
from tests.bench.quality.passages import Passage, choose_passages
from tests.bench.quality.predictions import SUITES, choose_places, keytype_rows, stated_rows
from tests.bench.quality.suggestions import PREDICTIONS, ask, sample_openings
from tests.bench.quality.typist import (
    KINDS,
    PUBLISHED,
    RULES,
    TypistBench,
    TypistOptions,
    in_typographic_marks,
    read_kind,
)
from tests.bench.run import BenchDocument, Options, names_of, print_document
from tests.bench.speed import against as other_checkout
from tests.bench.speed import memory, writer
from tests.bench.speed.cost import CostBench
from tests.bench.speed.engine import EngineBench
from tests.bench.speed.first_start import measure_starts
from tests.bench.speed.http import LEVELS, HttpBench
from tests.bench.speed.page import run_page
from tests.bench.speed.rows import TARGETS
from tests.instruction_sets import limits
from workers.training.corpus import read_books, split_books

QUICK_ROUNDS = 1
QUICK_PASSAGES, QUICK_WORDS = 2, 5
QUICK_SENTENCES = 2
QUICK_KEYS = 40
# `writer` takes contexts of up to 1,200 characters.
MIN_TEXT_CHARS = 2000
PAGE = ROOT / "workers" / "checkpoints" / "page.txt"

Commands: TypeAlias = "_SubParsersAction[ArgumentParser]"


def parser() -> ArgumentParser:
    """The commands and their options."""
    main = ArgumentParser(prog="python -m tests.bench", description="Measure Tercet, its ceiling and its baselines.")
    commands = main.add_subparsers(required=True, metavar="COMMAND")

    engine = _command(commands, "engine", bench_engine, models="synthetic:small", rounds=7)
    engine.add_argument("--only", type=names_of("row", TARGETS), help=f"rows: {', '.join(TARGETS)}")
    engine.add_argument("--against", type=Path, help="root of another checkout, measured in turns with this one")
    engine.add_argument("--instruction-set", help="avx2, avx_vnni or another lower than the CPU's")

    http = _command(commands, "http", bench_http, models="synthetic:small", rounds=3)
    http.add_argument("--clients", type=parse_clients, default=LEVELS, help="numbers of concurrent clients, by commas")

    cost = _command(commands, "cost", bench_cost, rounds=5)
    cost.add_argument("--against", type=Path, help="root of another checkout, measured in turns with this one")
    cost.add_argument("--memory", type=int, help="instead: memory of each process, at rest and after so many requests")

    _command(commands, "start", bench_start)

    writing = _command(commands, "writer", bench_writer)
    _add_prose(writing)
    writing.add_argument("--only", type=names_of("part", writer.PARTS), help=f"parts: {', '.join(writer.PARTS)}")
    writing.add_argument("--writers", type=int, default=8, help="part typing: writers at once, after one alone")
    writing.add_argument("--keys-per-second", type=float, default=8.0, help="part typing: keys of each writer")
    writing.add_argument("--context-chars", type=int, default=writer.MIN_CONTEXT_CHARS, help="text at first")

    typist = _command(commands, "typist", bench_typist)
    _add_prose(typist)
    typist.add_argument("--openings", action="store_true", help="instead: fifty suggestions for a person to read")
    typist.add_argument("--stated", type=int, help="instead: what predictions state at so many places of each kind")
    typist.add_argument("--keytype", type=Path, help="instead: the cases of KeyTypeBench in this folder")
    typist.add_argument("--misspellings", action="store_true", help="instead: what follows 40 misspelled words")
    typist.add_argument(
        "--kind", type=names_of("kind", KINDS), help=f"{', '.join(KINDS)}; novels are FILES or --corpus"
    )
    typist.add_argument("--typographic", action="store_true", help="“ ” ‘ ’ — … in place of plain marks")
    typist.add_argument("--rule", type=names_of("rule", RULES), default=RULES, help=f"rules: {', '.join(RULES)}")
    typist.add_argument(
        "--passages", type=int, help="of each file, by default 12, or texts of each kind, by default all"
    )
    typist.add_argument("--words", type=int, help="of each passage, by default 100; of a kind's texts, by default all")
    typist.add_argument("--samples", type=int, default=3, help="suggestions of each request")
    typist.add_argument("--writers", type=int, default=1, help="at the same time; latencies are longer with several")
    typist.add_argument("--min-usefulness", type=float, default=1, help="keys that a shown prediction saves")
    typist.add_argument("--min-probability", type=float, default=0.5, help="often 0.3, normal 0.5, seldom 0.7")
    typist.add_argument("--context-chars", type=int, help="before the cursor; default: as many as the editor sends")
    typist.add_argument("--idea-field", action="append", help="as --field, of the requests for ideas")

    gap = _command(commands, "gap", bench_gap)
    _add_prose(gap)
    gap.add_argument("--sentences", type=int, default=50, help="of each file; each has gaps of one to six words")

    page = _command(commands, "page", bench_page, rounds=3)
    _add_prose(page)
    page.add_argument("--keys", type=int, default=700, help="to type with each eagerness")

    gpu = commands.add_parser("gpu", help=(bench_gpu.__doc__ or "").strip())
    add_gpu_options(gpu)
    gpu.set_defaults(run=bench_gpu)
    return main


def _command(
    commands: Commands, name: str, run: Callable[[Namespace], object], *, models: str = "embedded", rounds: int = 1
) -> ArgumentParser:
    """A command with the options that all have."""
    summary = (run.__doc__ or "").strip().partition("\n")[0]
    command = commands.add_parser(name, help=summary, description=summary)
    add = command.add_argument
    add("--models", default=models, help="under test, as in TERCET_MODELS; typist: one after the other")
    add("--device", choices=("auto", "cpu", "cuda"), default="cpu", help="auto: the first GPU, or the CPU without one")
    add("--rounds", type=int, default=rounds, help="interleaved; medians are over the samples of all rounds")
    add("--quick", action="store_true", help="one short round, as a functional check")
    add("--set", action="append", help="setting of the server under test, like dtype=fp32; repeatable")
    add("--field", action="append", help="field of each request, like temperature=0.8; repeatable")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--record", metavar="NAME", help="also write the figures into docs/results/NAME.json")
    command.set_defaults(run=run)
    return command


def _add_prose(command: ArgumentParser) -> None:
    command.add_argument("files", type=Path, nargs="*", help="prose unknown to the model; default: a page of Tercet's")
    command.add_argument("--corpus", type=Path, help="as for `make embedded`: its held-out books are the prose")


def bench_engine(args: Namespace) -> None:
    """Latency and throughput on the CPU, as ratios to baselines (transformers) and ceilings (linear layers)."""
    os.environ.update(limits(args.instruction_set) if args.instruction_set else {})
    with _run("engine", args) as (options, result):
        if args.against is not None:
            result.rows += other_checkout.compare(args.against.resolve(), options.num_rounds)
        else:
            EngineBench(options, args.only or [*TARGETS]).run(result)


def bench_http(args: Namespace) -> None:
    """Requests per second, latency percentiles and time to first token of the gateway under closed-loop clients."""
    with _run("http", args) as (options, result):
        HttpBench(options, args.clients).run(result)


def bench_cost(args: Namespace) -> None:
    """CPU time of the gateway and of the workers per answer, and answers per second, with one and two slots."""
    other = args.against and args.against.resolve()
    if args.memory is not None:
        with _run("cost", args, is_one_worker=False) as (options, result):
            result.rows = memory.measure_memory(options.models, options.settings, args.memory, other or ROOT, args.seed)
        return
    with _run("cost", args) as (options, result):
        CostBench(options, other, _fields(args.field)).run(result)


def bench_writer(args: Namespace) -> None:
    """Latency for a writer: time to first token, requests at typing speed, more writers than can be answered."""
    writing = writer.WriterOptions(
        fields=_fields(args.field),
        num_writers=args.writers,
        keys_per_s=args.keys_per_second,
        context_chars=args.context_chars,
    )
    texts = _read_prose(args, args.context_chars + writer.NUM_KEYS)
    with _run("writer", args) as (options, result):
        writer.run_parts(args.only or [*writer.PARTS], options, writing, list(texts.values()), result)


def bench_typist(args: Namespace) -> None:
    """Keystroke savings: the share of keystrokes that a writer saves by accepting suggestions, by two rules."""
    modes = {
        "openings": _sample_openings,
        "stated": _compare_stated,
        "keytype": _run_keytype,
        "misspellings": _run_misspellings,
    }
    measure = next((mode for name, mode in modes.items() if getattr(args, name)), _measure_savings)
    all_options = [_options(Namespace(**{**vars(args), "models": model})) for model in args.models.split(",")]
    with _run("typist", args, is_one_worker=False) as (_, result):
        for options in all_options:
            measure(args, options, result)
        if measure is _measure_savings:
            result.notes.append(PUBLISHED)


def _sample_openings(args: Namespace, options: Options, result: BenchDocument) -> None:
    sample_openings(options, _fields(args.field), result)


def _compare_stated(args: Namespace, options: Options, result: BenchDocument) -> None:
    rng = random.Random(args.seed)
    letters = [passage.text for passage in read_kind("letters", None, None, rng)]
    chosen = choose_places([[*_read_prose(args).values()], letters], args.stated, rng)
    cursors = [(place.text[: place.at], place.after, 0) for place in chosen]
    result.rows += stated_rows(options.models, chosen, ask(options, cursors, PREDICTIONS, result))


def _run_keytype(args: Namespace, options: Options, result: BenchDocument) -> None:
    files = [args.keytype / f"{suite}.jsonl" for suite in SUITES]
    if not all(map(Path.exists, files)):
        raise StartError(f"--keytype {args.keytype}: pass a folder with core.jsonl and edge.jsonl of KeyTypeBench.")
    cases = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    contexts = [case["context"] for case in cases]
    cursors = [(context["beforeCursor"], trim_suffix(context["afterCursor"]), 0) for context in contexts]
    answers = ask(options, cursors, {**PREDICTIONS, "min_probability": args.min_probability}, result)
    result.rows += keytype_rows(options.models, cases, answers, args.min_usefulness)


def _run_misspellings(_: Namespace, options: Options, result: BenchDocument) -> None:
    cursors = [(context, "", 0) for context in [*(context for context, _ in MISSPELLED), *UNKNOWN]]
    answers = ask(options, cursors, {**PREDICTIONS, "corrections": True}, result)
    result.rows.append(misspellings_row(options.models, answers))


def _measure_savings(args: Namespace, options: Options, result: BenchDocument) -> None:
    typist = TypistOptions(
        rules=args.rule,
        num_samples=args.samples,
        num_writers=args.writers,
        min_usefulness=args.min_usefulness,
        min_probability=args.min_probability,
        context_chars=args.context_chars,
        fields=_fields(args.field),
        idea_fields=_fields(args.idea_field),
    )
    TypistBench(options, typist, _choose_texts(args)).run(result)


def _choose_texts(args: Namespace) -> list[Passage]:
    """What is typed."""
    kinds = args.kind or []
    if "novels" in kinds and not args.files and args.corpus is None:
        raise StartError("--kind: novels need FILES or --corpus.")
    num_passages, num_words = (QUICK_PASSAGES, QUICK_WORDS) if args.quick else (args.passages, args.words)
    rng = random.Random(args.seed)
    chosen = []
    if not kinds or "novels" in kinds:
        books = choose_passages(_read_prose(args), num_passages or 12, num_words or 100, rng)
        chosen = [replace(passage, file="novels") for passage in books] if kinds else books
    for folder in (name for name in kinds if name != "novels"):
        chosen += read_kind(folder, num_passages, num_words, rng)
    return [in_typographic_marks(passage) for passage in chosen] if args.typographic else chosen


def bench_gap(args: Namespace) -> None:
    """Words missing inside a sentence: how often three suggestions have them, with the text after them and without."""
    texts = _read_prose(args)
    with _run("gap", args) as (options, result):
        run_gaps(options, texts, QUICK_SENTENCES if args.quick else args.sentences, _fields(args.field), result)


def bench_page(args: Namespace) -> None:
    """The web editor in Chromium: from a key to the painted suggestion, flicker, and keys in a long document."""
    texts = _read_prose(args)
    with _run("page", args) as (options, result):
        run_page(options, texts, QUICK_KEYS if args.quick else args.keys, result)


def bench_start(args: Namespace) -> None:
    """From `make serve` to a suggestion, in an installation that has served nothing yet, and once more."""
    with _run("start", args) as (_, result):
        result.model = "default"
        result.rows = measure_starts()


@contextmanager
def _run(name: str, args: Namespace, *, is_one_worker: bool = True) -> Iterator[tuple[Options, BenchDocument]]:
    """A run, reported at its end. SIGTERM ends it like Ctrl-C: what it started is stopped."""
    options = _options(args, is_one_worker=is_one_worker)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    document = BenchDocument(
        bench=name,
        is_quick=options.is_quick,
        model=options.models,
        device=options.device,
        settings=options.server_settings,
        workload=msgspec.to_builtins(options.workload),
    )
    with measured_run(document, results.err):
        yield options, document
    print_document(document)
    if args.record:
        results.record(args.record, document, document.rows)
    _write(document)


def _write(result: object) -> None:
    """Write a JSON document as one line: `tail -n 1` extracts it."""
    sys.stdout.flush()
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.buffer.flush()


def _options(args: Namespace, *, is_one_worker: bool = True) -> Options:
    """
    Raises:
        StartError: a setting is invalid, or there is no GPU.
    """
    device = args.device
    if device == "auto":
        device = "cuda" if list_gpus() else "cpu"
    elif device == "cuda" and not list_gpus():
        raise StartError("--device cuda: this machine has no GPU (nvidia-smi lists none).")
    options = Options(
        models=args.models,
        device=device,
        num_rounds=QUICK_ROUNDS if args.quick else args.rounds,
        is_quick=args.quick,
        seed=args.seed,
        settings=_settings(args.set),
    )
    if is_one_worker:
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


def _read_prose(args: Namespace, min_chars: int = MIN_TEXT_CHARS) -> dict[str, str]:
    """File name → text, of the files, or of the corpus's held-out books, or of the page that Tercet ships with.

    Raises:
        StartError: a text is too short.
    """
    if args.corpus is not None and not args.files:
        _, books = split_books(read_books(args.corpus))
        return {book.title: f"{book.author} - {book.title}\n\n{book.text}" for book in books}
    texts = {path.name: path.read_text(encoding="utf-8") for path in args.files or [PAGE]}
    if short := [name for name, text in texts.items() if len(text) < max(min_chars, MIN_TEXT_CHARS)]:
        raise StartError(f"{short[0]} has fewer than {max(min_chars, MIN_TEXT_CHARS)} characters.")
    return texts
