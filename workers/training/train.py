"""Trains the embedded checkpoint: `python -m workers.training.train --corpus train.txt.xz --run DIR`.

Run the same command again to resume a stopped run; the weights are those of an uninterrupted run. At the end of its
token budget, a run writes to its directory `checkpoint/` (what Tercet serves), `report.json` (evaluation on held-out
books, samples) and `card.json` (facts for the model card).

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
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers import GPT2Config, GPT2LMHeadModel

from shared import cpu_features
from shared.errors import StartError
from shared.weights import weights_digest
from workers.training.corpus import END_ID, Book, Corpus, digest, prepare, read_books, split_books, write_text
from workers.training.report import report
from workers.training.schedule import Settings
from workers.training.trainer import Trainer

SHIPPED = Path(__file__).parents[1] / "checkpoints" / "embedded"
SHOWN_STEPS = 100  # whose mean loss is displayed

# Defaults. On a CPU, time is the limit: a run continues from the embedded checkpoint, with the batch size that was
# fastest to learn on two cores (256 × 8 tokens). A GPU can pass over the corpus many times: a run starts from scratch
# with the largest model that is shipped (18 million parameters), with dropout.
SHAPE = {"n_layer": 8, "n_embd": 384, "n_head": 6, "n_positions": 1024, "vocab_size": 8192}  # of GPT2Config
ALWAYS = {"long_share": 0.2, "weight_decay": 0.1}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"tokens": 40_000_000, "window": 256, "batch": 8, "long_window": 512, "dropout": 0.0},
    "cuda": {"tokens": 330_000_000, "window": 512, "batch": 64, "long_window": 1024, "dropout": 0.1},
}
FROM_SCRATCH = {"random_starts": 0.5, "learning_rate": 6e-3}
CONTINUE = {"random_starts": 0.3, "learning_rate": 5e-3}
# The options that set a value of `Settings`, with their types.
OPTIONS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(SHAPE, (int, "of a model that starts from scratch")),
    "tokens": (int, "token budget of the whole run"),
    "window": (int, "tokens per window"),
    "batch": (int, "windows per step"),
    "long_share": (float, "fraction of the steps that use long windows"),
    "long_window": (int, "tokens per long window"),
    "random_starts": (float, "fraction of the windows that start at a random position"),
    "learning_rate": (float, "the highest"),
    "weight_decay": (float, "of the blocks' weight matrices"),
    "dropout": (float, "fraction of the activations"),
}

# Output to a file has no terminal width.
err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)


@contextmanager
def recorded_signals() -> Iterator[list[int]]:
    """Record TERM and INT instead of ending the process, so that the current step is completed and saved."""
    numbers: list[int] = []

    def record(number: int, _frame: object) -> None:
        numbers.append(number)

    before = {number: signal.signal(number, record) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield numbers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status; 128 + the signal's number if a signal stopped the run."""
    options = _parser().parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_float32_matmul_precision("highest")  # evaluation is in fp32; training autocasts to bf16
    try:
        if options.report:
            _, books = split_books(read_books(options.corpus))
            sys.stdout.write(_report(options.report, books, device, options.seed))
            return 0
        return _run(options, device)
    except StartError as error:
        err.print(Text.assemble(("train:", "red"), f" {error}"), soft_wrap=True)
        return 1


def _run(options: argparse.Namespace, device: torch.device) -> int:
    run: Path = options.run
    run.mkdir(parents=True, exist_ok=True)
    settings = _make_settings(options, device)
    with err.status("Preparing the corpus") as status:
        corpus = prepare(options.corpus, run, settings, status.update)
    trainer = _make_trainer(run / "state.pt", settings, corpus, device)
    if not options.no_compile:
        trainer.compile()
    machine = _machine(device)
    err.print(
        f"{corpus.facts['num_tokens']:,} tokens in {len(corpus.facts['books'])} books; "
        f"training on {settings.tokens:,}, from token {trainer.num_tokens:,}; {machine}.",
        soft_wrap=True,
    )
    signal_number = _train(trainer, corpus, run / "state.pt", 60 * options.eval_minutes)
    if trainer.step < settings.num_steps:
        err.print(f"Stopped at token {trainer.num_tokens:,}; run the same command to resume.")
        return 128 + signal_number
    trainer.export(run, run / "checkpoint")
    evaluated = _report(run / "checkpoint", corpus.held_out, device, settings.seed)
    write_text(run / "report.json", evaluated)
    err.print_json(evaluated)
    card = {
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        "tokens_seen": trainer.num_tokens,
        "passes": round(trainer.num_tokens / corpus.facts["num_tokens"], 2),
        "hours": round(trainer.elapsed_s / 3600, 2),
        "machine": machine,
        "is_compiled": not options.no_compile,
        "continued_from_sha256": settings.continue_from and weights_digest(Path(settings.continue_from)),
        "settings": dataclasses.asdict(settings),
        "corpus": corpus.facts,
    }
    write_text(run / "card.json", json.dumps(card, indent=1, ensure_ascii=False))
    measure = ["--models", f"new={run.absolute() / 'checkpoint'}", "--corpus", str(options.corpus)]
    err.print(
        f"Written to {run}. To measure the keystrokes that it saves:\n"
        f"  python -m tests.bench typist {shlex.join(measure)}",
        soft_wrap=True,
    )
    return 0


def _train(trainer: Trainer, corpus: Corpus, path: Path, eval_s: float) -> int:
    """Train until the token budget or a signal; every `eval_s` and at the end, evaluate and save to `path`.

    Returns:
        The number of the signal that ended it, or 0.
    """
    num_steps = trainer.settings.num_steps
    losses: deque[float] = deque(maxlen=SHOWN_STEPS)
    began = evaluated = time.monotonic()
    elapsed_before_s = trainer.elapsed_s
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with recorded_signals() as signals, Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=num_steps, completed=trainer.step)
        while trainer.step < num_steps and not signals:
            losses.append(float(trainer.train_step()))
            bar.update(task, completed=trainer.step, description=f"loss {fmean(losses):.3f}")
            if trainer.step < num_steps and not signals and time.monotonic() - evaluated < eval_s:
                continue
            bits = ", ".join(f"{value:.3f}" for value in trainer.evaluate(corpus).values())
            evaluated = time.monotonic()
            trainer.elapsed_s = elapsed_before_s + evaluated - began
            trainer.save(path)
            err.print(
                f"{trainer.num_tokens:,} tokens: loss {fmean(losses):.3f}; {bits} bits per byte on held-out books",
                soft_wrap=True,
            )
    return signals[0] if signals else 0


def _make_settings(options: argparse.Namespace, device: torch.device) -> Settings:
    """What was requested, else the defaults; a run that continues has its checkpoint's shape.

    Raises:
        StartError: the checkpoint cannot be read, another shape was requested, or numbers do not fit together.
    """
    given = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    source: Path | None = options.continue_from
    if source is None and not options.from_scratch and device.type == "cpu":
        source = SHIPPED
    values: dict[str, Any] = {**SHAPE, **ALWAYS, **DEFAULTS[device.type], **FROM_SCRATCH, **given}
    if source is not None:
        if given.keys() & SHAPE.keys():
            raise StartError(
                "A run that continues keeps its checkpoint's shape and tokenizer; --from-scratch starts a new model."
            )
        try:
            config = GPT2Config.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise StartError(f"{source} holds no readable checkpoint to continue from: {error}.") from error
        values |= CONTINUE | given | {name: getattr(config, name) for name in SHAPE}
    return Settings(
        **values,
        seed=options.seed,
        continue_from=None if source is None else str(source),
        corpus_sha256=digest(options.corpus),
    )


def _make_trainer(path: Path, settings: Settings, corpus: Corpus, device: torch.device) -> Trainer:
    """A trainer, in the state that was saved to `path` if that exists.

    Raises:
        StartError: the saved run has other settings, or the model is too large to ship.
    """
    torch.manual_seed(settings.seed)
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), settings.dropout)
    if settings.continue_from is not None:
        model = GPT2LMHeadModel.from_pretrained(settings.continue_from, dtype=torch.float32, **dropout)
    else:
        shape = {name: getattr(settings, name) for name in SHAPE} | {"vocab_size": corpus.tokenizer.get_vocab_size()}
        model = GPT2LMHeadModel(GPT2Config(**shape, **dropout, bos_token_id=END_ID, eos_token_id=END_ID))
    trainer = Trainer(model, settings, corpus, device)
    if path.is_file():
        trainer.load(path)
    return trainer


def _report(directory: Path, books: list[Book], device: torch.device, seed: int) -> str:
    """The evaluation of the checkpoint in `directory`, as JSON."""
    with err.status("Evaluating") as status:
        result = report(directory, books, device, seed, status.update)
    return json.dumps(result, indent=1, ensure_ascii=False)


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
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", type=Path, help="directory of the run; an existing run is resumed")
    what.add_argument("--report", type=Path, metavar="DIR", help="only evaluate the checkpoint in DIR; prints JSON")
    add("--seed", type=int, default=0, help="of weights, books, batches, dropout, samples (default: %(default)s)")
    add("--eval-minutes", type=float, default=5.0, help="interval of evaluating and saving (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], help="default: the first GPU if there is one")
    add("--no-compile", action="store_true", help="do not use torch.compile, which needs a compiler")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--from-scratch", action="store_true", help="start with random weights and a new tokenizer")
    start.add_argument("--continue-from", type=Path, metavar="DIR", help="default on a CPU: the embedded checkpoint")
    training = parser.add_argument_group("training", "defaults depend on the device and on --from-scratch")
    for name, (kind, text) in OPTIONS.items():
        training.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())
