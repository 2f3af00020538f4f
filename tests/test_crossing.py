"""How much of the code a request crosses, within the limits of pyproject.toml."""

from __future__ import annotations

import tomllib

import pytest

from tests.crossing import cross
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
