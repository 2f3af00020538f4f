"""A child process that fetches or converts a checkpoint and reports to the process that started it.

A process that resolves checkpoints will fork, so it loads no HTTP client and no numpy and keeps no thread. What an
untrusted file or a silent server does to the child also costs it nothing but time. Both sides are here; neither knows
what is fetched or converted.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shared.process import PR_SET_PDEATHSIG, prctl
from workers.checkpoints.files import CheckpointError

Progress = Callable[[str, float], None]  # (stage, fraction done, 0 to 1)
_CHILD = "import importlib, sys; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[2]).main()"
# A download may exceed its known size by a tenth, and must bring MIN_BYTES in STALL_S.
EXCESS, MIN_BYTES, STALL_S = 1.1, 256 << 10, 30.0
MAX_MEMORY_BYTES = 1 << 30  # of a process that reads a server's list of files, whose size is not known


class NotDelivered(CheckpointError):
    """A checkpoint could not be fetched or converted. `reason` is the clause that says why, without a full stop."""

    def __init__(self, reason: str, remedy: str = "try again later.") -> None:
        super().__init__(f"{reason[0].upper()}{reason[1:]}: {remedy}")
        self.reason = reason


def run_child(module: str, *arguments: str, title: str, on_progress: Progress) -> Path:
    """Run `main` of a module of `workers.checkpoints` in a child process.

    Args:
        arguments: `sys.argv[3:]` of the child.
        title: what the child does, as the subject of a sentence: "fetching GPT-2 small".

    Returns:
        The directory that the child reports.

    Raises:
        NotDelivered: the child reports a failure, or ends without a result.
        CheckpointError: the child refuses the checkpoint.
    """
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD, root, f"workers.checkpoints.{module}", *arguments],
        stdin=subprocess.PIPE,  # closed when this process leaves the block, or dies: the child then ends
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            kind, text, fraction = json.loads(line)
            if kind == "progress":
                on_progress(text, fraction)
            elif kind == "refused":
                raise CheckpointError(text)
            elif kind == "failed":
                raise NotDelivered(text)
            else:
                return Path(text)
    raise NotDelivered(f"{title} ended with status {child.returncode}")


def report(kind: str, text: str, fraction: float = 0.0) -> None:
    """Send the parent a JSON line `[kind, text, fraction]`."""
    print(json.dumps([kind, text, fraction]), file=sys.__stdout__, flush=True)


def report_progress(stage: str, fraction: float) -> None:
    report("progress", stage, fraction)


def limit(max_memory: int = MAX_MEMORY_BYTES, num_bytes: int | None = None) -> None:
    """Bound the memory of this process, mapped files aside, and its files, as those of a download of `num_bytes`; end
    it with its parent."""
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    resource.setrlimit(resource.RLIMIT_DATA, (max_memory, max_memory))
    if num_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(EXCESS * num_bytes),) * 2)


def fetch_stage(title: str, num_done: float, num_bytes: int) -> tuple[str, float]:
    """What to report of a download, which must go on (`expect`). Raises NotDelivered if it is too large."""
    if num_done > EXCESS * num_bytes:
        raise NotDelivered(f"more of {title} arrived than its {num_bytes:,} bytes")
    expect(STALL_S, f"less than {MIN_BYTES >> 10} kB of {title} arrived in {STALL_S:g} s")
    return f"Fetching {title}, {sizes(num_done, num_bytes)}", min(num_done / (num_bytes or 1), 1.0)


def expect(duration_s: float, reason: str = "") -> None:
    """Raise NotDelivered in the main thread, unless called again within this time; 0 is unlimited."""

    def give_up(*_: object) -> None:
        raise NotDelivered(reason)

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, duration_s)


def sizes(num_done: float, num_bytes: float) -> str:
    """How much of a download is done, for the stage of a progress report."""
    return f"{num_done / 1e6:,.0f} of {num_bytes / 1e6:,.0f} MB"


def report_result(work: Callable[[], Path], title: str) -> None:
    """Report the directory that `work` returns, or why there is none. The process ends when its parent does, or on
    SIGTERM: `work` then removes its files, because SystemExit is raised."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the removal
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.redirect_stdout(sys.stderr):  # libraries print too
        try:
            report("directory", str(work()))
        except NotDelivered as error:
            report("failed", error.reason)
        except CheckpointError as error:
            report("refused", str(error))
        except Exception as error:  # noqa: BLE001  this process's standard error is discarded
            report("failed", f"{title} failed ({type(error).__name__}: {error})")


def _end_with_parent() -> None:
    os.read(0, 1)  # returns at end of file
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(2)
    os._exit(1)  # the main thread waits in what no signal interrupts, like the resolver
