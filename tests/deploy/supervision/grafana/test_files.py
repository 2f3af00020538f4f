"""The alerts' runbook, and their panels. `test_prometheus` runs the queries of the alerts and of the dashboard."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.e2e.harness import ROOT

GRAFANA = ROOT / "deploy/supervision/grafana"


def read_rules() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"][0]["rules"]
    return rules


def test_every_alert_has_a_section_in_the_runbook() -> None:
    rules = read_rules()
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/RUNBOOKS.md").read_text(), re.MULTILINE)
    assert {heading for heading in headings if heading.startswith("Tercet")} == {rule["alert"] for rule in rules}
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"docs/RUNBOOKS.md, section {rule['alert']}"


def test_every_metric_of_an_alert_is_on_a_panel() -> None:
    """After an alert, the dashboard is the next place to look. `up` is a metric of Prometheus itself."""
    panels = json.loads((GRAFANA / "dashboard.json").read_text())["panels"]
    shown = " ".join(target["expr"] for panel in panels for target in panel.get("targets", []))
    watched = {name for rule in read_rules() for name in re.findall(r"\btercet_\w+", rule["expr"])}
    assert watched - {*re.findall(r"\btercet_\w+", shown)} == set()
