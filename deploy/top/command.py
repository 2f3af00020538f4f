"""`tercet top`: asks a running server for `GET /slots` and draws it, until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from deploy.gateway_client import local_client, remote_client, server_url
from deploy.top.frame import Snapshot, draw
from gateway.api.slots import Slots
from shared.errors import StartError
from shared.settings import Settings

# Rates and latencies are over about this time.
WINDOW_S = 10.0
_decode = msgspec.json.Decoder(Slots).decode


def top(
    url: Annotated[
        str | None,
        typer.Option(
            callback=server_url, help="The server, like https://tercet.example; default: at TERCET_BIND's address."
        ),
    ] = None,
    key: Annotated[
        str, typer.Option(envvar="TERCET_API_KEY", show_envvar=True, help="API key, where the server requires one.")
    ] = "",
    interval: Annotated[float, typer.Option(help="Seconds between frames.", min=0.1, max=60)] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, over one interval, and end.")] = False,
) -> None:
    """Watch a running server: slots, queue, latencies, tokens per second, prefix cache. q or Ctrl-C ends it."""
    settings = Settings.load(os.environ)
    environ = {**os.environ, "TERCET_API_KEY": key}
    console = Console()
    with local_client(settings, environ) if url is None else remote_client(url, environ) as client:
        title = f"Tercet at {str(client.base_url).rstrip('/')}"
        snapshots = deque([ask(client)])
        if once:
            time.sleep(interval)
            console.print(draw(title, snapshots[0], ask(client)))
            return
        with (
            suppress(KeyboardInterrupt),
            _reading_keys() as is_ended,
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            frame: RenderableType = ""
            while not is_ended(interval):
                problem = ""
                try:
                    now = ask(client)
                    if len(now.slots.slots) != len(snapshots[0].slots.slots):  # another plan
                        snapshots.clear()
                    snapshots.append(now)
                    while len(snapshots) > 2 and snapshots[-1].at - snapshots[1].at >= WINDOW_S:
                        snapshots.popleft()
                    frame = draw(title, snapshots[0], snapshots[-1])
                except StartError as error:  # it may come back
                    problem = str(error)
                live.update(Group(frame, "", Text(problem or "q ends", "red" if problem else "dim")), refresh=True)


def ask(client: httpx.Client) -> Snapshot:
    """The server's slots now.

    Raises:
        StartError: no server answers, it is not Tercet, or it refuses the key.
    """
    url = str(client.base_url).rstrip("/")
    try:
        response = client.get("/slots")
    except httpx.TransportError as error:
        raise StartError(f"No server answers at {url} ({error}).") from error
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise StartError(f"The server at {url} requires an API key: --key, or TERCET_API_KEY.")
    try:
        return Snapshot(_decode(response.content), time.monotonic())
    except msgspec.DecodeError as error:
        raise StartError(f"The server at {url} is not Tercet (its status: {response.status_code}).") from error


@contextmanager
def _reading_keys() -> Iterator[Callable[[float], bool]]:
    """Yields a function that waits for some seconds and returns whether q was pressed, which then ends the wait.

    While the block runs, the terminal passes on each key at once and does not show it. Ctrl-C stays an interrupt.
    """
    if not sys.stdin.isatty():
        yield _sleep
        return

    def is_ended(timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while select.select([sys.stdin], [], [], max(0.0, until - time.monotonic()))[0]:
            if os.read(sys.stdin.fileno(), 1) in {b"q", b"Q", b""}:
                return True
        return False

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield is_ended
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(timeout_s: float) -> bool:
    time.sleep(timeout_s)
    return False
