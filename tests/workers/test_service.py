"""The service without HTTP: loading, its failures and its choice of a dtype."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared import cpu_features
from shared.errors import NotReady
from shared.protocol import Accepted, Done, GenerateRequest, Sampling
from tests.cpus import ZEN_3, pretend
from tests.workers.helpers import wait_until
from tests.workers.slots import make_service, warm_service


def test_a_branch_yields_accepted_and_done_and_is_counted_when_closed() -> None:
    with warm_service() as service:
        branch = service.submit(GenerateRequest(prompt="The sea", sampling=Sampling(max_new_tokens=3)))
        [accepted, done] = [line for lines in branch for line in lines]  # in one list, if the first is ready in time
        assert isinstance(accepted, Accepted)
        assert isinstance(done, Done)
        assert service.state().counters == {}
        branch.close()
        assert service.state().counters["sequences.length"] == 1


def test_a_model_that_cannot_be_loaded_leaves_a_failed_state_with_its_reason(tmp_path: Path) -> None:
    changes: list[str] = []
    with closing(make_service(tmp_path)) as service:
        service.start(on_change=lambda: changes.append(service.state().state))
        wait_until(lambda: service.state().state == "failed")
        state = service.state()
        assert state.reason is not None
        assert "tokenizer.json" in state.reason
        assert changes[:2] == ["loading", "failed"]
        with pytest.raises(NotReady):
            service.submit(GenerateRequest(prompt="a"))
        assert not service.is_warm


@pytest.mark.parametrize(
    ("num_failures", "pause_s", "state", "reason"),
    [(2, 2.0, "loading", ""), (3, 4.0, "failed", "3 workers in a row ended before they had loaded embedded")],
)
def test_loading_backs_off_after_workers_that_died(num_failures: int, pause_s: float, state: str, reason: str) -> None:
    with capture_logs() as logs:
        service = make_service()
        service.start(num_failures=num_failures)
        wait_until(lambda: any(line["event"] == "load_delayed" for line in logs))
        wait_until(lambda: service.state().state == state)
        assert reason in (service.state().reason or "")
        service.drain(grace_s=0.0)  # ends the pause
        wait_until(service.close)
    assert not any(line["event"] == "model_loaded" for line in logs)
    [delayed] = [line for line in logs if line["event"] == "load_delayed"]
    assert (delayed["failures"], delayed["pause_s"]) == (num_failures, pause_s)


def test_a_service_that_was_never_started_closes() -> None:
    assert make_service().close()


def test_auto_checks_int8_once_and_follows_the_cached_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with warm_service(source="directory", dtype="auto", cache=tmp_path) as service:
        assert service.state().dtype == "int8"
    [kept] = tmp_path.glob("*-int8.json")
    kept.write_text(json.dumps({"ratio": 1.5}))
    this_cpu = cpu_features.read()
    for cpu, dtype in ((this_cpu, "bf16" if this_cpu.has_bf16 else "fp32"), (ZEN_3, "fp32")):
        pretend(monkeypatch, cpu)
        with capture_logs() as logs, warm_service(source="directory", dtype="auto", cache=tmp_path) as again:
            assert again.state().dtype == dtype
        [rejected] = [line for line in logs if line["event"] == "int8_rejected"]
        assert (rejected["ratio"], rejected["dtype"]) == (1.5, dtype)
        assert (rejected["bf16_problem"] is None) == (dtype == "bf16")
