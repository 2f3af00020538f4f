"""`tercet top` and `/slots` with a real server: one frame, the live view in a terminal, and what a worker reports."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import psutil

from tests.e2e.harness import ROOT, Tercet, until

TOP = [sys.executable, "-m", "deploy", "top"]


def test_once_prints_a_frame(tercet: Tercet) -> None:
    tercet.ask()
    done = subprocess.run(
        [*TOP, "--once", "--url", tercet.url, "--interval", "0.1"], cwd=ROOT, capture_output=True, text=True,
        timeout=60, check=False, env={**tercet.environ, "COLUMNS": "120"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"Tercet at {tercet.url}" in done.stdout
    for words in ("requests/s", "waiting", "embedded", "cpu", "/48"):
        assert words in done.stdout


def test_without_a_server_it_says_so() -> None:
    done = subprocess.run(
        [*TOP, "--once", "--url", "http://127.0.0.1:9"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "No server answers at http://127.0.0.1:9" in done.stderr


def test_the_live_view_ends_with_q(tercet: Tercet) -> None:
    terminal, side = pty.openpty()
    with subprocess.Popen(
        [*TOP, "--url", tercet.url, "--interval", "0.1"], cwd=ROOT, env={**tercet.environ, "TERM": "xterm"},
        stdin=side, stdout=side, stderr=side, close_fds=True,
    ) as process:  # fmt: skip
        os.close(side)
        shown = b""
        while b"q ends" not in shown:
            shown += os.read(terminal, 65536)
        assert b"\x1b[?1049h" in shown  # the alternate screen
        os.write(terminal, b"q")
        while b"\x1b[?1049l" not in shown:
            shown += os.read(terminal, 65536)
        assert process.wait(timeout=20) == 0
    os.close(terminal)


def test_a_worker_reports_its_memory_and_its_branches(tercet: Tercet) -> None:
    for row in tercet.slots():
        rss = psutil.Process(row["pid"]).memory_info().rss  # more than the proportional set size by what is shared
        assert 0.3 * rss < row["memory_bytes"] < 1.1 * rss
    tercet.ask(length=60)
    # For about a second after the request.
    assert sum(row["peak_in_flight"] for row in tercet.slots()) >= 3
    until(lambda: not any(row["peak_in_flight"] for row in tercet.slots()), 10, "slots at rest")
