"""Trains the embedded checkpoint: `python -m workers.training.train --corpus train.txt.xz --run DIR`.

The same command again goes on where a run stopped, to the same weights as if it had not. When its tokens are used up,
it writes into the run directory `checkpoint/` (what Tercet serves), `report.json` (held-out books, samples) and
`card.json` (the facts for the card). While it trains, each line of `log.jsonl` says how far it is.

Nothing else in Tercet trains, and nothing that serves imports this.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
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
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from shared.errors import StartError
from workers.training.corpus import END_ID, Book, Corpus, prepare, read_books, split_books, write_text
from workers.training.export import check_size, export
from workers.training.report import Unreduced, held_out, report, tables, weights_digest
from workers.training.schedule import Batch, Settings, batch_at

SHIPPED = Path(__file__).parents[1] / "checkpoints" / "embedded"
MAX_GRADIENT = 1.0
SLICE_WINDOWS = 8  # of each held-out book, measured on the way: 12,288 tokens in all
SHOWN_EVERY_S = 1.0
SMOOTHING = 0.95  # of the loss that is shown, a second

# What a run takes where nothing is said. On a CPU time is what lacks, so it goes on from the checkpoint that ships, in
# the measure that was found best there (two cores: 256 × 8 tokens a step). A GPU sees the corpus many times over, so it
# begins anew, as large as is shipped (18 million parameters), with dropout.
SHAPE = {"layers": 8, "width": 384, "heads": 6, "n_ctx": 1024, "vocab_size": 8192}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"tokens": 40_000_000, "window": 256, "batch": 8, "long_window": 512, "dropout": 0.0},
    "cuda": {"epochs": 10.0, "window": 512, "batch": 64, "long_window": 1024, "dropout": 0.1},
}
BEGIN_ANEW = {"random_starts": 0.5, "learning_rate": 6e-3}
CONTINUE = {"random_starts": 0.3, "learning_rate": 5e-3}

# A file has no width.
err = Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 120)


class Trainer:
    """A model, its optimizers, and the number of steps they have made of their course."""

    def __init__(self, model: Any, settings: Settings, corpus: Corpus, device: torch.device) -> None:
        self.model = model.to(device).train()
        self.settings = settings
        self.step = 0
        self.elapsed_s = 0.0  # in all calls together
        self._tokens = corpus.tokens
        self._device = device
        self._loss_of = Unreduced(self.model)
        matrices = [weight for weight in model.transformer.h.parameters() if weight.ndim == 2]
        in_blocks = {id(weight) for weight in matrices}
        rest = [weight for weight in model.parameters() if id(weight) not in in_blocks]
        # One learning rate for both: match_rms_adamw makes Muon's steps as large as AdamW's.
        self.optimizers = [
            torch.optim.Muon(matrices, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]

    def compile(self) -> None:
        """A graph for each of the two window lengths, instead of one slower graph for any."""
        self._loss_of.compile(dynamic=False)

    def train_step(self) -> Tensor:
        """One step; returns its mean loss in nats, still on the device.

        What is read and what is dropped out follow from the seed and the step's number.
        """
        if self.settings.dropout:
            torch.manual_seed(self.settings.seed * 1_000_003 + self.step)
        batch = self._on_device(batch_at(self.settings, self._tokens, self.step))
        with torch.autocast(self._device.type, torch.bfloat16):
            loss: Tensor = self._loss_of(*batch).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.settings.learning_rate_at(self.step)
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    def measure(self, corpus: Corpus) -> dict[str, float]:
        """Bits per byte on the beginnings of the held-out books."""
        self.model.eval()
        with torch.autocast(self._device.type, torch.bfloat16):
            found = {
                book.title: held_out(self.model, corpus.tokenizer, book, self._device, SLICE_WINDOWS)["bits_per_byte"]
                for book in corpus.held_out
            }
        self.model.train()
        return found

    def save(self, path: Path) -> None:
        """Written aside, then renamed: whatever stops this, a whole state is there."""
        aside = path.with_name(f"{path.name}.partial")
        torch.save(
            {
                "settings": dataclasses.asdict(self.settings),
                "config": self.model.config.to_dict(),
                "step": self.step,
                "elapsed_s": self.elapsed_s,
                "model": self.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            },
            aside,
        )
        os.replace(aside, path)

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]

    def _on_device(self, batch: Batch) -> list[Tensor]:
        return [torch.from_numpy(ids).to(self._device) for ids in (batch.ids, batch.targets, batch.positions)]


class Stopped:
    """Whether TERM or INT came; a step is never left half done."""

    signal_number: int | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        def note(number: int, _frame: object) -> None:
            self.signal_number = number

        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit status; 128 and more where a signal stopped it."""
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_float32_matmul_precision("highest")  # what is measured is measured in fp32; training is in bf16 anyway
    try:
        if options.report:
            _, books = split_books(read_books(options.corpus))
            _report(options.report, books, device, options.seed, options.out)
            return 0
        if options.run is None:
            raise StartError("--run DIR says where the run keeps what it makes.")
        return _run(options, device, began)
    except StartError as error:
        err.print(f"[red]train:[/] {error}", soft_wrap=True)
        return 1


def _run(options: argparse.Namespace, device: torch.device, began: float) -> int:
    run: Path = options.run
    run.mkdir(parents=True, exist_ok=True)
    source, shape = _start(options, device)
    with err.status("Preparing the corpus") as status:
        corpus = prepare(
            options.corpus, run, seed=options.seed, tokenizer_from=source, vocab_size=shape["vocab_size"],
            n_ctx=shape["n_ctx"], say=status.update,
        )  # fmt: skip
    shape["vocab_size"] = corpus.tokenizer.get_vocab_size() if source is None else shape["vocab_size"]
    settings = _settings(options, device, source, shape, len(corpus.tokens))
    trainer, is_new = _trainer(run / "state.pt", settings, source, corpus, device)
    how = "eager: --no-compile" if options.no_compile else _try_compiler(device)
    if how == "compiled":
        trainer.compile()
    facts = {"machine": _machine(device), "computed": how}
    first = "from the beginning" if is_new else f"from token {trainer.step * settings.tokens_per_step:,}"
    err.print(
        f"{corpus.facts['num_tokens']:,} tokens in {len(corpus.facts['books'])} books; "
        f"training on {settings.tokens:,}, {first}; {facts['machine']}; {how}.",
        soft_wrap=True,
    )
    if not options.export_only:
        deadline = began + 60 * options.budget_minutes if options.budget_minutes else float("inf")
        signal_number = _train(trainer, corpus, run, 60 * options.eval_minutes, deadline, facts)
        if trainer.step < settings.num_steps:
            err.print(f"Stopped at token {trainer.step * settings.tokens_per_step:,}; the same command goes on.")
            return 128 + signal_number if signal_number else 0
    export(trainer.model, run, run / "checkpoint", options.shard_mb)
    if not options.export_only:
        _report(run / "checkpoint", corpus.held_out, device, options.seed, run / "report.json")
        write_text(run / "card.json", json.dumps(_card(trainer, corpus, source, facts), indent=1, ensure_ascii=False))
        files = " ".join(shlex.quote(str(run / "held-out" / name)) for name in corpus.facts["held_out_files"])
        model = shlex.quote(f"new={run.absolute() / 'checkpoint'}")
        err.print(f"What it saves a writer:\n  tercet bench typist --engine --models {model} {files}", soft_wrap=True)
    return 0


def _train(
    trainer: Trainer, corpus: Corpus, run: Path, eval_s: float, deadline: float, facts: dict[str, Any]
) -> int | None:
    """Until the course or the time is over, or a signal comes; then saves. Returns the signal's number."""
    settings, stopped = trainer.settings, Stopped()
    elapsed_before_s, started = trainer.elapsed_s, time.monotonic()
    losses: list[Tensor] = []
    smoothed: float | None = None
    shown = evaluated = started
    first_step = trainer.step  # since it was last evaluated
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.1f} %")
    with stopped.watching(), Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=settings.num_steps, completed=trainer.step)
        while trainer.step < settings.num_steps:
            losses.append(trainer.train_step())
            now = time.monotonic()
            is_last = trainer.step == settings.num_steps or stopped.signal_number is not None or now >= deadline
            if is_last or now - shown >= SHOWN_EVERY_S:  # reading the loss waits for the device: not each step
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
                "bits_per_byte": trainer.measure(corpus),
                "tokens_per_s": round(per_s, 1),
                "hours_left": round(left_h, 2),
                "elapsed_s": round(trainer.elapsed_s, 1),
                **facts,
            }
            trainer.save(run / "state.pt")
            with (run / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(f"{json.dumps(line)}\n")
            bits = ", ".join(f"{value:.3f}" for value in line["bits_per_byte"].values())
            err.print(f"{line['tokens']:,} tokens: {text}; held out {bits} bits per byte", soft_wrap=True)
            # Measuring and saving is not training.
            started, shown = started + time.monotonic() - shown, time.monotonic()
            evaluated, first_step = shown, trainer.step
            if is_last:
                break
    return stopped.signal_number


def _start(options: argparse.Namespace, device: torch.device) -> tuple[Path | None, dict[str, int]]:
    """The checkpoint to continue from, if any, and the model's shape.

    Raises:
        StartError: the checkpoint is not there, or would have to be of another shape.
    """
    source: Path | None = options.continue_from
    if source is None and not options.from_scratch and device.type == "cpu":
        source = SHIPPED
    asked = {name: value for name in SHAPE if (value := getattr(options, name)) is not None}
    if source is None:
        return None, {**SHAPE, **asked}
    if asked or options.from_scratch:
        raise StartError("A run that continues keeps its checkpoint's shape and tokenizer: --from-scratch begins anew.")
    try:
        config = GPT2Config.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise StartError(f"{source} holds no checkpoint to continue from: {error}.") from error
    return source, {
        "layers": config.n_layer,
        "width": config.n_embd,
        "heads": config.n_head,
        "n_ctx": config.n_positions,
        "vocab_size": config.vocab_size,
    }


def _settings(
    options: argparse.Namespace, device: torch.device, source: Path | None, shape: dict[str, int], num_tokens: int
) -> Settings:
    defaults = DEFAULTS[device.type] | (BEGIN_ANEW if source is None else CONTINUE)
    if options.tokens is not None or options.epochs is not None:
        defaults = {name: value for name, value in defaults.items() if name not in {"tokens", "epochs"}}
    names = {field.name for field in dataclasses.fields(Settings)} | {"epochs"}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    values = {**defaults, **given, **shape, "continue_from": None if source is None else str(source)}
    epochs = values.pop("epochs", None)
    if epochs is not None:
        values.setdefault("tokens", int(epochs * num_tokens))
    return Settings(**values)


def _trainer(
    path: Path, settings: Settings, source: Path | None, corpus: Corpus, device: torch.device
) -> tuple[Trainer, bool]:
    """As it was saved at `path`, else as it begins, and whether it begins.

    Raises:
        StartError: what was saved is of another run, or the model is too large.
    """
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), settings.dropout)
    if path.is_file():
        state = torch.load(path, map_location=device, weights_only=True)
        now = dataclasses.asdict(settings)
        if changed := [name for name in now if state["settings"].get(name) != now[name]]:
            raise StartError(
                f"{path.parent} holds a run with another {', '.join(changed)}: "
                "give what it was begun with, or another --run."
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
                vocab_size=settings.vocab_size, n_positions=settings.n_ctx, n_embd=settings.width,
                n_layer=settings.layers, n_head=settings.heads, **dropout, **ends,
            )
        )  # fmt: skip
    check_size(model)
    return Trainer(model, settings, corpus, device), True


def _try_compiler(device: torch.device) -> str:
    """`compiled`, or why not: torch needs a C++ compiler on a CPU, Triton and a C compiler on a GPU."""
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(64, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        return f"eager: {str(error).strip().splitlines()[0]}"
    return "compiled"


def _report(directory: Path, books: list[Book], device: torch.device, seed: int, out: Path) -> None:
    with err.status("Measuring") as status:
        result = report(directory, books, device, seed, status.update)
    write_text(out, json.dumps(result, indent=1, ensure_ascii=False))
    for table in tables(result):
        err.print(table)
    err.print(f"Written to {out}", soft_wrap=True)


def _card(trainer: Trainer, corpus: Corpus, source: Path | None, facts: dict[str, Any]) -> dict[str, Any]:
    """What a card must say of how the checkpoint came about."""
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
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = f"{models[0] if models else platform.machine()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def _parser() -> argparse.ArgumentParser:
    about = (__doc__ or "").split("\n\n")[1]
    parser = argparse.ArgumentParser(prog="python -m workers.training.train", description=about)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="train.txt.xz")
    add("--run", type=Path, help="directory of the run; the same again goes on with it")
    add("--report", type=Path, metavar="DIR", help="only measure the checkpoint in DIR, by the same means")
    add("--out", type=Path, default=Path("report.json"), help="where --report writes (default: %(default)s)")
    add("--export-only", action="store_true", help="only write RUN/checkpoint from the state that was saved last")
    add("--shard-mb", type=int, default=40, help="largest file of weights in RUN/checkpoint (default: %(default)s)")
    add("--budget-minutes", type=float, help="stop this call after so many minutes; the same command goes on")
    add("--eval-minutes", type=float, default=5.0, help="measure, log and save so often (default: %(default)s)")
    add("--device", choices=["cpu", "cuda"], help="default: the first GPU if there is one")
    add("--no-compile", action="store_true", help="leave torch.compile out")
    course = parser.add_argument_group("what is learnt", "defaults depend on the device, and on where it begins")
    add = course.add_argument
    add("--continue-from", type=Path, metavar="DIR", help="a checkpoint (default on a CPU: the one that ships)")
    add("--from-scratch", action="store_true", help="begin with random weights and a new tokenizer")
    for name in SHAPE:
        add(f"--{name.replace('_', '-')}", type=int)
    length = course.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=int, help="the run's budget in all")
    length.add_argument("--epochs", type=float, help="the same, in passes over the corpus")
    add("--window", type=int, help="tokens")
    add("--batch", type=int, help="windows a step")
    add("--long-share", type=float, default=0.2, help="of the steps, read as longer windows (default: %(default)s)")
    add("--long-window", type=int, help="tokens")
    add("--random-starts", type=float, help="share of windows that begin at a random position")
    add("--learning-rate", type=float)
    add("--weight-decay", type=float, default=0.1, help="of the blocks' matrices (default: %(default)s)")
    add("--dropout", type=float)
    add("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
