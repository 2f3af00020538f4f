"""The fan-out over real slot clients and stub workers on Unix sockets."""

from __future__ import annotations

from unittest.mock import Mock

import structlog

from gateway.generation.fanout import Fanout
from gateway.generation.request import BranchFailure, RequestContext
from gateway.metrics import Metrics
from gateway.pool.admission import Admission
from tests.gateway.generation.specs import make_spec


def test_an_unexpected_exception_is_logged_in_full_and_fails_its_branch() -> None:
    """A bug in the gateway itself, which no worker can provoke: a fake admission raises."""
    admission = Mock(spec=Admission)
    admission.reserve.side_effect = [[], ZeroDivisionError("a bug")]
    fanout = Fanout([], admission, Mock(spec=Metrics), num_threads=1)
    context = RequestContext(make_spec(prompt="a secret prompt", num_completions=1))
    with structlog.testing.capture_logs() as logged:
        fanout.start(context)
        failure = context.next_event()
    assert isinstance(failure, BranchFailure)
    assert failure.code == "internal_error"
    assert "r1" in failure.detail
    [line] = logged
    assert isinstance(line["exc_info"], ZeroDivisionError)
    assert "secret" not in str(line)
