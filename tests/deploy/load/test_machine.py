"""The description of the machine."""

from __future__ import annotations

import os

import pytest

from deploy.load.machine import busy_s, process_cpu_s


def test_cpu_time_of_a_process_counts_its_ended_children() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    stat = "7 (a name (x)) S 1 7 7 0 -1 4194560 100 200 0 0 30 4 500 6 20 0 1 0 1234 5 6\n"
    assert process_cpu_s(stat) == pytest.approx(540 / ticks)


def test_busy_time_leaves_out_idle_and_iowait() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_s("cpu  10 1 20 500 99 2 3 4 0 0\ncpu0 1 1\n") == pytest.approx(40 / ticks)
