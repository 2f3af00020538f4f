"""`--plot FILE` of `engine`, `http` and `typist`: panels of horizontal bars, drawn by Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from shared.errors import StartError
from tests.bench.run import BenchDocument, format_number

Panel = tuple[str, Mapping[str, float]]  # title with the unit, label → value
SCALE = 2  # pixels of a point, for screens of high resolution
WIDTH, LABEL_WIDTH, ROW, MARGIN, FONT_SIZE = 980, 480, 22, 14, 13
BAR, TEXT = "#4c78a8", "#222222"


def save_plot(document: BenchDocument, path: Path) -> None:
    """Draw a benchmark's figures.

    Raises:
        StartError: the file cannot be written, or its name ends in no image format.
    """
    panels = [(title, bars) for title, bars in PANELS[document.bench](document) if bars]
    height = MARGIN + sum(ROW * (len(bars) + 1) + MARGIN for _, bars in panels)
    image = Image.new("RGB", (SCALE * WIDTH, SCALE * height), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(SCALE * FONT_SIZE)
    y = MARGIN
    for title, bars in panels:
        draw.text((SCALE * MARGIN, SCALE * y), title, TEXT, font)
        longest = max(bars.values()) or 1.0
        for label, value in bars.items():
            y += ROW
            draw.text((SCALE * MARGIN, SCALE * y), label.replace("÷", "/"), TEXT, font)  # the font has no ÷
            right = LABEL_WIDTH + (WIDTH - LABEL_WIDTH - 5 * MARGIN) * value / longest
            box = (SCALE * LABEL_WIDTH, SCALE * y, SCALE * max(LABEL_WIDTH, right), SCALE * (y + ROW - 5))
            draw.rectangle(box, BAR)
            draw.text((SCALE * (right + 5), SCALE * y), format_number(value), TEXT, font)
        y += ROW + MARGIN
    try:
        image.save(path)
    except (OSError, ValueError) as error:
        raise StartError(f"--plot {path}: {error}.") from error


def _engine(document: BenchDocument) -> list[Panel]:
    series = document.series.values()
    times = {each.label: each.median for each in series if each.unit == "ms"}
    ratios = {
        row.target.title: row.figure for row in document.rows if row.figure is not None and row.target.unit == "×"
    }
    return [("Median time, ms", times), ("Ratio to the baseline or the ceiling", ratios)]


def _http(document: BenchDocument) -> list[Panel]:
    rows = {f"{row.workload}, clients: {row.num_clients}": row for row in document.rows}
    return [
        ("Requests per second", {label: row.qps for label, row in rows.items()}),
        ("Latency p50, ms", {label: row.p50_ms for label, row in rows.items()}),
        ("Latency p99, ms", {label: row.p99_ms for label, row in rows.items()}),
    ]


def _typist(document: BenchDocument) -> list[Panel]:
    files = dict.fromkeys(row.file for row in document.rows)
    return [
        (
            f"Keystroke savings, %: {file}",
            {
                f"{row.rule}, {row.model}, suggestions: {row.num_suggestions}": 100 * row.share
                for row in document.rows
                if row.file == file
            },
        )
        for file in files
    ]


PANELS = {"engine": _engine, "http": _http, "typist": _typist}
