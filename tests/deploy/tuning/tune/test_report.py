"""What `tercet tune` prints: tables, notes, environment lines."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console, RenderableType

from deploy.tuning.load.run import Document
from deploy.tuning.load.workload import W
from deploy.tuning.tune.report import comments, environment, table, unmet
from deploy.tuning.tune.results import Candidate, Load
from deploy.tuning.tune.search import Choice, Goal
from deploy.tuning.tune.trial import Result, Trial
from shared.setting_values import ModelSpec
from shared.settings import Settings
from tests.deploy.tuning.tune.figures import candidate, figures, measurement
from workers.checkpoints.resolve import resolve


def shown(renderable: RenderableType) -> str:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_a_table_has_patsnaps_columns() -> None:
    lines = shown(table("a plan", [figures(Load(clients=4), 40, 100), figures(Load(rate_qps=12.34), 12, 60, 3)]))
    for heading in ("concurrency", "QPS", "max", "min", "average", "p50", "p90", "p99", "errors"):
        assert heading in lines
    assert "12.3/s, Poisson" in lines
    [row] = [line for line in lines.splitlines() if "4 clients" in line]
    assert row.replace("│", " ").split() == ["4", "clients", "40.0", "200", "50", "100", "100", "100", "200", "0"]


def test_the_lines_to_paste_are_settings() -> None:
    on_gpus = Candidate(("cuda:0", "cuda:1"), 2, 0, 24, "spread")
    subject = resolve("embedded")
    trial = Trial(ModelSpec("small"), subject, True, W, {}, [1], None, 1.0)
    lines = environment(trial, Result({}, [], Choice(on_gpus, "the best"), is_complete=True))
    assert lines == [
        "TERCET_MODELS=small*2",
        "TERCET_DEVICES=cuda:0,cuda:1",
        "TERCET_MAX_BATCH=24",
        "TERCET_PLACEMENT=spread",
    ]
    settings = Settings.load(dict(line.split("=", 1) for line in lines))
    assert settings.model.models == (ModelSpec("small", None, 2),)
    assert settings.pool.max_batch == 24
    assert environment(trial, Result({}, [], None, is_complete=True)) == []


@pytest.mark.parametrize(
    ("is_quick", "others_share", "is_complete", "found"),
    [
        (False, 0.01, True, []),
        (True, 0.01, True, ["# Quick run:"]),
        (False, 0.3, True, ["# The machine was shared:"]),
        (True, 0.3, False, ["# Quick run:", "# The machine was shared:", "# --budget was spent"]),
    ],
)
def test_the_file_says_why_it_is_not_to_be_relied_on(
    is_quick: bool, others_share: float, is_complete: bool, found: list[str]
) -> None:
    document = Document(bench="tune", is_quick=is_quick, model="embedded", device="cpu", settings={}, workload={})
    document.machine = msgspec.structs.replace(document.machine, others_share_of_cores=others_share)
    lines = comments(Result({}, [], None, is_complete), document)
    assert len(lines) == len(found)
    assert all(line.startswith(start) for line, start in zip(lines, found, strict=True))


def test_an_unmet_goal_says_what_was_asked_and_what_can_be_had() -> None:
    text = unmet(Goal(30, 90), {candidate(1): measurement()})
    assert "holds --slo-ms 30 at --qps 90: the most that one answered is 40.0 requests/s" in text
    assert "the least average latency 50 ms" in text
