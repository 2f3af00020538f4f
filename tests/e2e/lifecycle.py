"""Load on a running instance, and starts behind a socket that the caller keeps."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.chaos.load import Load, count_failures
from tests.e2e.harness import Tercet, until

NUM_CLIENTS = 3


@contextmanager
def loaded(tercet: Tercet) -> Iterator[Load]:
    """Load on the instance, in which no request may fail."""
    load = Load(tercet.port, NUM_CLIENTS)
    with load.running():
        load.wait_for(5)
        yield load
        load.wait_for(10)
    assert not count_failures(load.answers), count_failures(load.answers)


def wait_for_start(tercet: Tercet, num_starts: int) -> None:
    until(lambda: tercet.num_starts >= num_starts, 60, f"started {num_starts} times; {tercet.log()[-2000:]}")


def start_behind(tercet: Tercet, listener: socket.socket) -> None:
    """Start `tercet serve` with a listening socket that the caller keeps, as systemd's socket units do."""
    program = (
        "import os, sys; os.dup2(int(sys.argv[1]), 3); "
        "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS='1'); "
        "os.execv(sys.executable, [sys.executable, '-m', 'deploy', 'serve'])"
    )
    number = listener.fileno()
    tercet.start(sys.executable, "-c", program, str(number), pass_fds=[number])
