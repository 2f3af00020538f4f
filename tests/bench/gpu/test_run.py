"""`gpu` from end to end without a GPU: cut off, continued, collected.

Its processes have the stand-in for `torch.cuda`, so graphs are captured and events are read. The times mean nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu.commands import run_command
from tests.bench.gpu.context import Context
from tests.bench.gpu.record import Skipped, read_result
from tests.bench.gpu.requests import _count_answers_with_mps
from tests.bench.gpu.smoke import _find_memory_errors
from tests.bench.gpu.stages import STAGES, step_key
from tests.programs import write_program
from tests.workers.engine.cuda.fake_cuda import process_environment

ROOT = Path(__file__).parents[3]
WAIT_S = 120.0
ENOUGH_ROWS = 2


MAX_PART_S = 560
# Stand-ins for NVIDIA's tools. The first runs its command; the second is a service until it is asked to quit.
TOOLS = {
    "compute-sanitizer": 'shift 4; "$@"; echo "========= ERROR SUMMARY: 0 errors"',
    "nvidia-cuda-mps-control": """\
cd "$CUDA_MPS_PIPE_DIRECTORY"
if [ $# = 0 ]; then
    read command; echo "$command" >"$(dirname "$0")/asked"; rm control
else
    touch control; while [ -e control ]; do sleep 0.1; done
fi""",
}


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.bench", "gpu", "--rehearse", "--out", str(out), *arguments],
        cwd=ROOT,
        env={**os.environ, **process_environment()},
        text=True,
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def rows_of(out: Path, stage: str) -> dict[str, Any]:
    found = read_result(out / "results" / f"{stage}.json")
    return {} if found is None else found.rows


def test_a_stage_has_the_pins_of_cublas_in_its_environment(tmp_path: Path) -> None:
    script = "import os; print(*(os.environ[name] for name in ('PATH', 'CUBLAS_WORKSPACE_CONFIG')))"
    done = run_command([sys.executable, "-c", script], 60, tmp_path / "log", STAGES["pinned"].environment)
    assert done.last_line == f"{os.environ['PATH']} :16:8"


def test_a_part_ends_within_ten_minutes() -> None:
    for part in "AB":
        assert sum(stage.limit_s for stage in STAGES.values() if stage.part == part) <= MAX_PART_S


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for measure in (_count_answers_with_mps, _find_memory_errors):
        with pytest.raises(Skipped, match="is not on this machine"):
            measure(Context.rehearsal(tmp_path))


def test_stages_with_servers_and_tools_run_as_far_as_a_cpu_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, body in TOOLS.items():
        write_program(tmp_path / name, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    output, log = start(tmp_path, "--only", "faults,memory,cold,mps,memcheck").communicate(timeout=4 * WAIT_S)
    stages = json.loads(output)["stages"]
    assert {row: why for stage in stages.values() for row, why in stage["errors"].items()} == {}, log
    assert stages["faults"]["rows"].keys() == {"killed", "device error"}
    assert all(row["warm_s"] <= row["answered_s"] for row in stages["faults"]["rows"].values())
    assert stages["memory"]["skipped"].keys() == {"1.05 × plan", "0.9 × plan"}
    assert stages["cold"]["rows"]["serve"]["second_s"] > 0
    assert stages["mps"]["rows"]["2 per GPU"]["has_mps"]
    assert (tmp_path / "asked").read_text() == "quit\n"
    assert stages["memcheck"]["rows"]["self-check"]["num_errors"] == 0


def test_a_run_that_is_cut_off_keeps_its_rows_and_is_continued(tmp_path: Path) -> None:
    """SIGTERM in the middle of a stage; the second run measures what is missing, and nothing else."""
    out = tmp_path / "out"
    first = start(out, "--only", "decode,prefill")
    deadline = time.monotonic() + WAIT_S
    while len(rows_of(out, "decode")) < ENOUGH_ROWS and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.02)
    before = rows_of(out, "decode")
    first.send_signal(signal.SIGTERM)
    _, log = first.communicate(timeout=WAIT_S)
    assert first.returncode == 128 + signal.SIGTERM, log
    cut_off = read_result(out / "results" / "decode.json")
    assert cut_off is not None
    assert cut_off.state == "partial"
    assert len(cut_off.rows) >= ENOUGH_ROWS
    assert json.loads((out / "gpu-results.json").read_bytes())["stages"]["decode"]["state"] == "partial"

    second = start(out, "--only", "decode,prefill")
    output, log = second.communicate(timeout=WAIT_S)
    assert second.returncode == 0, log
    document = json.loads(output)
    decode = document["stages"]["decode"]
    assert decode["state"] == "done", decode
    context = Context.rehearsal(out)
    wanted = {step_key("embedded", *point) for point in product(context.row_counts, context.context_lengths)}
    assert decode["rows"].keys() == wanted
    assert {name: decode["rows"][name] for name in before} == before
    for row in decode["rows"].values():
        assert row["times_floor"] == pytest.approx(row["step_us"] / row["floor_us"], rel=0.01)
    assert document["is_rehearsal"]
    assert document["stages"]["prefill"]["state"] == "done"
    assert "## Broken\n\n- nothing\n" in (out / "summary.md").read_text()
