"""What a branch's own trouble becomes: told to the request, and logged in full."""

from __future__ import annotations

import time
from unittest.mock import Mock

import structlog

from gateway.generation.fanout import BranchSpec, Fanout, GenerationSpec, RequestContext
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from shared.protocol import BranchFailure, Sampling


def test_a_branch_that_breaks_is_logged_and_told() -> None:
    """A bug in the gateway itself, which nothing real can provoke: a fake admission raises."""
    admission = Mock(spec=Admission)
    admission.reserve.side_effect = [[], ZeroDivisionError("a bug")]
    fanout = Fanout([], admission, Mock(spec=Metrics), num_threads=1)
    run = RequestContext(GenerationSpec("r1", "m", "a secret prompt", 10, deadline=time.monotonic() + 5))
    with structlog.testing.capture_logs() as logged:
        fanout.start(run, [BranchSpec(0, 1, Sampling())])
        heard = run.next()
    assert isinstance(heard, BranchFailure)
    assert heard.code == "internal_error"
    assert "r1" in heard.detail
    [line] = logged
    assert isinstance(line["exc_info"], ZeroDivisionError)
    assert "secret" not in str(line)
