"""The service without HTTP: loading, its failures and its choice of a dtype."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared import cpu_features
from shared.errors import NotReady
from shared.plan import Model, Slot
from shared.protocol import Accepted, Done, GenerateRequest, Sampling
from tests.cpus import ZEN_3, pretend
from tests.workers.helpers import EMBEDDED, wait_until
from workers.engine.engine import EngineConfig
from workers.service import SlotService


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., SlotService]]:
    """Makes services of one slot; closes them at the end of the test."""
    made: list[SlotService] = []

    def make(directory: Path = EMBEDDED, *, source: str = "embedded", dtype: str = "fp32") -> SlotService:
        slot = Slot(index=0, device="cpu", model="small", socket="", max_batch=4)
        model = Model(name="small", directory=str(directory), source=source, n_ctx=1024, vocab_size=8192)
        config = EngineConfig(dtype=dtype, max_batch=4, hang_s=0.0)
        made.append(SlotService(slot, model, config, tmp_path / "int8", on_fatal=lambda _: None))
        return made[-1]

    yield make
    for service in made:
        service.close()


def test_a_branch_yields_accepted_and_done_and_is_counted_when_closed(
    make_service: Callable[..., SlotService],
) -> None:
    service = make_service()
    service.start()
    wait_until(lambda: service.is_warm)
    branch = service.submit(GenerateRequest(prompt="The sea", sampling=Sampling(max_new_tokens=3)))
    [accepted, done] = [line for lines in branch for line in lines]  # in one list, if the first output comes in time
    assert isinstance(accepted, Accepted)
    assert isinstance(done, Done)
    assert service.state().counters == {}
    branch.close()
    assert service.state().counters["sequences.length"] == 1
    assert service.close()


def test_a_model_that_cannot_be_loaded_leaves_a_failed_state_with_its_reason(
    make_service: Callable[..., SlotService], tmp_path: Path
) -> None:
    changes: list[str] = []
    service = make_service(tmp_path)
    service.start(on_change=lambda: changes.append(service.state().state))
    wait_until(lambda: service.state().state == "failed")
    state = service.state()
    assert state.reason is not None
    assert "tokenizer.json" in state.reason
    assert changes[:2] == ["loading", "failed"]
    with pytest.raises(NotReady):
        service.submit(GenerateRequest(prompt="a"))
    assert not service.is_warm


def test_loading_backs_off_after_workers_that_died(make_service: Callable[..., SlotService]) -> None:
    with capture_logs() as logs:
        service = make_service()
        service.start(num_failures=3)
        wait_until(lambda: any(line["event"] == "load_delayed" for line in logs))
        assert service.state().state == "loading"
        service.drain(grace_s=0.0)  # ends the pause
        wait_until(service.close)
    assert not any(line["event"] == "model_loaded" for line in logs)
    [delayed] = [line for line in logs if line["event"] == "load_delayed"]
    assert (delayed["failures"], delayed["pause_s"]) == (3, 4.0)


def test_a_service_that_was_never_started_closes(make_service: Callable[..., SlotService]) -> None:
    assert make_service().close()


def _is_warm(service: SlotService) -> bool:
    return service.is_warm


def test_auto_checks_int8_once_and_follows_the_cached_result(
    make_service: Callable[..., SlotService], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(source="directory", dtype="auto")
    service.start()
    wait_until(lambda: service.is_warm)
    assert service.state().dtype == "int8"
    [kept] = (tmp_path / "int8").iterdir()
    kept.write_text(json.dumps({"ratio": 1.5}))
    this_cpu = cpu_features.read()
    for cpu, dtype in ((this_cpu, "bf16" if this_cpu.has_bf16 else "fp32"), (ZEN_3, "fp32")):
        pretend(monkeypatch, cpu)
        again = make_service(source="directory", dtype="auto")
        with capture_logs() as logs:
            again.start()
            wait_until(partial(_is_warm, again))
        assert again.state().dtype == dtype
        [rejected] = [line for line in logs if line["event"] == "int8_rejected"]
        assert (rejected["ratio"], rejected["dtype"]) == (1.5, dtype)
        assert (rejected["bf16_problem"] is None) == (dtype == "bf16")
