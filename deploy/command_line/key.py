"""`tercet key`: makes, lists and revokes API keys."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from deploy.terminal import make_console
from shared.api_keys import new_key, read_keys, revoke_key
from shared.errors import StartError
from shared.settings import Settings

key_commands = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Make, list and revoke API keys (the file TERCET_KEYS)."
)
out = make_console()
err = make_console(stderr=True)


@key_commands.command("new")
def make_key(
    name: Annotated[str, typer.Argument(help="Says who or what uses the key.")],
    rate: Annotated[int | None, typer.Option(help="Requests per minute; 0: no limit.", min=0, max=1_000_000)] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Requests at the same time; 0: no limit.", min=0, max=4096)
    ] = None,
) -> None:
    """Make a key and print it. It is shown only now: the file keeps a digest."""
    key, record = new_key(_key_path(), name, rate, concurrency)
    sys.stdout.write(f"{key}\n")
    err.print(
        f"Key {record.id} ({name}) is valid from now on. This is the only time that it is shown.", highlight=False
    )


@key_commands.command("list")
def list_keys() -> None:
    """List the keys: ids, names and limits."""
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True, min_width=12)  # `revoke` takes it, so it is never cut
    for heading in ("name", "created", "requests/minute", "at the same time", "revoked"):
        table.add_column(heading, overflow="fold")
    for key in read_keys(_key_path()):
        limits = ("default" if limit is None else str(limit or "no limit") for limit in (key.rate, key.concurrency))
        revoked = f"{key.revoked:%Y-%m-%d %H:%M}" if key.revoked else ""
        table.add_row(key.id, Text(key.name), f"{key.created:%Y-%m-%d %H:%M}", *limits, revoked)
    out.print(table)


@key_commands.command("revoke")
def refuse_key(key_id: Annotated[str, typer.Argument(metavar="ID", help="As `tercet key list` shows it.")]) -> None:
    """Revoke a key. A running server refuses it within a second."""
    key = revoke_key(_key_path(), key_id)
    err.print(f"Key {key.id} is revoked.", highlight=False)


def _key_path() -> Path:
    path = Settings.load(os.environ).access.keys
    if path is None:
        raise StartError("Set TERCET_KEYS to the path of the key file, for example ~/.config/tercet/keys.")
    return path
