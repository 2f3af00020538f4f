"""`tercet reload`: replaces the workers of a running server."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from deploy.supervision.rolling_reload import reload_slots, running_environment
from deploy.terminal import make_console
from shared.home import START_DIRECTORY, start_directory
from shared.settings import Settings

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
    reload_slots(
        Settings.load(environ),
        environ,
        model,
        lambda slot: out.print(f"Reloading slot {slot.index} ({slot.model} on {slot.device}) …", highlight=False),
    )
    out.print("Reloaded.")
