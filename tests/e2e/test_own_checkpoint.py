"""A checkpoint of the user's own, given by its directory, and no dtype: what `TERCET_MODELS=x=<directory>` starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import running

EMBEDDED = "workers/checkpoints/embedded"


def test_an_own_checkpoint_starts_without_a_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where the check's result is cached
    with running(tmp_path, models=f"x={EMBEDDED}", dtype="") as tercet:
        [slot] = tercet.slots()
        assert len(tercet.ask(length=4)["sentences"]) == 3
    assert (slot["model"], slot["dtype"]) == ("x", "int8")  # on every CPU
    [measured] = tercet.events("int8_measured")
    assert measured["ratio"] < 1.01
