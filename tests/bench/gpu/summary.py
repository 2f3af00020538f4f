"""The summary of a run: one JSON document and a page. Pure but for `write`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.gpu.record import StageResult, write_json
from tests.bench.gpu.stages import Stage, step_key

DOCUMENT, PAGE = "gpu-results.json", "summary.md"
BROKEN = ("failed", "timed out", "partial")  # states of a stage
# Stage, row, title, and what is wanted of the ratio to the floor of a step, or to a baseline.
TARGETS = (
    ("decode", step_key("small", 3, 84), "decode step, 3 rows, small, context 84", "at most 2.5 ×"),
    ("decode", step_key("medium", 3, 84), "decode step, 3 rows, medium, context 84", "at most 1.8 ×"),
    ("decode", step_key("small", 96, 150), "decode step, 96 different prompts, small, context 150", "at most 2.5 ×"),
    ("request", "gateway and a-bf16", "whole request ÷ three generate calls, bf16", "at least 25 ×"),
    ("compiled", "gateway and static", "whole request ÷ static cache and compile, bf16", "at least 5 ×"),
)


def targets(results: Mapping[str, StageResult]) -> list[str]:
    """What a run is measured by: Tercet's figure, its ceiling or baseline, their ratio, and what is wanted."""
    rows = {stage: result.rows for stage, result in results.items()}
    found = []
    for stage, name, title, wanted in TARGETS:
        figures = "not measured"
        if (row := rows.get(stage, {}).get(name)) and stage == "decode":
            figures = f"{row['step_us']:g} µs, {row['times_floor']:g} × the floor of {row['floor_us']:g} µs"
        elif row:
            figures = f"{row['gateway_ms']:g} ms, baseline {row['baseline_ms']:g} ms, {row['speedup']:g} ×"
        found.append(f"{title}: {figures}; wanted {wanted}")
    for name, row in sorted(rows.get("seeds", {}).items()):
        equal = f"{row['share_equal']:.1%} of {row['num_texts']} texts are equal"
        found.append(f"same seed alone and among {row['num_in_crowd']}, {name}: {equal}; wanted all")
    return found


def document(results: Mapping[str, StageResult], stages: Sequence[Stage], command: str) -> dict[str, Any]:
    """Everything that is known, as one JSON document."""
    return {
        "bench": "gpu",
        "command": command,
        "is_rehearsal": any(result.is_rehearsal for result in results.values()),
        "targets": targets(results),
        "stages": {
            stage.name: msgspec.to_builtins(results[stage.name], enc_hook=str) if stage.name in results else None
            for stage in stages
        },
    }


def page(found: Mapping[str, Any]) -> str:
    """What is broken, then what was not measured, then the targets, in Markdown."""
    stages = {name: result for name, result in found["stages"].items() if result is not None}
    broken, missing = [], [name for name in found["stages"] if name not in stages]
    for name, result in stages.items():
        broken += [f"{name}: {result['state']}. {result['reason']}"] if result["state"] in BROKEN else []
        broken += [f"{name}: {row}: {why}" for row, why in result["errors"].items()]
        missing += [f"{name}: {row}: {why}" for row, why in result["skipped"].items()]
    lines = [
        f"# {found['command']}",
        "",
        *(["A rehearsal: its figures mean nothing."] if found["is_rehearsal"] else []),
    ]
    for title, entries in (("Broken", broken), ("Not measured", missing), ("Targets", found["targets"])):
        lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries or ["nothing"])]
    return "\n".join(lines) + "\n"


def write(out: Path, found: Mapping[str, Any]) -> Path:
    """Write the document and the page; returns the page's path."""
    write_json(out / DOCUMENT, found)
    (out / PAGE).write_text(page(found), "utf-8")
    return out / PAGE
