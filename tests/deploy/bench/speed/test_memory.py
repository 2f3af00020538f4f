"""`tercet bench memory` against a real server. No size is asserted that depends on the machine."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

from deploy.bench.speed.memory import read_pss_mb

ROOT = Path(__file__).parents[4]


def test_every_process_of_a_server_is_measured_at_rest_and_after_requests() -> None:
    command = [sys.executable, "-m", "deploy", "bench", "memory", "--requests", "2", "--set", "cache_mb=300"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["process"]: row for row in json.loads(done.stdout)}
    assert rows.keys() == {
        *("supervisor", "master of the workers", "master of the gateway", "gateway", "worker: embedded")
    }
    for row in rows.values():
        assert 0 < row["at_rest_anonymous_mb"] < row["at_rest_mb"]
        assert row["afterwards_mb"] > 0
    assert max(rows.values(), key=lambda row: float(row["at_rest_mb"]))["process"] == "worker: embedded"
    assert "after 2 requests" in done.stderr


def test_memory_counts_once_it_is_used() -> None:
    before, _ = read_pss_mb(os.getpid())
    pages = mmap.mmap(-1, 100_000_000, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    reserved, _ = read_pss_mb(os.getpid())
    assert reserved - before < 50
    pages[:] = bytes(100_000_000)
    used, _ = read_pss_mb(os.getpid())
    assert used - before > 90
