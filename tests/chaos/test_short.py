"""Rows of docs/RELIABILITY.md in the short form, with few pools; `-s` prints their figures.

Deadlines have the bounds of the table; a row adds how late a sleeping thread woke up in this process meanwhile
(`measure.Jitter`). Speed (latencies under load, goodput) is printed and not asserted: `make chaos` judges it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.measure import Context
from tests.chaos.registry import ROWS

pytestmark = pytest.mark.timeout(600)
# tests/e2e/test_pools.py kills workers, too
SHORT_ROWS = ("R6", "R7", "R26", "R27", "R28", "R30")


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Context]:
    context = Context(tmp_path_factory.mktemp("c"), "short", seed=1)
    yield context
    context.close()


@pytest.mark.parametrize("name", SHORT_ROWS)
def test_the_promise_holds_in_the_short_form(name: str, context: Context) -> None:
    [row] = [row for row in ROWS if row.name == name]
    result = row.run(context)
    print(f"\n{result.markdown()}")
    assert [shortfall for shortfall in result.shortfalls if shortfall not in result.slow] == []
