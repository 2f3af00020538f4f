"""The dashboard's layout, and the alerts' runbook. `test_prometheus` runs the queries.

The dashboard was valid against the JSON schemas of grafana-foundation-sdk (f178d5a42: dashboard, timeseries, stat,
heatmap, prometheus) when it was written.
"""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import yaml

from tests.e2e.harness import ROOT

GRAFANA = ROOT / "deploy" / "grafana"


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    dashboard = json.loads((GRAFANA / "dashboard.json").read_text())
    panels: list[dict[str, Any]] = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, two in combinations((panel["gridPos"] for panel in panels), 2):
        is_beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        is_below = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert is_beside or is_below, (one, two)


def test_every_alert_has_a_section_in_the_runbook() -> None:
    rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/OPERATIONS.md").read_text(), re.MULTILINE)
    assert {heading for heading in headings if heading.startswith("Tercet")} == {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"docs/OPERATIONS.md#{rule['alert'].lower()}"
