"""The states of a starting instance's slots, for `tercet serve`: from its gateway, or from the workers themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
from rich.table import Table

from deploy.gateway_client import local_client
from shared import wire
from shared.plan import Plan
from shared.settings import Settings

TIMEOUT_S = 1.0


class SlotStates:
    """Reads the states of a plan's slots, in rows with the keys `slot`, `model`, `device`, `state`, `progress` and
    `reason`."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], plan: Plan, roles: tuple[str, ...]) -> None:
        self._plan = plan
        self._gateway: httpx.Client | None = None
        self._workers: list[httpx.Client] = []
        if "gateway" in roles:
            self._gateway = local_client(settings, environ, timeout_s=TIMEOUT_S)
            return
        for slot in plan.slots:
            transport = httpx.HTTPTransport(uds=slot.socket)
            client = httpx.Client(transport=transport, base_url="http://slot", timeout=TIMEOUT_S, trust_env=False)
            self._workers.append(client)

    def read(self) -> list[dict[str, Any]] | None:
        """A row for each slot; None while a process does not answer."""
        try:
            if self._gateway is None:
                return [self._worker_row(index, client) for index, client in enumerate(self._workers)]
            rows: list[dict[str, Any]] = self._gateway.get("/ping").json()["slots"]
            return [row for row in rows if row["slot"] < len(self._plan.slots)]  # the others are remote
        except (httpx.TransportError, msgspec.MsgspecError, ValueError, KeyError):
            return None

    def close(self) -> None:
        for client in [*self._workers, *filter(None, [self._gateway])]:
            client.close()

    def _worker_row(self, index: int, client: httpx.Client) -> dict[str, Any]:
        state = wire.decode_state(client.get("/state?once").content)
        return {**msgspec.structs.asdict(state), "slot": self._plan.slots[index].index}


def slot_table(slots: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("slot", "model", "device", "state", ""):
        table.add_column(heading)
    for slot in slots:
        progress = f"{slot['progress']:.0%}" if slot["state"] == "loading" else ""
        table.add_row(str(slot["slot"]), str(slot["model"]), str(slot["device"]), str(slot["state"]), progress)
    return table
