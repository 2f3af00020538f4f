"""A slot's app over a real service in this process (embedded checkpoint, fp32), and how its tests call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from shared.cancellation import HangupWatcher
from shared.plan import Model, Slot
from shared.protocol import Done, GenerateLine, GenerateRequest
from tests.workers.contract import Endpoint
from tests.workers.faults import Faults
from tests.workers.helpers import EMBEDDED, wait_until
from workers.app import SlotApp
from workers.engine.engine import EngineConfig
from workers.service import ACCEPTED_DELAY_S, SlotService

HANGUPS = HangupWatcher()


def make_service(
    directory: Path = EMBEDDED,
    *,
    kind: type[SlotService] = SlotService,
    source: str = "embedded",
    revision: str = "",
    dtype: str = "fp32",
    cache: Path | None = None,
    max_batch: int = 4,
    step_delay_s: float = 0.0,
    accepted_delay_s: float = ACCEPTED_DELAY_S,
) -> SlotService:
    slot = Slot(index=3, device="cpu", model="embedded", socket="", max_batch=max_batch)
    model = Model("embedded", str(directory), source, n_ctx=1024, vocab_size=8192, revision=revision)
    config = EngineConfig(dtype=dtype, max_batch=max_batch, hang_s=0.0)

    def fail(error: BaseException) -> None:
        raise error

    return kind(
        slot, model, config, cache, runners=Faults(step_delay_s), on_fatal=fail, accepted_delay_s=accepted_delay_s
    )


@contextmanager
def warm_service(**settings: Any) -> Iterator[SlotService]:
    service = make_service(**settings)
    service.start(age=7)
    wait_until(lambda: service.is_warm)
    try:
        yield service
    finally:
        assert service.close()


def lines_of(service: SlotService, prompt: str | None, **fields: Any) -> list[GenerateLine]:
    """The lines of a branch, which is closed at its end."""
    branch = service.submit(GenerateRequest(prompt=prompt, **fields))
    try:
        return [line for lines in branch for line in lines]
    finally:
        branch.close()


def done_of(service: SlotService, prompt: str | None, **fields: Any) -> Done:
    """The last line of a branch that does not fail."""
    done = lines_of(service, prompt, **fields)[-1]
    assert isinstance(done, Done), done
    return done


@contextmanager
def endpoint_of(service: SlotService) -> Iterator[Endpoint]:
    """The slot's app as an endpoint, without a server and a socket."""
    with httpx.Client(transport=httpx.WSGITransport(SlotApp(service, HANGUPS))) as client:
        yield Endpoint("http://slot", client=client)


def metric(endpoint: Endpoint, name: str, **labels: str) -> float:
    """A sample of the slot's metrics, 0 if it is absent."""
    text = endpoint.client.get(f"{endpoint.url}/metrics").text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    found = [sample.value for sample in samples if (sample.name, sample.labels) == (name, {"slot": "3", **labels})]
    return found[0] if found else 0.0
