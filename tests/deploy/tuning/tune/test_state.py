"""The results of a run are kept, continued and forgotten."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from deploy.tuning.tune.state import State, run_key
from shared.errors import StartError
from tests.deploy.tuning.tune.figures import candidate, measurement


def state(path: Path, run: str = "a", *, is_new: bool = False) -> closing[State]:
    return closing(State(path, run, is_new=is_new))


def test_a_run_continues_with_its_own_results(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tune.json"
    with state(path) as first:
        first.add(candidate(1), measurement=measurement())
        first.add(candidate(2), failure="no room")
        assert first.outcomes == {candidate(1): measurement(), candidate(2): "no room"}
    with state(path, "b") as other:
        other.add(candidate(4), measurement=measurement())
    with state(path) as again:
        assert again.outcomes == first.outcomes
        again.add(candidate(1), measurement=measurement((70, 80, 120, 220)))
        again.add(candidate(1), measurement=measurement((60, 70, 110, 210)))
        merged = again.outcomes[candidate(1)]
    assert not isinstance(merged, str)
    assert (merged.light_ms, merged.num_passes) == (60, 3)


def test_a_file_in_another_format_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    path.write_bytes(b'{"run": "a"}\n{"run": "b"}\n')
    with state(path) as first:
        first.add(candidate(4), failure="no room")
    with state(path) as known:
        assert known.outcomes == {candidate(4): "no room"}


def test_a_new_run_forgets_its_own_results_only(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    for run in ("a", "b"):
        with state(path, run) as first:
            first.add(candidate(1), measurement=measurement())
    with state(path, is_new=True) as again:
        again.add(candidate(2), failure="no room")
    with state(path) as known:
        assert known.outcomes == {candidate(2): "no room"}
        with pytest.raises(StartError, match="Another `tercet tune` is running"):
            state(path, "b")
    with state(path, "b") as other:
        assert other.outcomes == {candidate(1): measurement()}


def test_a_directory_that_cannot_be_written_is_refused_and_the_key_depends_on_every_value(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="--state"):
        state(tmp_path / "file" / "tune.json")
    assert run_key({"a": 1, "b": 2}) == run_key({"b": 2, "a": 1})
    assert run_key({"a": 1, "b": 2}) != run_key({"a": 1, "b": 3})
