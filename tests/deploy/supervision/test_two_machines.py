"""A machine of workers and one of a gateway, by the commands of docs/DISTRIBUTED.md; this machine is both.

tests/chaos has what fails between the two.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.cloud.test_moving import environ_of
from tests.documentation.blocks import blocks
from tests.e2e.harness import ROOT, free_port, until
from tests.programs import run_program, running_script

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
    environ = {**environ_of(short_tmp_path), "TERCET_DEVICES": "cpu", "TERCET_BIND": f"127.0.0.1:{port}"}
    run_program(["bash", "-euc", make_files], cwd=short_tmp_path, check=True)
    log_path = short_tmp_path / "log"
    workers_own, gateway_own = ({**environ, "TERCET_RUN_DIR": str(short_tmp_path / name)} for name in ("w", "g"))
    with (
        running_script(workers, short_tmp_path, workers_own, log_path),
        running_script(gateway, short_tmp_path, gateway_own, log_path),
    ):
        ask = ["bash", "-c", request]
        until(lambda: '"sentences":[{' in run_program(ask).stdout, WARM_S, "an answer")
