"""`tercet calibrate`: tables on standard error, the settings on standard output, as lines of an environment file."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.table import Table

from deploy.calibrate import feedback
from deploy.calibrate.feedback import Bucket, read_buckets
from deploy.calibrate.fit import (
    Bin,
    Outcome,
    Suggestion,
    ThresholdRow,
    fit_temperature,
    fit_threshold,
    log_loss,
    reliability,
    threshold_row,
)
from deploy.calibrate.predictions import Moment, judge, read_moments
from deploy.gateway_client import local_client
from deploy.load import plot
from deploy.load.corpus import read_held_out
from deploy.load.options import Options
from deploy.load.passages import choose_passages
from deploy.terminal import make_console
from shared.errors import StartError
from shared.settings import Settings

# An assumption, not a measurement. A glance takes about a quarter of a second: 1.25 keys, at five keys a second. A
# writer who glances at three suggestions at every fourth moment pays 0.1 keys for each.
DEFAULT_PRICE_KEYS = 0.1
THRESHOLDS_KEYS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
NUM_BINS = 10
WORD_NAMES = ("first", "second", "third and later")

err = make_console(stderr=True, width=None if sys.stderr.isatty() else 120)


@dataclass(frozen=True, slots=True)
class Fit:
    """What is fitted to texts, and what the tables and the plot show.

    Attributes:
        outcomes: words of the predictions, by the words' place in `WORD_NAMES`.
        rows: of the fitted threshold and `THRESHOLDS_KEYS`, the lowest first.
    """

    temperature: float
    threshold: float | None
    outcomes: Sequence[Sequence[Outcome]]
    rows: Sequence[ThresholdRow]

    @property
    def all_outcomes(self) -> list[Outcome]:
        return [outcome for outcomes in self.outcomes for outcome in outcomes]


def calibrate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Prose unknown to the model.", exists=True, dir_okay=False, show_default=False),
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            help="Training corpus, as for `make embedded`: its held-out books are read if there is no other prose.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Instead of prose: URL of /metrics, or a file of its text; fits the threshold to feedback."),
    ] = None,
    price: Annotated[
        float, typer.Option(min=0, help="Keys that reading a suggestion costs the writer, whether it is taken or not.")
    ] = DEFAULT_PRICE_KEYS,
    passages: Annotated[int, typer.Option(min=1, help="Number of passages of each file.")] = 12,
    words: Annotated[int, typer.Option(min=1, help="Number of words of each passage.")] = 100,
    samples: Annotated[int, typer.Option(min=1, max=8, help="Suggestions of each request.")] = 3,
    models: Annotated[str, typer.Option(help="Model to calibrate, as in TERCET_MODELS.")] = "embedded",
    # Not the seed of the passages that `make bench BENCH=typist` reports by default.
    seed: Annotated[int, typer.Option(help="Seed of the passages.")] = 1,
    plot_path: Annotated[
        Path | None,
        typer.Option("--plot", help="Also write a reliability diagram to this PNG file.", dir_okay=False),
    ] = None,
) -> None:
    """Fit TERCET_PREDICT_TEMPERATURE and TERCET_MIN_USEFULNESS, and print them as lines of an environment file.

    On prose: the temperature with the least log-loss of the predicted words' probabilities, and the threshold from
    which on suggestions save more keys than --price. With --metrics: the threshold alone, by what writers accepted
    and kept.
    """
    if metrics is not None:
        if files or corpus is not None or plot_path is not None:
            raise typer.BadParameter("takes no prose and no --plot", param_hint="--metrics")
        _calibrate_by_feedback(metrics, price)
        return
    if plot_path is not None:
        plot.check(plot_path)
    texts = {path.name: path.read_text(encoding="utf-8") for path in files or []}
    if corpus is not None and not texts:
        texts = read_held_out(corpus)
    if not texts:
        raise typer.BadParameter("name prose, a corpus with held-out books, or --metrics", param_hint="FILES")
    options = Options(models=models)
    options.load_settings()
    moments = read_moments(options, choose_passages(texts, passages, words, random.Random(seed)), samples, err)
    found = fit(moments, price)
    err.print(probability_table(found), thresholds_table(found.rows, len(moments), price))
    if plot_path is not None:
        plot_reliability(found, models, plot_path)
    lines = [_temperature_line(found.temperature)]
    if found.threshold is not None:
        lines.append(_threshold_line(found.threshold))
    sys.stdout.write("".join(lines))
    if found.threshold is None:
        raise StartError(f"No threshold pays: no suggestions save more than {price:g} keys on average. Lower --price.")


def fit(moments: Sequence[Moment], price: float) -> Fit:
    """Fit the temperature to all words of the predictions, then the threshold to what is shown with it.

    Raises:
        StartError: there is no prediction.
    """
    outcomes: list[list[Outcome]] = [[] for _ in WORD_NAMES]
    for moment in moments:
        for continuation in moment.continuations:
            if (words := continuation.words(1.0)) is not None:
                for word in judge(words, moment.following):
                    own = outcomes[min(word.number, len(outcomes) - 1)]
                    own.append(Outcome(word.logprob, word.is_right))
    if not any(outcomes):
        raise StartError("The model predicts no word in these passages; name longer prose.")
    temperature = round(fit_temperature([outcome for own in outcomes for outcome in own]), 3)
    suggestions = judged_suggestions(moments, temperature)
    threshold = fit_threshold(suggestions, price)
    if threshold is not None:
        threshold = round(threshold, 2)
    thresholds = sorted({*THRESHOLDS_KEYS, *(() if threshold is None else (threshold,))})
    return Fit(temperature, threshold, outcomes, [threshold_row(suggestions, len(moments), one) for one in thresholds])


def judged_suggestions(moments: Sequence[Moment], temperature: float) -> list[Suggestion]:
    """What the predictions are worth, as they are shown with a temperature."""
    suggestions = []
    for index, moment in enumerate(moments):
        for continuation in moment.continuations:
            if (words := continuation.words(temperature)) is not None:
                num_right = max((word.end for word in judge(words, moment.following) if word.is_right), default=1)
                suggestions.append(Suggestion(index, words.usefulness, num_right - 1))
    return suggestions


def probability_table(found: Fit) -> Table:
    """Predicted and observed probabilities, by place of the word."""
    raw, fitted = (log_loss(found.all_outcomes, temperature) for temperature in (1.0, found.temperature))
    table = Table(
        "word", title="Predicted words, right with all words before them",
        caption=f"Log-loss {raw:.4f} nats at temperature 1, {fitted:.4f} at {found.temperature:.3f}",
    )  # fmt: skip
    for heading in ("number", "right", "predicted, temperature 1", f"temperature {found.temperature:.3f}"):
        table.add_column(heading, justify="right")
    for name, outcomes in zip(WORD_NAMES, found.outcomes, strict=True):
        if outcomes:
            [raw_bin], [bin_] = (reliability(outcomes, one, 1) for one in (1.0, found.temperature))
            shares = (bin_.observed, raw_bin.predicted, bin_.predicted)
            table.add_row(name, str(len(outcomes)), *(f"{share:.1%}" for share in shares))
    return table


def thresholds_table(rows: Sequence[ThresholdRow], num_moments: int, price: float) -> Table:
    """A row for each threshold, with what is left of the keys saved after the price."""
    table = Table("threshold, keys", title=f"Suggestions shown at {num_moments} moments, one at each key")
    headings = (
        "shown at",
        "accepted",
        "suggestions",
        "keys saved by each",
        f"per 100 moments, at a price of {price:g}",
    )
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        net = 100 * row.shown * (row.num_per_moment or 0) * ((row.saved_keys or 0) - price)
        table.add_row(
            f"{row.threshold:g}", f"{row.shown:.1%}", "" if row.accepted is None else f"{row.accepted:.1%}",
            _number(row.num_per_moment), _number(row.saved_keys), f"{net:.1f}",
        )  # fmt: skip
    return table


def plot_reliability(found: Fit, models: str, path: Path) -> None:
    """Observed over predicted probability, with the temperature 1 and the fitted one; the diagonal is perfect."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axis = figure.subplots()
    axis.plot([0, 1], [0, 1], color="black", linewidth=1)
    for temperature in (1.0, found.temperature):
        bins: list[Bin] = reliability(found.all_outcomes, temperature, NUM_BINS)
        axis.plot([one.predicted for one in bins], [one.observed for one in bins], marker="o",
                  label=f"temperature {temperature:g}")  # fmt: skip
    axis.set_xlabel("predicted probability of a word and all before it")
    axis.set_ylabel("share that was right")
    axis.legend()
    figure.suptitle(f"{models}, {len(found.all_outcomes)} predicted words", fontsize=9)
    figure.savefig(path, dpi=plot.DPI)


def buckets_table(buckets: Sequence[Bucket], price: float) -> Table:
    """What became of predictions, by usefulness."""
    table = Table("usefulness, keys", title="Feedback on predictions")
    for heading in ("shown", "accepted", "reports of kept", "kept characters of each", "keys saved by each shown",
                    f"less the price of {price:g}"):  # fmt: skip
        table.add_column(heading, justify="right")
    for bucket in buckets:
        saved = bucket.saved_keys
        table.add_row(
            f"above {bucket.bound:g}", *(str(bucket.num(action)) for action in ("shown", "accepted", "kept")),
            _number(bucket.kept_characters), _number(saved), "" if saved is None else f"{saved - price:.2f}",
        )  # fmt: skip
    return table


def _calibrate_by_feedback(source: str, price: float) -> None:
    """
    Raises:
        StartError: the metrics cannot be read, there is too little feedback, or no threshold pays.
    """
    buckets = read_buckets(_exposition(source))
    err.print(buckets_table(buckets, price))
    threshold = feedback.fit_threshold(buckets, price)
    if threshold is None:
        raise StartError(f"No threshold pays: no bucket saves more than {price:g} keys per suggestion. Lower --price.")
    sys.stdout.write(_threshold_line(threshold))


def _exposition(source: str) -> str:
    """The text of a file or, with the key of `TERCET_API_KEY`, of a URL."""
    if not source.startswith(("http://", "https://")):
        try:
            return Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"--metrics {source} cannot be read ({error}).") from error
    with local_client(Settings.load(os.environ), os.environ) as client:
        try:
            response = client.get(source)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise StartError(f"No server answers at {source} ({error}).") from error
    if response.status_code == 401:
        raise StartError(f"{source} needs an API key: set TERCET_API_KEY.")
    if response.is_error:
        raise StartError(f"{source} answers with status {response.status_code}.")
    return response.text


def _temperature_line(temperature: float) -> str:
    return f"TERCET_PREDICT_TEMPERATURE={temperature:g}\n"


def _threshold_line(threshold: float) -> str:
    return f"TERCET_MIN_USEFULNESS={threshold:g}\n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
