"""`tercet calibrate`: findings on standard error, the settings on standard output, as lines of an environment file."""

from __future__ import annotations

import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.table import Table

from deploy.calibrate import feedback
from deploy.calibrate.feedback import Bucket, read_buckets
from deploy.calibrate.fit import Group, Outcome, fit_temperature, fit_threshold, log_loss
from deploy.calibrate.predictions import Moment, judge, read_moments
from deploy.gateway_client import gateway_client
from deploy.load.passages import choose_passages
from deploy.terminal import make_console
from shared.errors import StartError
from shared.settings import Settings
from shared.worker_environment import cache_directory

# An assumption, not a measurement. A glance takes about a quarter of a second: 1.25 keys, at five keys a second. A
# writer who glances at three suggestions at every fourth moment pays 0.1 keys for each.
DEFAULT_PRICE_KEYS = 0.1
NUM_PREDICTIONS = 3  # of a request, as the page asks for them
# Not the seed of the passages that the benchmark of keystroke savings reports by default.
SEED = 1

err = make_console(stderr=True)


def calibrate(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Prose unknown to the model.", exists=True, dir_okay=False, show_default=False),
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
    models: Annotated[str, typer.Option(help="Model to calibrate, as in TERCET_MODELS.")] = "embedded",
) -> None:
    """Fit TERCET_PREDICT_TEMPERATURE and TERCET_MIN_USEFULNESS, and print them as lines of an environment file.

    On prose: the temperature with the least log-loss of the predicted words' probabilities, and the threshold from
    which on suggestions save more keys than --price. With --metrics: the threshold alone, by what writers accepted
    and kept.
    """
    if metrics is not None:
        if files:
            raise typer.BadParameter("takes no prose", param_hint="--metrics")
        _calibrate_by_feedback(metrics, price)
        return
    if not files:
        raise typer.BadParameter("name prose, or --metrics", param_hint="FILES")
    specs = Settings.load({"TERCET_MODELS": models}).model.models
    if len(specs) != 1 or specs[0].count != 1:
        raise typer.BadParameter("name one model, without a count", param_hint="--models")
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    chosen = choose_passages(texts, passages, words, random.Random(SEED))
    cache = cache_directory(Settings.load(os.environ))
    _calibrate_by_prose(read_moments(specs[0], chosen, NUM_PREDICTIONS, err, cache), price)


def _calibrate_by_prose(moments: Sequence[Moment], price: float) -> None:
    """Fit the temperature to all words of the predictions, then the threshold to what is shown with it.

    Raises:
        StartError: there is no prediction, or no threshold pays.
    """
    continuations = [(moment.following, each) for moment in moments for each in moment.continuations]

    def judged(temperature: float) -> Iterator[tuple[float, list[Outcome]]]:
        """Usefulness and words of each prediction, as it is shown with a temperature."""
        for following, continuation in continuations:
            if (words := continuation.words(temperature)) is not None:
                yield words.usefulness, judge(words, following)

    outcomes = [outcome for _, words in judged(1.0) for outcome in words]
    if not outcomes:
        raise StartError("The model predicts no word in these passages; name longer prose.")
    temperature = round(fit_temperature(outcomes), 3)
    err.print(
        f"{len(outcomes)} predicted words at {len(moments)} moments: log-loss {log_loss(outcomes, 1.0):.4f} nats at "
        f"temperature 1, {log_loss(outcomes, temperature):.4f} at {temperature:g}."
    )
    sys.stdout.write(f"TERCET_PREDICT_TEMPERATURE={temperature:g}\n")
    saved_keys: dict[float, list[int]] = defaultdict(list)
    for usefulness, words in judged(temperature):
        saved_keys[usefulness].append(max((word.end for word in words if word.is_right), default=1) - 1)
    groups = [Group(usefulness, len(saved), sum(saved)) for usefulness, saved in saved_keys.items()]
    threshold = fit_threshold(groups, price)
    if threshold is None:
        raise StartError(f"No threshold pays: no suggestions save more than {price:g} keys on average. Lower --price.")
    shown = [group for group in groups if group.usefulness >= threshold]
    num_shown, num_all = (sum(group.num_shown for group in part) for part in (shown, groups))
    err.print(
        f"From {threshold:.2f} keys on, {num_shown} of {num_all} suggestions are shown; each saves "
        f"{sum(group.saved_keys for group in shown) / num_shown:.2f} keys on average."
    )
    _write_threshold(threshold)


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
    _write_threshold(threshold)


def buckets_table(buckets: Sequence[Bucket], price: float) -> Table:
    """What became of predictions, by usefulness."""
    table = Table("usefulness, keys", title="Feedback on predictions")
    for heading in (
        "shown",
        "accepted",
        "reports of kept",
        "kept characters of each",
        "keys saved by each shown",
        f"less the price of {price:g}",
    ):
        table.add_column(heading, justify="right")
    for bucket in buckets:
        saved = bucket.saved_keys
        table.add_row(
            f"above {bucket.bound:g}",
            *(str(bucket.num(action)) for action in ("shown", "accepted", "kept")),
            _number(bucket.kept_characters),
            _number(saved),
            _number(None if saved is None else saved - price),
        )
    return table


def _exposition(source: str) -> str:
    """The text of a file or, with the key of `TERCET_API_KEY`, of a URL."""
    if not source.startswith(("http://", "https://")):
        try:
            return Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartError(f"--metrics {source} cannot be read ({error}).") from error
    with gateway_client(Settings.load(os.environ), os.environ) as client:
        try:
            response = client.get(source)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise StartError(f"No server answers at {source} ({error}).") from error
    if response.status_code == 401:
        raise StartError(f"{source} needs an API key: set TERCET_API_KEY.")
    if response.is_error:
        raise StartError(f"{source} answers with status {response.status_code}.")
    return response.text


def _write_threshold(threshold: float) -> None:
    sys.stdout.write(f"TERCET_MIN_USEFULNESS={round(threshold, 2):g}\n")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
