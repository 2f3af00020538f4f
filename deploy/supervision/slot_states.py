"""The states of a starting instance's slots, for `tercet serve`: from its gateway, or from the workers themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager

import httpx
import msgspec
from rich.table import Table

from deploy.gateway_client import gateway_client
from gateway.pool.client import BranchError, SlotClient
from shared.plan import Plan
from shared.protocol import State
from shared.settings import Settings

TIMEOUT_S = 1.0


@contextmanager
def slot_reader(
    settings: Settings, environ: Mapping[str, str], plan: Plan, roles: tuple[str, ...]
) -> Iterator[Callable[[], dict[int, State] | None]]:
    """A function that returns the state of each slot of a plan, by index; None while a process does not answer."""
    slots = plan.slots
    with ExitStack() as stack:
        gateway: httpx.Client | None = None
        workers: list[SlotClient] = []
        if "gateway" in roles:
            gateway = stack.enter_context(gateway_client(settings, environ, timeout_s=TIMEOUT_S))
        else:
            workers = [stack.enter_context(closing(SlotClient(slot, TIMEOUT_S))) for slot in slots]

        def read() -> dict[int, State] | None:
            try:
                if gateway is None:
                    return {slot.index: worker.state(TIMEOUT_S) for slot, worker in zip(slots, workers, strict=True)}
                rows = gateway.get("/ping").json()["slots"]
                # Those after the plan's are remote.
                return {row["slot"]: msgspec.convert(row, State) for row in rows if row["slot"] < len(slots)}
            except (BranchError, httpx.TransportError, msgspec.MsgspecError, ValueError, KeyError):
                return None

        yield read


def slot_table(states: Mapping[int, State]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("slot", "model", "device", "state", ""):
        table.add_column(heading)
    for index, state in states.items():
        progress = f"{state.progress:.0%}" if state.state == "loading" else ""
        table.add_row(str(index), state.model, state.device, state.state, progress)
    return table
