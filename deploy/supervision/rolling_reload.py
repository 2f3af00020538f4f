"""`tercet reload`: replaces the workers of a running instance slot by slot, with the checkpoints as they are now.

Each worker is stopped, and its successor loaded, before the next is touched; memory holds one generation of a model. It
asks the slots' sockets for their states, and knows the masters only by the locks that they hold.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from deploy.terminal import make_console
from deploy.tuning.planning import make_plan
from gateway.pool.client import BranchError, SlotClient
from shared.errors import StartError
from shared.home import START_DIRECTORY, start_directory
from shared.masters.run_directory import lock_holder, lock_run_directory, remove_run_files
from shared.plan import Plan, Slot, read_current_plan, write_plan
from shared.protocol import State
from shared.settings import INTERNAL, Settings
from shared.time_margins import MARGINS

POLL_S = 0.05
out = make_console()


def reload(
    model: Annotated[str | None, typer.Option(help="Replace only the workers of this model.")] = None,
) -> None:
    """Replace the workers slot by slot, with the checkpoints as they are now. Stops at the first failure.

    SIGHUP to `tercet serve` replaces all workers, with the same checkpoints; each serves until its successor is warm.
    On a GPU whose memory does not hold a successor it is refused.

    Needs no settings but the run directory (TERCET_RUN_DIR, or TERCET_BIND): the others are those of the server.
    """
    settings = Settings.load(os.environ)
    environ = running_environment(settings) or os.environ
    os.environ[START_DIRECTORY] = environ.get(START_DIRECTORY, start_directory())  # of the server's paths
    reload_slots(Settings.load(environ), environ, model)
    out.print("Reloaded.")


def reload_slots(settings: Settings, environ: Mapping[str, str], model: str | None) -> None:
    """Replace the workers of `model`, or of all models, one after another.

    Raises:
        StartError: no instance runs, the slots' layout would change, or a slot could not be reloaded. The remaining
            slots then are as they were, and the plan is the previous.
    """
    old = read_current_plan(settings, environ)
    if old is None or lock_holder(settings, "workers") is None:
        raise StartError(f"No instance with these settings runs in {settings.run_path}: start it with `tercet serve`.")
    with lock_run_directory(settings, "reload"):
        try:
            new = _new_plan(old, settings, environ, model)
            write_plan(new, settings.run_path)
            for slot in new.slots:
                if model in {None, slot.model}:
                    out.print(f"Reloading slot {slot.index} ({slot.model} on {slot.device}) …", highlight=False)
                    _reload_slot(slot, settings, old, new)
        finally:
            remove_run_files(settings.run_path, ["reload.lock"])
    gateway = lock_holder(settings, "gateway")
    if new != old and gateway is not None:
        os.kill(gateway.pid, signal.SIGHUP)  # it reads the new plan


def running_environment(settings: Settings) -> dict[str, str] | None:
    """The environment of the instance in this run directory: its settings, where its models are and paths begin.

    None: nothing runs there, or the system does not tell (Linux tells the same user, and root).
    """
    holder = lock_holder(settings, "workers")
    if holder is None:
        return None
    try:
        entries = Path(f"/proc/{holder.pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    names = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    found = {name: value for name, _, value in names if name not in INTERNAL - {START_DIRECTORY}}
    return found | {"TERCET_RUN_DIR": str(settings.run_path)}  # a gunicorn that was started alone may have the default


def _new_plan(old: Plan, settings: Settings, environ: Mapping[str, str], model: str | None) -> Plan:
    """The old plan with the checkpoints of `model`, or of all models, resolved again."""
    names = [each.name for each in old.models]
    if model is not None and model not in names:
        raise StartError(f"The model {model} is not served; served are {', '.join(names)}.")
    found = make_plan(settings, environ)
    if found.slots != old.slots or found.gpus != old.gpus:
        raise StartError(
            "The slots, or their shares of a GPU's memory, have changed (`tercet plan --write` shows them): restart "
            "`tercet serve`."
        )
    models = [found.model(each.name) if model in {None, each.name} else each for each in old.models]
    return msgspec.structs.replace(old, models=models)


def _reload_slot(slot: Slot, settings: Settings, old: Plan, new: Plan) -> None:
    """Stop the slot's worker and wait until its successor is warm. On a failure, go back to the old plan."""
    client = SlotClient(slot, ack_s=1.0)
    with closing(client):
        before = _state(client)
        if before is None:
            raise StartError(f"Slot {slot.index} does not answer; its worker's log has the reason.")
        os.kill(before.pid, signal.SIGTERM)
        pid, reason = before.pid, ""
        while not reason:
            time.sleep(POLL_S)
            state = _state(client)
            if lock_holder(settings, "workers") is None:
                raise StartError("The workers' master has ended; its log has the reason.")
            if state is None or state.pid == before.pid:
                continue
            if state.state == "warm":
                return
            if state.state == "failed":
                reason = state.reason or "its log has the reason"
            elif pid not in {before.pid, state.pid}:
                reason = "its worker ended while it loaded the model"
            pid = state.pid
        undone = ""
        if new != old:
            write_plan(old, settings.run_path)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            undone = " It loads the previous checkpoint again."
        raise StartError(
            f"Slot {slot.index} ({slot.model} on {slot.device}) could not be reloaded: {reason.rstrip('.')}.{undone} "
            "The slots after it are unchanged."
        )


def _state(client: SlotClient) -> State | None:
    """The worker's state now; None between two workers."""
    try:
        return client.state(MARGINS.silence_s)
    except BranchError:
        return None
