"""Prints the files of ours that a `POST /autocomplete` crosses, and its handovers, by running one.

    python -m tests.crossing [--root ../other-checkout]

The request goes to a warm server with the embedded checkpoint, on the connections of the request before. A file counts
if a Python function of it runs that does not also run in the same thread while the server is idle. A handover is a
thread that wakes another, which then runs such functions; threads that do the same, like those of an answer's three
branches, are one. The thread that writes the log does not count: no request waits for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import httpx

from deploy.tuning.load.server import Server
from tests.sizes import PRODUCT, ROOT

IDLE_S = 12.0  # longer than the period of most of what a server does by itself
SETTLE_S = 0.3  # after an answer, until its log and its connections are done
BODY = {"context": "I think that we should", "length": 8, "seed": 1, "n": 3}


class Event(NamedTuple):
    """A line of a trace; see tests/crossing_trace.py."""

    at_ns: int
    role: str
    pid: str
    thread: str
    ident: str  # unique among all processes
    what: str
    name: str  # the file of a call, else the function
    detail: str  # the function of a call, else the id of the object that is waited for

    @property
    def actor(self) -> str:
        """The pool and the thread, without its number."""
        return f"{self.role}, {re.sub(r'[-_]?[0-9].*', '', self.thread)}"

    @property
    def function(self) -> tuple[str, str, str]:
        return self.actor, self.name, self.detail


@dataclass(frozen=True)
class Crossing:
    """The files, and the threads as "pool, thread", in the order in which they first run.

    Attributes:
        files: by thread.
        handovers: from thread to thread.
    """

    root: Path
    files: dict[str, list[str]]
    handovers: list[tuple[str, str]]

    @property
    def lengths(self) -> dict[str, int]:
        """Lines by file."""
        names = dict.fromkeys(name for names in self.files.values() for name in names)
        return {name: len((self.root / name).read_text(encoding="utf-8").splitlines()) for name in names}


class Recorder:
    """Turns the trace of all processes of a server on and off."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.flag = folder / "flag"
        self.flag.write_bytes(b"\0")
        shutil.copy(Path(__file__).with_name("crossing_trace.py"), folder / "sitecustomize.py")

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """The events of all processes in the order of time, once the block has ended."""
        events: list[Event] = []
        for path in self._folder.glob("*.trace"):
            os.truncate(path, 0)
        self._switch(b"\1")
        yield events
        self._switch(b"\0")
        for path in self._folder.glob("*.trace"):
            for line in path.read_text().splitlines():
                at_ns, *fields = line.split("\t")
                events.append(Event(int(at_ns), *fields))
        events[:] = sorted(event for event in events if event.thread != "log")

    def _switch(self, value: bytes) -> None:
        with self.flag.open("r+b") as flag:
            flag.write(value)


def cross(root: Path) -> Crossing:
    """Run a server of the checkout `root`, and trace a request."""
    with tempfile.TemporaryDirectory(prefix="tercet-crossing-") as name:
        recorder = Recorder(Path(name))
        # Traced functions take several times as long; no branch is to be sent twice for that.
        settings = {"devices": "cpu", "ack_ms": "20000"}
        with (
            patch.dict(os.environ, {"CROSSING_FLAG": str(recorder.flag), "PYTHONPATH": name}),
            Server("embedded", settings, root) as server,
            httpx.Client(base_url=server.url, trust_env=False) as client,
        ):
            client.post("/autocomplete", json=BODY | {"seed": 2}, timeout=60).raise_for_status()
            time.sleep(SETTLE_S)
            with recorder.recording() as idle:
                time.sleep(IDLE_S)
            client.post("/autocomplete", json=BODY | {"seed": 3}, timeout=60).raise_for_status()
            time.sleep(SETTLE_S)
            with recorder.recording() as events:
                client.post("/autocomplete", json=BODY, timeout=60).raise_for_status()
                time.sleep(SETTLE_S)
    return crossing_of(events, {event.function for event in idle if event.what == "call"}, root)


def crossing_of(events: Sequence[Event], idle: set[tuple[str, str, str]], root: Path) -> Crossing:
    """
    Args:
        events: of all threads in the order of time.
        idle: functions that run without a request.
    """
    files: dict[str, list[str]] = {}
    handovers: list[tuple[str, str]] = []
    wakes = [event for event in events if event.what == "wakes"]
    wakers: dict[str, Event | None] = {}  # by the id of a thread that has not yet run a function since
    for event in events:
        if event.what == "woken":
            wakers[event.ident] = _waker(event, wakes)
        elif event.what == "call" and event.function not in idle and (name := _own(event.name, root)):
            names = files.setdefault(event.actor, [])
            if name not in names:
                names.append(name)
            waker = wakers.pop(event.ident, None)
            # What has not run yet for this request woke the thread by chance: a state that a worker sent.
            if waker and waker.actor in files and waker.actor != event.actor:
                handovers.append((waker.actor, event.actor))
    handovers = list(dict.fromkeys(handovers))
    return Crossing(root, files, handovers)


def _waker(woken: Event, wakes: Sequence[Event]) -> Event | None:
    """What ended a wait: the last event before that wakes by the same object. The ends of a pipe or a socket are not
    known, so for these it is the last event that writes to a pipe in this process, or to a socket in another."""
    for event in reversed(wakes[: bisect_right(wakes, woken)]):
        is_here = event.pid == woken.pid
        if woken.name in {"acquire", "get"}:
            is_waker = is_here and event.detail == woken.detail
        else:
            is_waker = event.name in ({"write", "eventfd_write"} if is_here else {"send", "sendall", "sendmsg"})
        if is_waker and event.ident != woken.ident:
            return event
    return None


def _own(file: str, root: Path) -> str:
    """The path of a file of the product from the root, or ""."""
    path = Path(file)
    if not path.is_relative_to(root):
        return ""
    relative = path.relative_to(root).as_posix()
    return relative if relative.startswith(PRODUCT) else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the files that a request crosses, and its handovers.")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    crossing = cross(parser.parse_args().root.resolve())
    for thread, names in crossing.files.items():
        print(thread, *names, sep="\n    ")
    for source, target in crossing.handovers:
        print(f"{source} → {target}")
    longest = max(crossing.lengths.items(), key=lambda item: item[1])
    print(
        f"{len(crossing.lengths)} files, {len(crossing.handovers)} handovers; longest: {longest[0]}, {longest[1]} lines"
    )


if __name__ == "__main__":
    main()
