"""Every shell block of README.md and docs/ is run as it is written, is run by a test that it names, or says why not.

`make` does less here, because it would take hours: `make serve` reads the settings that the block sets, `make bench`
checks the options, and of other targets make prints what they would run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.api_keys import new_key
from tests.bench.cli import parser
from tests.documentation.blocks import PAGES, Block, blocks, shell_blocks
from tests.e2e.harness import ROOT
from tests.e2e.shared_servers import SharedServer
from tests.programs import run_program

BLOCKS = shell_blocks()
ADDRESS = re.compile(r"\b(?:http://)?(?:localhost|127\.0\.0\.1):8000\b")
TIMEOUT_S = 240.0
PRELUDE = """
set -euo pipefail
curl() { command curl --fail-with-body --silent --show-error "$@"; }
make() {
    case $1 in
    serve) tercet settings >/dev/null ;;
    bench)
        local BENCH=engine ARGS=
        shift
        local "$@"
        echo "$BENCH $ARGS" >>"$BENCHMARKS" ;;
    *) command make --no-print-directory --dry-run "$@" >/dev/null ;;
    esac
}
# The ids of the page are those of its author's server.
new_job() { curl -d '{"prompt": "The old man"}' "$SERVER/jobs" | sed -E 's/.*"id":"([^"]+)".*/\\1/'; }
new_answer() { curl -d '{"context": "The old man"}' "$SERVER/autocomplete" | sed -E 's/.*"id":"([^"]+)".*/\\1/'; }
key_id() { tercet key list | grep -oE '\\b[0-9a-f]{12}\\b' | head -1; }
"""
# What stands for an id of the page.
IDS = {
    "CrfTjP38Dut2GGaj_VBRZmC2": "$(new_job)",
    '\'{"id": "522345978d5acead"': '\'{"id": "\'$(new_answer)\'"',
    "3f9c2a7be104": "$(key_id)",
}


@pytest.fixture
def server(server_with: Callable[..., SharedServer]) -> SharedServer:
    """A server with what the pages set."""
    return server_with(models="embedded*2", origins="https://notes.example", hosts="tercet.example")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_names_its_language(page: Path) -> None:
    assert [str(block) for block in blocks(page) if not block.language] == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.test], ids=str)
def test_the_named_test_exists(block: Block) -> None:
    assert (ROOT / block.test).is_file()


@pytest.mark.integration
@pytest.mark.parametrize("block", [block for block in BLOCKS if not block.test and not block.reason], ids=str)
def test_the_block_runs(block: Block, server: SharedServer, tmp_path: Path) -> None:
    text = ADDRESS.sub(server.url, block.text)
    for documented, command in IDS.items():
        text = text.replace(documented, command)
    benchmarks = tmp_path / "benchmarks"
    benchmarks.touch()
    key, _ = new_key(tmp_path / "keys", "reader", rate=0)
    environ = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SERVER": server.url,
        "BENCHMARKS": str(benchmarks),
        "TERCET_KEYS": str(tmp_path / "keys"),
        "TERCET_API_KEY": key,
        "TERCET_RUN_DIR": str(tmp_path / "run"),
    }
    done = run_program(
        ["bash", "-c", PRELUDE + text], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{block}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    for line in benchmarks.read_text().splitlines():
        parser().parse_args(shlex.split(line))
