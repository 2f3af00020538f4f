"""The alerts' runbook. `test_prometheus` runs the queries of the alerts and of the dashboard."""

from __future__ import annotations

import re

import yaml

from tests.e2e.harness import ROOT

GRAFANA = ROOT / "deploy" / "grafana"


def test_every_alert_has_a_section_in_the_runbook() -> None:
    rules = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/OPERATIONS.md").read_text(), re.MULTILINE)
    assert {heading for heading in headings if heading.startswith("Tercet")} == {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"docs/OPERATIONS.md#{rule['alert'].lower()}"
