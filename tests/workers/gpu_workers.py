"""Worker processes that share a fake GPU: real engines on the device "cpu:0", whose allocations a file accounts for.

The memory of a GPU is what cannot be had here. `FakeGpu` is a file with what each living process has allocated; it
refuses what exceeds the card, as the driver does. What a process allocates is given back when the process ends.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from shared.run_directory import holding_device
from shared.settings import Settings
from tests.workers.engine.helpers import TINY, peaked_weights
from workers.engine.cuda import kv_cache
from workers.engine.cuda import runner as cuda_runner
from workers.engine.engine import Engine, EngineConfig
from workers.engine.loader import LoadedModel, build
from workers.engine.request import EngineRequest, SamplingParams

MEETING_S = 0.5  # time in which processes that may measure at the same time do
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.workers.gpu_workers"])


@dataclass(frozen=True, slots=True)
class FakeGpu:
    """The memory of a card, in a file that processes share."""

    path: Path
    total_bytes: int

    def free_bytes(self) -> int:
        with self._table() as table:
            return self.total_bytes - _used(table)

    def peak_bytes(self) -> int:
        """The most that was ever allocated, or asked for, at once."""
        with self._table() as table:
            return int(table.get("peak", 0))

    def allocate(self, what: str, num_bytes: int) -> None:
        """Takes memory for this process, instead of what it has for `what`.

        Raises:
            torch.OutOfMemoryError: the card has no more.
        """
        with self._table() as table:
            own = table.setdefault("processes", {}).setdefault(str(os.getpid()), {})
            own[what] = num_bytes
            used = _used(table)
            table["peak"] = max(used, table.get("peak", 0))
            if used > self.total_bytes:
                del own[what]
                raise torch.OutOfMemoryError("CUDA out of memory.")

    @contextmanager
    def _table(self) -> Iterator[dict[str, Any]]:
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            table = json.loads(file.read() or "{}")
            try:
                yield table
            finally:
                file.truncate(0)
                json.dump(table, file)


def _used(table: dict[str, Any]) -> int:
    """The bytes of the processes that live; the others' are forgotten."""
    processes = table.setdefault("processes", {})
    for pid in list(processes):
        if not _is_alive(int(pid)):
            del processes[pid]
    return sum(sum(own.values()) for own in processes.values())


def _is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What a worker process is to do. `cache_bytes` None takes a share of the free memory, without a lock."""

    gpu: FakeGpu
    run_path: Path
    fixed_bytes: int  # weights, context, graphs
    max_batch: int
    cache_bytes: int | None
    hangs_in_capture: bool = False


class FakeGpuWorker:
    """A worker process, seen from the test."""

    def __init__(self, order: WorkerOrder, meeting: Barrier) -> None:
        self._pipe, end = context.Pipe()
        self.process = context.Process(target=_work, args=(order, meeting, end), daemon=True)
        self.process.start()
        end.close()

    def wait_for(self, *states: str, timeout_s: float = 60.0) -> tuple[str, str]:
        """Its next state among `states`, with the reason.

        Raises:
            EOFError: the process has ended.
        """
        while self._pipe.poll(timeout_s):
            state, reason = self._pipe.recv()
            if state in states:
                return state, reason
        raise AssertionError(f"not within {timeout_s} s: {states}")

    def generate(self) -> int:
        """Number of tokens of a completion."""
        self._pipe.send("generate")
        return int(self.wait_for("generated")[1])

    def stop(self) -> None:
        self._pipe.close()
        self.process.join(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(60)


def _work(order: WorkerOrder, meeting: Barrier, pipe: Connection) -> None:
    """The worker process, until its pipe is closed."""
    gpu = order.gpu
    lock = threading.Lock()

    def send(state: str, reason: object = "") -> None:
        with lock, suppress(OSError):
            pipe.send((state, str(reason)))

    def measure(_: torch.device) -> int:
        free = gpu.free_bytes()
        with suppress(threading.BrokenBarrierError):  # under the lock no other process comes
            meeting.wait(MEETING_S)
        return free

    class AccountedCache(kv_cache.KVCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            gpu.allocate("cache", self.num_bytes)
            if order.hangs_in_capture:
                send("capturing")
                threading.Event().wait()

    def load(_progress: object) -> LoadedModel:
        gpu.allocate("fixed", order.fixed_bytes)
        return LoadedModel(build(TINY, peaked_weights(TINY), "fp32", device="cpu:0"), "cpu:0", "fp32")

    patch = pytest.MonkeyPatch()
    patch.setattr(kv_cache, "free_bytes", measure)
    patch.setattr(cuda_runner, "KVCache", AccountedCache)
    settings = Settings(run_dir=order.run_path)
    has_plan = order.cache_bytes is not None
    device_lock: Any = partial(holding_device, settings, "cuda:0") if has_plan else nullcontext

    @contextmanager
    def locked() -> Iterator[None]:
        held: AbstractContextManager[None] = device_lock()
        with held:
            send("locked")
            yield

    engine = Engine(
        EngineConfig(
            device="cuda", max_batch=order.max_batch, num_threads=1, hang_s=0,
            cache_bytes=order.cache_bytes, allocation_lock=locked,
        ),
        load,
        on_change=lambda: send(engine.status().state, engine.status().reason),
        on_fatal=lambda failure: send("fatal", failure.detail),
    )  # fmt: skip
    engine.start()
    with suppress(EOFError):
        while pipe.recv() == "generate":
            stream = engine.submit(EngineRequest((1, 2, 3), SamplingParams(5), 0))
            send("generated", len(stream.result().token_ids))
    os._exit(0)
