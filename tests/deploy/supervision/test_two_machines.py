"""A machine of workers and one of a gateway, by the commands of docs/DISTRIBUTED.md; this machine is both.

tests/chaos has what fails between the two.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.blocks import blocks
from tests.e2e.harness import ROOT, free_port, until
from tests.programs import run_program

WARM_S = 150.0


@pytest.mark.deploy
def test_the_documented_commands(short_tmp_path: Path) -> None:
    """As they are written, but for addresses and the model."""
    port = free_port()
    changes = {"workers.example": "localhost", ":8100": f":{free_port()}", ":8000": f":{port}", "small": "embedded"}
    texts = [block.text for block in blocks(ROOT / "docs/DISTRIBUTED.md") if block.test.endswith(Path(__file__).name)]
    for old, new in changes.items():
        texts = [text.replace(old, new) for text in texts]
    make_files, workers, gateway, request = texts
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "TERCET_DEVICES": "cpu",
        "TERCET_JOBS": "none",
        "TERCET_DRAIN_S": "0.1",
    }
    environ = {**kept, **own, "TERCET_BIND": f"127.0.0.1:{port}"}
    subprocess.run(["bash", "-euc", make_files], cwd=short_tmp_path, check=True, capture_output=True)
    running: list[subprocess.Popen[bytes]] = []
    with (short_tmp_path / "log").open("wb") as log:
        for script in (workers, gateway):
            environ["TERCET_RUN_DIR"] = str(short_tmp_path / f"run{len(running)}")
            command = ["bash", "-euc", script]
            running.append(
                subprocess.Popen(command, cwd=short_tmp_path, env=environ, stdout=log, stderr=log, process_group=0)
            )
    try:
        ask = ["bash", "-c", request]
        until(lambda: '"sentences":[{' in run_program(ask).stdout, WARM_S, "an answer")
    finally:
        for process in reversed(running):
            os.killpg(process.pid, signal.SIGINT)
            process.wait(40)
