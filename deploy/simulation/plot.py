"""The plot of a scale run: what a cell does as writers are added, and machines for each number of writers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deploy.load.plot import DPI
from deploy.simulation.scale import CellRow, ScaleRow


def plot_scale(cells: Sequence[CellRow], rows: Sequence[ScaleRow], title: str, path: Path) -> None:
    """Three panels over the number of writers: latency of a cell, its use, and machines in all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    latency, use, machines = figure.subplots(1, 3)
    writers = [cell.num_writers for cell in cells]
    latency.plot(writers, [cell.p50_ms for cell in cells], marker="o", label="p50")
    latency.plot(writers, [cell.p99_ms for cell in cells], marker="o", label="p99")
    latency.set(xlabel="writers of a cell", ylabel="ms", yscale="log", title="latency of an answer")
    use.plot(writers, [100 * cell.gateway_busy for cell in cells], marker="o", label="gateway's core")
    use.plot(writers, [100 * cell.workers_busy for cell in cells], marker="o", label="workers' cores")
    use.plot(writers, [100 * cell.answered for cell in cells], marker="o", label="keys answered")
    use.set(xlabel="writers of a cell", ylabel="%", title="what a cell uses")
    totals = [row.num_writers for row in rows]
    machines.plot(totals, [row.worker_machines for row in rows], marker="o", label="worker machines")
    machines.plot(totals, [row.gateway_machines for row in rows], marker="o", label="gateway machines")
    machines.set(xlabel="writers", xscale="log", yscale="log", title="machines")
    for axes in (latency, use, machines):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=DPI)
