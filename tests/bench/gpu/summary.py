"""The summary of a run: one JSON document, one page of markdown, one archive of all files. Pure but for `collect`."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.gpu.context import LOGS, RESULTS
from tests.bench.gpu.record import StageResult
from tests.bench.gpu.stages import Stage, step_key

PAGE, DOCUMENT, ARCHIVE = "summary.md", "gpu-results.json", "gpu-results.tar.gz"
# A file that comes back from a machine must be below 16 MiB.
MAX_FILE_BYTES = 15 << 20
# Row of stage `decode` → at most how many times its floor.
STEP_TARGETS = {
    step_key("small", 3, 84): ("decode step, 3 rows, small, context 84", 2.5),
    step_key("medium", 3, 84): ("decode step, 3 rows, medium, context 84", 1.8),
    step_key("small", 96, 150): ("decode step, 96 different prompts, small, context 150", 2.5),
}
REQUEST_TARGETS = {
    ("request", "gateway and a-bf16"): ("whole request ÷ three generate calls, bf16", 25.0),
    ("compiled", "gateway and static"): ("whole request ÷ static cache and compile, bf16", 5.0),
}


def targets(results: Mapping[str, StageResult]) -> list[dict[str, Any]]:
    """What a run is measured by, each with its ceiling or baseline, Tercet's figure and their ratio."""
    found = []
    for name, (title, bound) in STEP_TARGETS.items():
        row = _row(results, "decode", name)
        found.append(_target(title, "at most", bound, row, "times_floor", ("floor_us", "step_us"), "µs", "floor"))
    for (stage, name), (title, bound) in REQUEST_TARGETS.items():
        row = _row(results, stage, name)
        found.append(_target(title, "at least", bound, row, "speedup", ("baseline_ms", "gateway_ms"), "ms", "baseline"))
    for name, row in sorted(_rows(results, "seeds").items()):
        found.append(
            {
                "title": f"same seed alone and among {row['num_in_crowd']}: equal texts, {name}",
                "against": "all equal",
                "ours": f"{row['share_equal']:.1%} of {row['num_texts']}",
                "ratio": row["share_equal"],
                "bound": "1",
                "is_met": row["share_equal"] == 1,
            }
        )
    return found


def _stage_row(name: str, stage: Mapping[str, Any] | None) -> tuple[object, ...]:
    if stage is None:
        return (name, "not run", "", "", "", "", "")
    counts = (len(stage[part]) for part in ("rows", "errors", "skipped"))
    return (name, stage["state"], *counts, _number(stage["elapsed_s"]), stage["reason"])


def _target(
    title: str,
    sense: str,
    bound: float,
    row: Mapping[str, Any] | None,
    ratio: str,
    fields: tuple[str, str],
    unit: str,
    against: str,
) -> dict[str, Any]:
    entry: dict[str, Any] = {"title": title, "bound": f"{sense} {bound:g} ×", "is_met": None}
    if row is None:
        return entry | {"against": "", "ours": "not measured", "ratio": None}
    value = row[ratio]
    return entry | {
        "against": f"{against} {row[fields[0]]:g} {unit}",
        "ours": f"{row[fields[1]]:g} {unit}",
        "ratio": value,
        "is_met": value <= bound if sense == "at most" else value >= bound,
    }


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


def markdown(found: Mapping[str, Any]) -> str:
    """The page of a document."""
    lines = ["# GPU run", ""]
    if found["is_rehearsal"]:
        lines += ["Rehearsal without a GPU: no figure on this page says anything about a GPU.", ""]
    lines += [f"    {found['command']}", ""]
    lines += _table(
        ("target", "ceiling or baseline", "Tercet", "ratio", "wanted", "met"),
        [
            (row["title"], row["against"], row["ours"], _number(row["ratio"]), row["bound"], _verdict(row["is_met"]))
            for row in found["targets"]
        ],
    )
    stages = found["stages"]
    lines += ["", "## Stages", ""]
    lines += _table(
        ("stage", "state", "rows", "errors", "left out", "s", "reason"),
        [_stage_row(name, stage) for name, stage in stages.items()],
    )
    for name, stage in stages.items():
        if stage is None:
            continue
        lines += ["", f"## {name}", ""]
        lines += [f"- **{row}**: {_short(values)}" for row, values in stage["rows"].items()]
        lines += [f"- **{row}** failed: {why}" for row, why in stage["errors"].items()]
        lines += [f"- **{row}** left out: {why}" for row, why in stage["skipped"].items()]
    return "\n".join(lines) + "\n"


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]


def _short(values: Any) -> str:
    text = msgspec.json.encode(values).decode()
    return text if len(text) <= 600 else f"{text[:600]} … (all of it in {DOCUMENT})"


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _verdict(is_met: bool | None) -> str:
    return "" if is_met is None else "yes" if is_met else "no"


def _rows(results: Mapping[str, StageResult], stage: str) -> dict[str, dict[str, Any]]:
    return results[stage].rows if stage in results else {}


def _row(results: Mapping[str, StageResult], stage: str, name: str) -> dict[str, Any] | None:
    return _rows(results, stage).get(name)


def collect(out: Path, found: Mapping[str, Any], target: Path | None = None) -> list[Path]:
    """Write the page, the document and the archive to `out`; returns the files that must come back.

    Args:
        target: directory that gets a copy of them.
    """
    _replace(out / PAGE, markdown(found).encode())
    _replace(out / DOCUMENT, msgspec.json.format(msgspec.json.encode(found, enc_hook=str), indent=1))
    part = out / f"{ARCHIVE}.part"
    with tarfile.open(part, "w:gz") as archive:
        results, logs = sorted((out / RESULTS).glob("*.json")), sorted((out / LOGS).glob("*"))
        for path in [out / PAGE, out / DOCUMENT, *results, *logs]:
            if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                archive.add(path, arcname=str(path.relative_to(out)))
    part.replace(out / ARCHIVE)
    files = [out / PAGE, out / DOCUMENT, out / ARCHIVE]
    if target is not None:
        target.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copy2(path, target / f"{path.name}.part")
            os.replace(target / f"{path.name}.part", target / path.name)
    return files


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
