"""The description of the machine."""

from __future__ import annotations

import os

import pytest

from deploy.tuning.load.run import busy_s


def test_busy_time_leaves_out_idle_and_iowait() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    assert busy_s("cpu  10 1 20 500 99 2 3 4 0 0\ncpu0 1 1\n") == pytest.approx(40 / ticks)
