"""The states of a starting instance's slots, for `tercet serve`: from its gateway, or from the workers themselves."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import msgspec
from rich.table import Table

from deploy.gateway_client import gateway_client
from gateway.pool.client import BranchError, SlotClient
from shared.plan import Plan
from shared.protocol import State
from shared.settings import Settings

TIMEOUT_S = 1.0


class SlotStates:
    """Reads the states of a plan's slots, by slot index."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], plan: Plan, roles: tuple[str, ...]) -> None:
        self._plan = plan
        self._gateway: httpx.Client | None = None
        self._workers: list[SlotClient] = []
        if "gateway" in roles:
            self._gateway = gateway_client(settings, environ, timeout_s=TIMEOUT_S)
        else:
            self._workers = [SlotClient(slot, TIMEOUT_S) for slot in plan.slots]

    def read(self) -> dict[int, State] | None:
        """Return the state of each slot; None while a process does not answer."""
        slots = self._plan.slots
        try:
            if self._gateway is None:
                return {slot.index: worker.state(TIMEOUT_S) for slot, worker in zip(slots, self._workers, strict=True)}
            rows = self._gateway.get("/ping").json()["slots"]
            # Those after the plan's are remote.
            return {row["slot"]: msgspec.convert(row, State) for row in rows if row["slot"] < len(slots)}
        except (BranchError, httpx.TransportError, msgspec.MsgspecError, ValueError, KeyError):
            return None

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        if self._gateway is not None:
            self._gateway.close()


def slot_table(states: Mapping[int, State]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("slot", "model", "device", "state", ""):
        table.add_column(heading)
    for index, state in states.items():
        progress = f"{state.progress:.0%}" if state.state == "loading" else ""
        table.add_row(str(index), state.model, state.device, state.state, progress)
    return table
