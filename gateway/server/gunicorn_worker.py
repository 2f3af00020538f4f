"""The gateway's gunicorn worker: the app, the HTTP server over it, and when the process is ready and stops.

gunicorn loads `GatewayServer` as its worker class; its master imports this module, so it must not import the app. The
main thread keeps the time: signals, deadlines, the stop.

Stopping has three forms. TERM alone: readiness turns 503 for `TERCET_DRAIN_S`, the listener closes, accepted requests
finish, and shortly before the grace ends the remaining ones are cancelled, so that every client has an answer. After a
reload, or if the master is dead: as TERM, but the listener closes at once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import structlog
from gunicorn.workers.base import Worker

from gateway.server import bounds
from gateway.server.http_server import HttpServer
from gateway.server.served_app import ServedApp
from shared.errors import ShuttingDown
from shared.masters.leases import Leases
from shared.masters.startup import ServerTls
from shared.masters.worker_life import LifePhase, WorkerLife
from shared.settings import Settings
from shared.telemetry import finish_log
from shared.time_margins import MARGINS

log = structlog.get_logger()

# How long a thread may hold the interpreter while the leader waits for it (Python's default: 5 ms). Each thread that
# waits wakes up as often, so a shorter interval costs CPU time (docs/PERFORMANCE.md, CPU per answer).
SWITCH_INTERVAL_S = 0.002
TICK_S = 0.25  # the longest time between two looks at deadlines
STOP_TICK_S = 0.05  # and during a stop, which passes several of them one after the other
EXIT_MARGIN_S = 0.1
# At the exit, the longest wait for jobs that return to their queue: their store may be unavailable.
JOBS_STOP_S = 1.0
# A new worker reports itself as ready once it knows a warm slot, or after this time: the pool may be down.
MAX_WARM_WAIT_S = 5.0


class GatewayServer(Worker):  # type: ignore[misc]  # gunicorn has no type hints
    """`gunicorn.conf.py` sets `life`, `leases`, `slot_index`, `settings`, `tls` and `activity_fd` before the fork."""

    life: WorkerLife
    leases: Leases
    slot_index: int  # its place in the leases
    settings: Settings
    tls: ServerTls | None
    activity_fd: int | None  # of a pipe to the supervisor; it gets a byte while completions are requested
    wsgi: ServedApp
    max_connections = bounds.MAX_CONNECTIONS  # fewer where descriptors do not suffice

    def init_process(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._ticks: SimpleQueue[None] = SimpleQueue()  # wakes the main thread; a signal handler may put into it
        self._stop_began_at: float | None = None
        self._listening_ended_at: float | None = None
        self._is_replaced = False
        self._is_cancelled = False
        self._num_reported = 0
        try:
            super().init_process()  # returns when the worker stops
        except Exception as error:
            log.error("unhandled_exception", exc_info=error)
            raise
        if self._server.num_answering:  # an interpreter that exits would stop these threads anywhere
            finish_log()
            os._exit(0)

    def init_signals(self) -> None:
        """Leave signals to `life`."""

    def load_wsgi(self) -> None:
        super().load_wsgi()
        tls = None if self.tls is None else self.tls.context
        self._server = HttpServer(self.wsgi, self.settings, tls, self.sockets, self.max_connections, self.cfg.threads)
        gauges: dict[str, tuple[str, Callable[[], float]]] = dict(self._server.gauges)
        if self.tls is not None:
            expires_at = self.tls.expires_at
            text = "When the certificate that is served expires, in Unix seconds"
            gauges["certificate_expiry_seconds"] = (text, lambda: expires_at)
        self.wsgi.watch_server(gauges)
        self._started_at = time.monotonic()
        self.life.load(partial(self._ticks.put, None))

    def run(self) -> None:
        if len(self.leases.holders(self.slot_index)) <= 1:  # else a predecessor serves, and this process knows no slot
            self._server.listen()
        self._server.start()
        while not self._tick(time.monotonic()):
            with suppress(Empty):
                self._ticks.get(timeout=TICK_S if self._stop_began_at is None else STOP_TICK_S)
        self._server.abort()
        self.life.end()
        self.wsgi.end_stop(JOBS_STOP_S)

    def _tick(self, now: float) -> bool:
        """Act on signals and deadlines. Returns whether the process may exit."""
        if self.life.must_drain:
            self._begin_drain()
        self.notify()
        self._server.sweep(now)
        self._report_warm()
        self._report_activity()
        if self.ppid != os.getppid() and self._stop_began_at is None:
            self._begin_stop(now - self.settings.server.drain_s)
        return self._is_finished(now)

    def _is_finished(self, now: float) -> bool:
        """Advance a stop that has begun; whether the process may exit."""
        if self._stop_began_at is None:
            return False
        elapsed = now - self._stop_began_at
        grace_s = self.settings.server.grace_s
        if self._listening_ended_at is None and elapsed >= min(self.settings.server.drain_s, grace_s / 2):
            self._listening_ended_at = now
            self._server.end_listening()
        is_last_moment = elapsed >= grace_s - MARGINS.cancel_s
        if self._listening_ended_at is not None:
            waited_s = now - self._listening_ended_at
            self._server.end_unaccepted(now, waited_s, is_last_moment=is_last_moment, is_replaced=self._is_replaced)
        if is_last_moment and not self._is_cancelled:
            self._is_cancelled = True
            self.wsgi.cancel_all(ShuttingDown("The server is shutting down; send the request again."))
        is_done = self._listening_ended_at is not None and not self._server.has_connections
        return is_done or elapsed >= grace_s - EXIT_MARGIN_S

    def _begin_drain(self) -> None:
        """Act on TERM. After a reload, the successor already accepts: there is nothing to drain."""
        assert self.life.term_at is not None
        self._is_replaced = self.leases.successor_is_warm(self.slot_index, self.age) and not self.leases.is_stopping
        self._begin_stop(self.life.term_at - (self.settings.server.drain_s if self._is_replaced else 0.0))

    def _begin_stop(self, began_at: float) -> None:
        """
        Args:
            began_at: when the grace began; earlier than now by the drain time, the listener closes at once.
        """
        if self._stop_began_at is None:
            self._stop_began_at = began_at
            self.life.drain(self.settings.server.grace_s)
            self.wsgi.begin_stop(is_replaced=self._is_replaced)
            self._server.keeps_connections = False

    def _report_warm(self) -> None:
        """Report this worker as ready, which stops its predecessor."""
        is_late = time.monotonic() - self._started_at > MAX_WARM_WAIT_S
        if self.life.phase is LifePhase.LOADING and (self.wsgi.has_warm_slot or is_late):
            self.life.warm()
            self._server.listen()
            self.leases.mark_warm(self.slot_index, self.age)

    def _report_activity(self) -> None:
        """Tell the supervisor that completions are being computed, wait as jobs, or were requested since the last call.

        Probes, scrapes and refused requests are no activity: they would keep an unused server running.
        """
        if self.activity_fd is None:
            return
        num_arrived = self.wsgi.num_arrived
        if num_arrived > self._num_reported or self.wsgi.is_computing:
            self._num_reported = num_arrived
            with suppress(BlockingIOError, BrokenPipeError):  # full, or the supervisor is gone
                os.write(self.activity_fd, b".")
