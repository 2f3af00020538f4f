"""A server gives the same answers with the kernels of every instruction set that this CPU has."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import cpu_features
from tests.bench.quality.replay import PROSE, differences, record
from tests.e2e.harness import running


@pytest.mark.timeout(600)
def test_200_seeded_answers_are_the_same_with_every_instruction_set(short_tmp_path: Path) -> None:
    """The embedded checkpoint in int8. Plain C is slow, and compared only where there is nothing else."""
    best, *others = (one.name for one in cpu_features.read().instruction_sets)
    recorded = short_tmp_path / "answers"
    with running(short_tmp_path / best, dtype="int8", test_instruction_set=best) as tercet:
        record(tercet.url, PROSE.read_text(encoding="utf-8"), ["embedded"], recorded)
    for name in others[:-1] or others:
        with running(short_tmp_path / name, dtype="int8", test_instruction_set=name) as tercet:
            assert differences(tercet.url, recorded) == (200, [])
