"""The results of a run are kept, continued and forgotten."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.tune.state import State, alone, run_key
from shared.errors import StartError
from tests.deploy.tune.figures import candidate, measurement


def test_a_run_continues_with_its_own_results(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tune.jsonl"
    state = State(path, "a", is_new=False)
    state.add(candidate(1), measurement=measurement())
    state.add(candidate(2), failure="no room")
    State(path, "b", is_new=False).add(candidate(4), measurement=measurement())
    again = State(path, "a", is_new=False)
    assert again.outcomes == {candidate(1): measurement(), candidate(2): "no room"} == state.outcomes
    again.add(candidate(1), measurement=measurement((70, 80, 120, 220)))
    again.add(candidate(1), measurement=measurement((60, 70, 110, 210)))
    assert again.num_passes == {candidate(1): 3}
    merged = again.outcomes[candidate(1)]
    assert not isinstance(merged, str)
    assert merged.light_ms == 60


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    state = State(path, "a", is_new=False)
    state.add(candidate(1), measurement=measurement())
    state.add(candidate(2), measurement=measurement())
    path.write_bytes(path.read_bytes()[:-40])
    again = State(path, "a", is_new=False)
    again.add(candidate(4), failure="no room")
    assert State(path, "a", is_new=False).outcomes == {candidate(1): measurement(), candidate(4): "no room"}


def test_a_new_run_forgets_its_own_results_only(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    for run in ("a", "b"):
        State(path, run, is_new=False).add(candidate(1), measurement=measurement())
    assert State(path, "a", is_new=True).outcomes == {}
    assert State(path, "b", is_new=False).outcomes == {candidate(1): measurement()}


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="--state"):
        State(tmp_path / "file" / "tune.jsonl", "a", is_new=False)
    with pytest.raises(StartError, match="--state"), alone(tmp_path / "file" / "tune.jsonl"):
        pass


def test_two_runs_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    code = f"from pathlib import Path; from deploy.tune.state import alone; alone(Path({str(path)!r})).__enter__()"
    with alone(path):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Another `tercet tune` is running" in done.stderr
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_key_depends_on_every_value() -> None:
    assert run_key({"a": 1, "b": 2}) == run_key({"b": 2, "a": 1})
    assert run_key({"a": 1, "b": 2}) != run_key({"a": 1, "b": 3})
