"""Pictures of a result. matplotlib is a developer's dependency: it is imported when a plot is asked for."""

from __future__ import annotations

from pathlib import Path

from deploy.bench.harness.levels import Level
from deploy.bench.harness.report import Document
from deploy.bench.harness.targets import Row
from deploy.bench.quality.typist import Saved
from shared.errors import StartError

DPI = 144


def check(path: Path) -> None:
    """
    Raises:
        StartError: no plot could be written there at the end; said before anything is measured.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise StartError("--plot needs matplotlib: `make setup` installs it.") from error
    if not path.parent.is_dir():
        raise StartError(f"--plot {path}: {path.parent} is not a directory.")


def plot_rows(document: Document, rows: list[Row], path: Path) -> None:
    """Two panels: times, on a logarithmic scale, and figures as shares of what they must be."""
    from matplotlib.figure import Figure

    times = [one for one in document.series.values() if one.unit == "ms"]
    shown = [row for row in rows if row.figure is not None]
    figure = Figure(figsize=(11, 1.5 + 0.32 * (len(times) + len(shown))), layout="constrained")
    axes = figure.subplots(2, 1, height_ratios=[max(1, len(times)), max(1, len(shown))])
    axes[0].barh(
        [one.label for one in times], [one.median for one in times], color=[_colour(one.label) for one in times]
    )
    if times:
        axes[0].set_xscale("log")
    axes[0].set_xlabel("median, ms")
    # Above 1 is better, whichever side of its bound a row must be on.
    shares = [
        row.figure / row.target.must if row.target.sense == "at least" else row.target.must / row.figure
        for row in shown
        if row.figure
    ]
    axes[1].barh(
        [row.target.title for row in shown], shares, color=["#4a8" if share >= 1 else "#c54" for share in shares]
    )
    axes[1].axvline(1, color="black", linewidth=1)
    axes[1].set_xlabel("figure against what it must be (1: just met; more is better)")
    for axis in axes:
        axis.invert_yaxis()
    _save(figure, document, path)


def plot_levels(document: Document, levels: list[Level], path: Path) -> None:
    """Two panels over the number of clients: requests a second with their ceiling, and latencies."""
    from matplotlib.figure import Figure

    numbers = [level.num_clients for level in levels]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(numbers, [level.qps for level in levels], marker="o", label="ours")
    bounded = [level for level in levels if level.ceiling_qps is not None]
    left.plot(
        [level.num_clients for level in bounded], [level.ceiling_qps or 0 for level in bounded],
        linestyle="--", marker=".", label="ceiling: linear layers alone",
    )  # fmt: skip
    left.set_ylabel("requests per second")
    for name in ("p50", "p90", "p99"):
        right.plot(numbers, [getattr(level, f"{name}_ms") for level in levels], marker="o", label=name)
    right.plot(
        numbers, [level.first_token_p50_ms for level in levels], marker=".", linestyle=":", label="first token, p50"
    )
    right.set_ylabel("ms")
    for axis in (left, right):
        axis.set_xlabel("clients at once")
        axis.set_ylim(bottom=0)
        axis.legend()
    _save(figure, document, path)


def plot_saved(document: Document, rows: list[Saved], path: Path) -> None:
    """For each text, bars by number of suggestions, with their confidence intervals; any latency."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.budget_ms is None]
    files = list(dict.fromkeys(row.file for row in shown))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    for number in sorted({row.num_suggestions for row in shown}):
        own = [row for row in shown if row.num_suggestions == number]
        places = [files.index(row.file) + 0.25 * (number - 2) for row in own]
        errors = [[row.share - row.low for row in own], [row.high - row.share for row in own]]
        axis.bar(places, [row.share for row in own], 0.22, yerr=errors, label=f"{number} shown", capsize=2)
    axis.set_xticks(range(len(files)), files)
    axis.set_ylabel("share of keystrokes saved")
    axis.legend()
    _save(figure, document, path)


def _save(figure: object, document: Document, path: Path) -> None:
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    quick = ", quick: not to be quoted" if document.is_quick else ""
    figure.suptitle(f"{document.model}, {document.machine.cores} cores of {document.machine.cpu}{quick}", fontsize=9)
    figure.savefig(path, dpi=DPI)


def _colour(label: str) -> str:
    """One for each kind of contender."""
    return {"ours": "#4a8", "ceiling": "#88a"}.get(label.partition(":")[0], "#bbb")
