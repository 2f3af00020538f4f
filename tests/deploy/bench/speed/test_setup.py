"""`tercet bench setup` on small checkouts of the tests' own, whose `make serve` takes seconds instead of a minute."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from deploy.bench.speed.setup import SetupRow, first_serve_s, measure_setups, setup_table
from shared.errors import StartError

SERVER = """
import http.server, os, pathlib, time

assert not pathlib.Path(os.environ["PIP_CACHE_DIR"]).exists()
assert "TERCET_KEYS" not in os.environ

with open(os.environ["STARTED"], "a") as started:
    started.write(f"{os.getpid()}\\n")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/ready" and time.monotonic() > ready_at else 503)
        self.end_headers()

ready_at = time.monotonic() + 1
host, port = os.environ["TERCET_BIND"].split(":")
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


@pytest.fixture
def commit(tmp_path: Path) -> Callable[[str], Path]:
    def commit(recipe: str) -> Path:
        root = tmp_path / "checkout"
        root.mkdir()
        (root / "Makefile").write_text(f"serve:\n\t@{recipe}\n")
        (root / "server.py").write_text(SERVER)
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "First"]):
            identity = ["-c", "user.name=Test", "-c", "user.email=test@localhost"]
            subprocess.run(["git", *identity, *command], cwd=root, check=True)
        return root

    return commit


def test_the_time_ends_when_the_server_is_ready_and_the_server_is_stopped(
    commit: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    monkeypatch.setenv("STARTED", str(started))
    monkeypatch.setenv("TERCET_KEYS", "/keys")
    root = commit("exec $(PYTHON) server.py")
    turns: list[str] = []
    rows = measure_setups({"this": root, "other": root}, 2, turns.append)
    assert turns == ["this", "other"] * 2
    assert [len(row.seconds) for row in rows] == [2, 2]
    assert all(seconds > 1 for row in rows for seconds in row.seconds)
    pids = started.read_text().split()
    assert len(pids) == 4
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_a_set_up_that_fails_is_reported_with_its_output(commit: Callable[[str], Path]) -> None:
    root = commit("echo no wheel for this Python; exit 1")
    with pytest.raises(StartError, match="no wheel for this Python"):
        first_serve_s(root)


def test_the_table_has_medians_and_their_ratio() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(setup_table([SetupRow("this", [40.0, 45.0, 50.0]), SetupRow("other", [90.0])]))
    shown = console.export_text()
    assert "45.0" in shown
    assert "0.50" in shown
