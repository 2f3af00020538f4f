"""How much of the code a request crosses, within the limits of pyproject.toml."""

from __future__ import annotations

import tomllib

import pytest

from tests.crossing import Event, cross, crossing_of
from tests.sizes import ROOT

pytestmark = pytest.mark.integration


def test_a_request_crosses_no_more_than_the_limits() -> None:
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["tercet"]["crossing"]
    crossing = cross(ROOT)
    assert {"gateway/api/autocomplete.py", "gateway/pool/client.py", "workers/engine/core.py"} < crossing.lengths.keys()
    branches = [pair for pair in crossing.handovers if "branch" in "".join(pair)]
    assert len(branches) == 4, "to the branches and back, on both sides; or the trace lacks events"
    assert len(crossing.lengths) <= limits["files"]
    assert len(crossing.handovers) <= limits["handovers"], crossing.handovers
    assert max(crossing.lengths.values()) <= limits["longest_file_lines"]


def test_a_wake_counts_once_and_only_if_work_follows() -> None:
    def trace(*steps: tuple[str, str, str, str]) -> list[Event]:
        return [
            Event(at_ns, "gateway", "1", thread, f"1.{thread}", what, name, detail)
            for at_ns, (thread, what, name, detail) in enumerate(steps)
        ]

    work = str(ROOT / "gateway/app.py"), "f"
    events = trace(
        ("states", "wakes", "put", "6"),  # of another request
        ("main", "woken", "get", "6"),
        ("main", "call", *work),
        ("main", "wakes", "put", "7"),
        ("answer_1", "woken", "get", "7"),
        ("answer_1", "call", *work),
        ("main", "wakes", "put", "8"),
        ("answer_2", "woken", "get", "8"),
        ("answer_2", "call", *work),
        ("answer_2", "wakes", "put", "9"),
        ("main", "woken", "get", "9"),
        ("main", "call", str(ROOT / "gateway/app.py"), "idle"),
    )
    crossing = crossing_of(events, {("gateway, main", str(ROOT / "gateway/app.py"), "idle")}, ROOT)
    assert crossing.files == {"gateway, main": ["gateway/app.py"], "gateway, answer": ["gateway/app.py"]}
    assert crossing.handovers == [("gateway, main", "gateway, answer")]
