"""Trains the embedded checkpoint: `python -m workers.training.train --corpus train.txt.xz --run DIR`.

Run the same command again to resume a stopped run; the weights are those of an uninterrupted run. When it stops or
ends, a run writes to its directory `checkpoint/` (what Tercet serves), and at the end of its token budget `report.json`
(evaluation on held-out books, samples) and `card.json` (facts for the model card). During training, `log.jsonl` gets
one line per evaluation.

Nothing that serves imports this module.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from shared import cpu_features
from shared.errors import StartError
from shared.weights import weights_digest
from workers.training.corpus import END_ID, Book, Corpus, prepare, read_books, split_books, write_text
from workers.training.export import check_size, export
from workers.training.report import report, tables
from workers.training.schedule import Settings
from workers.training.trainer import Trainer

SHIPPED = Path(__file__).parents[1] / "checkpoints" / "embedded"
PROGRESS_PERIOD_S = 1.0
SMOOTHING = 0.95  # of the displayed loss, per progress period

# Defaults. On a CPU, time is the limit: a run continues from the embedded checkpoint, with the batch size that was
# fastest to learn on two cores (256 × 8 tokens). A GPU can pass over the corpus many times: a run starts from scratch
# with the largest model that is shipped (18 million parameters), with dropout.
SHAPE = {"layers": 8, "width": 384, "heads": 6, "n_ctx": 1024, "vocab_size": 8192}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"tokens": 40_000_000, "window": 256, "batch": 8, "long_window": 512, "dropout": 0.0},
    "cuda": {"epochs": 10.0, "window": 512, "batch": 64, "long_window": 1024, "dropout": 0.1},
}
FROM_SCRATCH = {"random_starts": 0.5, "learning_rate": 6e-3}
CONTINUE = {"random_starts": 0.3, "learning_rate": 5e-3}

# Output to a file has no terminal width.
err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)


class SignalRecorder:
    """Records TERM and INT instead of ending the process, so that the current step is completed and saved."""

    signal_number: int | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        def record(number: int, _frame: object) -> None:
            self.signal_number = number

        before = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status; 128 + the signal's number if a signal stopped the run."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_float32_matmul_precision("highest")  # evaluation is in fp32; training autocasts to bf16
    try:
        if options.report:
            _, books = split_books(read_books(options.corpus))
            _report(options.report, books, device, options.seed, options.out)
            return 0
        if options.run is None:
            raise StartError("--run DIR is required: the directory of the run.")
        return _run(options, device, began)
    except StartError as error:
        err.print(Text.assemble(("train:", "red"), f" {error}"), soft_wrap=True)
        return 1


def _run(options: argparse.Namespace, device: torch.device, began: float) -> int:
    run: Path = options.run
    run.mkdir(parents=True, exist_ok=True)
    source, shape = _source_and_shape(options, device)
    with err.status("Preparing the corpus") as status:
        corpus = prepare(
            options.corpus,
            run,
            seed=options.seed,
            tokenizer_from=source,
            vocab_size=shape["vocab_size"],
            n_ctx=shape["n_ctx"],
            say=status.update,
        )
    shape["vocab_size"] = corpus.tokenizer.get_vocab_size() if source is None else shape["vocab_size"]
    settings = _make_settings(options, device, source, shape, len(corpus.tokens))
    trainer, is_new = _make_trainer(run / "state.pt", settings, source, corpus, device)
    mode = "eager: --no-compile" if options.no_compile else _try_compiler(device)
    if mode == "compiled":
        trainer.compile()
    facts = {"machine": _machine(device), "computed": mode}
    first = "from the start" if is_new else f"from token {trainer.step * settings.tokens_per_step:,}"
    err.print(
        f"{corpus.facts['num_tokens']:,} tokens in {len(corpus.facts['books'])} books; "
        f"training on {settings.tokens:,}, {first}; {facts['machine']}; {mode}.",
        soft_wrap=True,
    )
    if not options.export_only:
        deadline = began + 60 * options.budget_minutes if options.budget_minutes else float("inf")
        signal_number = _train(trainer, corpus, run, 60 * options.eval_minutes, deadline, facts)
        if trainer.step < settings.num_steps:
            # A lent machine may keep nothing but the files that are copied from it now.
            export(trainer.model, run, run / "checkpoint", options.shard_mb)
            err.print(f"Stopped at token {trainer.step * settings.tokens_per_step:,}; run the same command to resume.")
            return 128 + signal_number if signal_number else 0
    export(trainer.model, run, run / "checkpoint", options.shard_mb)
    if not options.export_only:
        _report(run / "checkpoint", corpus.held_out, device, options.seed, run / "report.json")
        write_text(run / "card.json", json.dumps(_card(trainer, corpus, source, facts), indent=1, ensure_ascii=False))
        files = " ".join(shlex.quote(str(run / "held-out" / name)) for name in corpus.facts["held_out_files"])
        model = shlex.quote(f"new={run.absolute() / 'checkpoint'}")
        err.print(
            f"To measure the keystrokes that it saves:\n  python -m tests.bench typist --models {model} {files}",
            soft_wrap=True,
        )
    return 0


def _train(
    trainer: Trainer, corpus: Corpus, run: Path, eval_s: float, deadline: float, facts: dict[str, Any]
) -> int | None:
    """Train until the token budget, the deadline or a signal, evaluating and saving every `eval_s` and at the end.

    Returns:
        The number of the signal that ended it, if any.
    """
    settings, signals = trainer.settings, SignalRecorder()
    elapsed_before_s, started = trainer.elapsed_s, time.monotonic()
    losses: list[Tensor] = []
    smoothed: float | None = None
    shown = evaluated = started
    first_step = trainer.step  # of this evaluation period
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.1f} %")
    with signals.recording(), Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=settings.num_steps, completed=trainer.step)
        while trainer.step < settings.num_steps:
            losses.append(trainer.train_step())
            now = time.monotonic()
            is_last = trainer.step == settings.num_steps or signals.signal_number is not None or now >= deadline
            if is_last or now - shown >= PROGRESS_PERIOD_S:  # reading the loss waits for the device
                mean = float(torch.stack(losses).mean())
                smoothed = mean if smoothed is None else SMOOTHING * smoothed + (1 - SMOOTHING) * mean
                losses, shown = [], time.monotonic()
                per_s = (trainer.step - first_step) * settings.tokens_per_step / (shown - evaluated)
                left_h = (settings.num_steps - trainer.step) * settings.tokens_per_step / per_s / 3600
                text = f"loss {smoothed:.3f}, {per_s:,.0f} tokens/s, {left_h:.2f} h left"
                bar.update(task, completed=trainer.step, description=text)
            if not is_last and shown - evaluated < eval_s:
                continue
            assert smoothed is not None
            trainer.elapsed_s = elapsed_before_s + shown - started
            line = {
                "tokens": trainer.step * settings.tokens_per_step,
                "of": settings.tokens,
                "loss": round(smoothed, 4),
                "learning_rate": settings.learning_rate_at(trainer.step),
                "bits_per_byte": trainer.evaluate(corpus),
                "tokens_per_s": round(per_s, 1),
                "hours_left": round(left_h, 2),
                "elapsed_s": round(trainer.elapsed_s, 1),
                **facts,
            }
            trainer.save(run / "state.pt")
            with (run / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(f"{json.dumps(line)}\n")
            bits = ", ".join(f"{value:.3f}" for value in line["bits_per_byte"].values())
            err.print(f"{line['tokens']:,} tokens: {text}; {bits} bits per byte on held-out books", soft_wrap=True)
            # Evaluating and saving does not count as training time.
            started, shown = started + time.monotonic() - shown, time.monotonic()
            evaluated, first_step = shown, trainer.step
            if is_last:
                break
    return signals.signal_number


def _source_and_shape(options: argparse.Namespace, device: torch.device) -> tuple[Path | None, dict[str, int]]:
    """The checkpoint to continue from, if any, and the model's shape.

    Raises:
        StartError: the checkpoint cannot be read, or another shape was requested.
    """
    source: Path | None = options.continue_from
    if source is None and not options.from_scratch and device.type == "cpu":
        source = SHIPPED
    requested = {name: value for name in SHAPE if (value := getattr(options, name)) is not None}
    if source is None:
        return None, {**SHAPE, **requested}
    if requested or options.from_scratch:
        raise StartError(
            "A run that continues keeps its checkpoint's shape and tokenizer; --from-scratch starts a new model."
        )
    try:
        config = GPT2Config.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise StartError(f"{source} holds no readable checkpoint to continue from: {error}.") from error
    return source, {
        "layers": config.n_layer,
        "width": config.n_embd,
        "heads": config.n_head,
        "n_ctx": config.n_positions,
        "vocab_size": config.vocab_size,
    }


def _make_settings(
    options: argparse.Namespace, device: torch.device, source: Path | None, shape: dict[str, int], num_tokens: int
) -> Settings:
    defaults = DEFAULTS[device.type] | (FROM_SCRATCH if source is None else CONTINUE)
    if options.tokens is not None or options.epochs is not None:
        defaults = {name: value for name, value in defaults.items() if name not in {"tokens", "epochs"}}
    names = {field.name for field in dataclasses.fields(Settings)} | {"epochs"}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    values = {**defaults, **given, **shape, "continue_from": None if source is None else str(source)}
    epochs = values.pop("epochs", None)
    if epochs is not None:
        values.setdefault("tokens", int(epochs * num_tokens))
    return Settings(**values)


def _make_trainer(
    path: Path, settings: Settings, source: Path | None, corpus: Corpus, device: torch.device
) -> tuple[Trainer, bool]:
    """(trainer, whether it is new): restored from `path` if that exists.

    Raises:
        StartError: the saved run has other settings, or the model is too large to ship.
    """
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), settings.dropout)
    if path.is_file():
        state = torch.load(path, map_location=device, weights_only=True)
        now = dataclasses.asdict(settings)
        if changed := [name for name in now if state["settings"].get(name) != now[name]]:
            raise StartError(
                f"{path.parent} holds a run with another {', '.join(changed)}: "
                "give the values that it was started with, or another --run."
            )
        trainer = Trainer(GPT2LMHeadModel(GPT2Config.from_dict(state["config"])), settings, corpus, device)
        trainer.load(state)
        return trainer, False
    torch.manual_seed(settings.seed)
    if source is not None:
        model = GPT2LMHeadModel.from_pretrained(source, dtype=torch.float32, **dropout)
    else:
        ends = {"bos_token_id": END_ID, "eos_token_id": END_ID}
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=settings.vocab_size,
                n_positions=settings.n_ctx,
                n_embd=settings.width,
                n_layer=settings.layers,
                n_head=settings.heads,
                **dropout,
                **ends,
            )
        )
    check_size(model)
    return Trainer(model, settings, corpus, device), True


def _try_compiler(device: torch.device) -> str:
    """`compiled`, or `eager` and why: torch.compile needs a C++ compiler on a CPU, Triton and a C compiler on a GPU."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(64, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        return f"eager: {str(error).strip().splitlines()[0]}"
    return "compiled"


def _report(directory: Path, books: list[Book], device: torch.device, seed: int, out: Path) -> None:
    with err.status("Evaluating") as status:
        result = report(directory, books, device, seed, status.update)
    write_text(out, json.dumps(result, indent=1, ensure_ascii=False))
    for table in tables(result):
        err.print(table)
    err.print(f"Written to {out}", soft_wrap=True)


def _card(trainer: Trainer, corpus: Corpus, source: Path | None, facts: dict[str, Any]) -> dict[str, Any]:
    """Facts for the model card: how the checkpoint was trained."""
    seen = trainer.step * trainer.settings.tokens_per_step
    return {
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        "tokens_seen": seen,
        "passes": round(seen / corpus.facts["num_tokens"], 2),
        "hours": round(trainer.elapsed_s / 3600, 2),
        **facts,
        "continued_from_sha256": None if source is None else weights_digest(source),
        "settings": dataclasses.asdict(trainer.settings),
        "corpus": corpus.facts,
    }


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{cpu_features.read().name}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n\n")[1]
    parser = argparse.ArgumentParser(prog="python -m workers.training.train", description=about)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="train.txt.xz")
    add("--run", type=Path, help="directory of the run; an existing run is resumed")
    add("--report", type=Path, metavar="DIR", help="only evaluate the checkpoint in DIR, in the same way")
    add("--out", type=Path, default=Path("report.json"), help="output of --report (default: %(default)s)")
    add("--export-only", action="store_true", help="only write RUN/checkpoint from the last saved state")
    add("--shard-mb", type=int, default=40, help="largest weight file in RUN/checkpoint (default: %(default)s)")
    add("--budget-minutes", type=float, help="stop after this time; run the same command to resume")
    add(
        "--eval-minutes",
        type=float,
        default=5.0,
        help="interval of evaluating, logging and saving (default: %(default)s)",
    )
    add("--device", choices=["cpu", "cuda"], help="default: the first GPU if there is one")
    add("--no-compile", action="store_true", help="do not use torch.compile")
    training = parser.add_argument_group("training", "defaults depend on the device and on --from-scratch")
    add = training.add_argument
    add(
        "--continue-from",
        type=Path,
        metavar="DIR",
        help="initial checkpoint (default on a CPU: the embedded checkpoint)",
    )
    add("--from-scratch", action="store_true", help="start with random weights and a new tokenizer")
    for name in SHAPE:
        add(f"--{name.replace('_', '-')}", type=int)
    length = training.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=int, help="token budget of the whole run")
    length.add_argument("--epochs", type=float, help="the same budget in passes over the corpus")
    add("--window", type=int, help="tokens per window")
    add("--batch", type=int, help="windows per step")
    add(
        "--long-share",
        type=float,
        default=0.2,
        help="fraction of the steps that use long windows (default: %(default)s)",
    )
    add("--long-window", type=int, help="tokens per long window")
    add("--random-starts", type=float, help="fraction of the windows that start at a random position")
    add("--learning-rate", type=float)
    add("--weight-decay", type=float, default=0.1, help="of the blocks' weight matrices (default: %(default)s)")
    add("--dropout", type=float)
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
