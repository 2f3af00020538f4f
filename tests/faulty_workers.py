"""gunicorn's worker classes for tests: slots that are slow, fail or use other kernels, a gateway with few connections.

gunicorn takes the class from GUNICORN_CMD_ARGS, and the faults come from variables that Tercet does not read, so the
product has no setting for them. `tests.e2e.harness.Tercet` sets both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.workers.faults import Faults
    from workers.app import SlotApp

VARIABLES = {
    "TEST_STEP_DELAY_MS": "slot=milliseconds,…: a delay before each decode step of a slot",
    "TEST_FAULTS": "seed=fault,…: how a step with this seed fails (`tests.workers.faults.Fault`)",
    "TEST_LOAD_FAULTS": "slot=fault,…: how each load of this slot's model fails",
    "TEST_INSTRUCTION_SET": "a name of shared.cpu_features.INSTRUCTION_SETS: the workers' CPU kernels",
    "TEST_MAX_CONNECTIONS": "bound of the gateway's open connections",
}


def fault_environment(faults: Mapping[str, str]) -> dict[str, str]:
    """The variables of a server whose workers have `faults`, by the names in VARIABLES in lower case."""
    if not faults:
        return {}
    variables = {name.upper(): value for name, value in faults.items()}
    assert variables.keys() <= VARIABLES.keys(), variables
    return {"GUNICORN_CMD_ARGS": f"--worker-class {__name__}.Worker", **variables}


def read_faults(slot: int) -> Faults:
    """The faults that this process's variables give to a slot."""
    from tests.workers.faults import Faults

    delays, faults, load_faults = map(_pairs, ("TEST_STEP_DELAY_MS", "TEST_FAULTS", "TEST_LOAD_FAULTS"))
    by_seed: dict[int, Any] = faults
    on_load: Any = load_faults.get(slot)
    return Faults(float(delays.get(slot, 0)) / 1e3, by_seed, on_load)


def build() -> SlotApp:
    from workers import app

    return app.build(read_faults(int(os.environ["TERCET_SLOT"])), os.environ.get("TEST_INSTRUCTION_SET"))


def _pairs(variable: str) -> dict[int, str]:
    pairs = (entry.split("=") for entry in os.environ.get(variable, "").split(",") if entry)
    return {int(key): value for key, value in pairs}


def __getattr__(name: str) -> Any:
    """`Worker`, the class of this master's pool: both masters read GUNICORN_CMD_ARGS. Tests need no gunicorn."""
    if name != "Worker":
        raise AttributeError(name)
    if os.environ.get("TERCET_ROLE") == "gateway":
        from gateway.server.gunicorn_worker import GatewayServer

        class SmallGatewayServer(GatewayServer):
            max_connections = int(os.environ.get("TEST_MAX_CONNECTIONS", GatewayServer.max_connections))

        return SmallGatewayServer
    from workers.gunicorn_worker import SlotWorker

    class FaultySlotWorker(SlotWorker):
        def load_wsgi(self) -> None:
            self.app.app_uri = f"{__name__}:build()"
            super().load_wsgi()

    return FaultySlotWorker
