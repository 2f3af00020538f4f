"""Stage `faults`: real faults of a device, each in a process of its own, and what became of the engine.

Each row says what must happen, what happened, and whether that is the same.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from functools import partial
from typing import Any

from deploy.bench.gpu.commands import run_command
from deploy.bench.gpu.context import Context
from deploy.bench.gpu.record import Recorder, Skipped
from deploy.load.clients import LOOPBACK, Clients, raise_for_status
from deploy.load.server import Server
from deploy.load.workload import W

FATAL = 70  # a worker's exit code after a failure of its device
# Fault → what must be observed: the exit code of the process, and what it said last.
EXPECTED: dict[str, tuple[int, str]] = {
    "oom-request": (0, "one request failed, the next was served"),
    "device-assert-request": (FATAL, ""),
    "stalled-stream": (FATAL, ""),
    "oom-capture": (0, "not warm"),
    "oom-load": (0, "not warm, then warm"),
    "device-assert-load": (FATAL, ""),
}


def run(context: Context, record: Recorder) -> None:
    for fault in EXPECTED:
        record.measure(fault, partial(_inject, context, fault))
    record.measure("sigkill", lambda: _kill(context))


def _inject(context: Context, fault: str) -> dict[str, Any]:
    if fault == "oom-capture" and not context.is_cuda:
        raise Skipped("no GPU and no stand-in for it: nothing is captured")
    arguments = [fault, context.device, "bf16"]
    if context.is_rehearsal:  # plain torch, which needs no capture before it can serve, where no graph matters
        arguments = [fault, context.device if fault == "oom-capture" else "cpu:0", "fp32", "--raise"]
    start = time.monotonic()
    done = run_command([sys.executable, "-m", "deploy.bench.gpu.fault_process", *arguments], context.limit_s / 2)
    try:
        observed = str(json.loads(done.last_line)["observed"]) if done.code == 0 else ""
    except (ValueError, KeyError, TypeError):
        observed = done.last_line[:200]
    code, text = EXPECTED[fault]
    return {
        "expected": text or f"exit code {code}",
        "observed": observed or f"exit code {done.code}" + (f": {done.last_line[:200]}" if done.code != code else ""),
        "is_as_expected": (done.code, observed) == (code, text),
        "elapsed_s": round(time.monotonic() - start, 1),
    }


def _kill(context: Context) -> dict[str, Any]:
    """SIGKILL of a worker that serves: seconds until its successor is warm, and answers during that time."""
    settings = {"devices": context.server_device}
    with Server("embedded", settings) as server:
        from deploy.bench.gpu.context import subject

        clients = Clients(LOOPBACK, server.port, subject("embedded"), W, 0, {})
        raise_for_status(clients.send_new(1))
        pid = int(server.slots()[0]["pid"])
        start = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while True:
            slots = server.slots()
            if slots and slots[0]["state"] == "warm" and slots[0]["pid"] != pid:
                break
            if time.monotonic() - start > context.limit_s:
                raise RuntimeError("no successor of the killed worker was warm in time")
            time.sleep(0.05)
        seconds = time.monotonic() - start
        raise_for_status(clients.send_new(1))
    return {
        "expected": "a warm successor answers",
        "observed": "a warm successor answers",
        "is_as_expected": True,
        "elapsed_s": round(seconds, 2),
    }
