"""The gateway's HTTP server: which connections are open, what a thread answers, when the process stops.

gunicorn loads `GatewayServer` as its worker class. The main thread accepts connections, reads requests and flushes
responses without blocking (`connections`). A complete request is answered by a thread (`wsgi`). A client's resources
are bounded: in time by `TERCET_CLIENT_TIMEOUT_S`, in number by the limit of open files, in memory by
`MAX_BUFFERED_BYTES`.

Stopping has three forms. TERM alone: readiness turns 503 for `TERCET_DRAIN_S`, the listener closes, accepted requests
finish, and shortly before the grace ends the remaining ones are cancelled, so that every client has an answer. After a
reload, or if the master is dead: as TERM, but the listener closes at once.

It knows no route, and of the app only `ServedApp`. gunicorn starts, replaces and stops the process; its master imports
this module, so it must not import the app.
"""

from __future__ import annotations

import math
import os
import select
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import structlog
from gunicorn.workers.base import Worker
from gunicorn.workers.gthread import PollableMethodQueue

from gateway import cors
from gateway.server import bounds
from gateway.server.connections import LINGER_S, Connection, Phase, Step
from gateway.server.large_reads import LargeReads
from gateway.server.listeners import Listeners
from gateway.server.request_parser import Request, RequestHead
from gateway.server.served_app import ARRIVAL, REFUSAL, Arrival, ServedApp, Work
from gateway.server.work_queue import WorkQueue
from gateway.server.wsgi import ResponseWriter, encode_error, make_environ, refuse_at_once
from shared.call_threads import CallThreads
from shared.errors import SPEAKS_HTTPS, MalformedRequest, Overloaded, RequestTimeout, ShuttingDown, TercetError
from shared.log_stream import finish_log
from shared.masters.leases import Leases
from shared.masters.startup import ServerTls
from shared.masters.worker_life import LifePhase, WorkerLife
from shared.settings import Settings
from shared.sockets import ONESHOT, Poller
from shared.time_margins import MARGINS

log = structlog.get_logger()

# How long a thread may hold the interpreter while the main thread waits for it (Python's default: 5 ms). Each thread
# that waits wakes up as often, so a shorter interval costs CPU time (docs/PERFORMANCE.md, CPU per answer).
SWITCH_INTERVAL_S = 0.002
POLL_S = 0.25  # the longest time between two looks at deadlines
STOP_POLL_S = 0.05  # and during a stop, which passes several of them one after the other
# How long a stopping worker keeps idle connections: a client may be sending a request on one.
IDLE_LINGER_S = 1.0
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
    alive: bool
    max_connections = bounds.MAX_CONNECTIONS  # fewer where descriptors do not suffice

    def init_process(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._connections: dict[int, Connection] = {}
        self._num_buffered = 0  # bytes, as `MAX_BUFFERED_BYTES` bounds them
        self._large_reads = LargeReads()
        self._work: dict[Work, WorkQueue] = {}
        self._resumes_at = math.inf  # when the next of the requests that wait for their time may begin
        self._stop_began_at: float | None = None
        self._listening_ended_at: float | None = None
        self._is_replaced = False
        self._is_cancelled = False
        self._num_evicted = 0
        self._num_reported = 0
        self._poller = Poller()
        self._listeners = Listeners(self.sockets, self._poller, self._take, self._make_room)
        self._calls = PollableMethodQueue()  # of threads, to be run by the main thread
        self._calls.init()
        try:
            super().init_process()  # returns when the worker stops
        except Exception as error:
            log.error("unhandled_exception", exc_info=error)
            raise
        finally:
            # An interpreter that exits would stop these threads anywhere.
            if self._num_busy_threads():
                finish_log()
                os._exit(0)

    def init_signals(self) -> None:
        """Leave signals to `life`."""

    def load_wsgi(self) -> None:
        super().load_wsgi()
        timeout_s = self.settings.limits.timeout_s
        self._max_connections, self._work = bounds.divide_descriptors(self.max_connections, self.cfg.threads, timeout_s)
        self._threads = CallThreads("answer", sum(queue.max_threads for queue in self._work.values()))
        completions = self._work[Work.COMPLETIONS]
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "open_connections": ("Open client connections", lambda: len(self._connections)),
            "max_connections": ("Bound of open client connections", lambda: self._max_connections),
            "evicted_connections": (
                "Connections closed to make room for new ones, since the start",
                lambda: self._num_evicted,
            ),
            "buffered_bytes": ("Bytes of requests that wait for their end or a thread", lambda: self._num_buffered),
            "busy_threads": ("Threads that answer a request", self._num_busy_threads),
            "max_busy_threads": ("Bound of threads that answer completions", lambda: completions.max_threads),
            "open_descriptors": ("Open file descriptors", bounds.num_open_descriptors),
            "max_descriptors": ("Limit of open file descriptors", bounds.max_descriptors),
        }
        if self.tls is not None:
            expires_at = self.tls.expires_at
            text = "When the certificate that is served expires, in Unix seconds"
            gauges["certificate_expiry_seconds"] = (text, lambda: expires_at)
        self.wsgi.watch_server(gauges)
        self._started_at = time.monotonic()
        self.life.load(partial(self._calls.defer, lambda: None))

    def _num_busy_threads(self) -> int:
        return sum(queue.num_answering for queue in self._work.values())

    # The main loop.

    def run(self) -> None:
        self._poller.register(self._calls.fileno(), select.POLLIN)
        if len(self.leases.holders(self.slot_index)) <= 1:  # else a predecessor serves, and this process knows no slot
            self._listeners.open()
        sweep_at = 0.0
        while not self._is_finished(time.monotonic()):
            poll_s = POLL_S if self._stop_began_at is None else STOP_POLL_S
            resumes_at = min(self._resumes_at, self._large_reads.resumes_at)
            if resumes_at < math.inf:
                poll_s = min(poll_s, max(0.0, resumes_at - time.monotonic()))
            events = self._poller.poll(poll_s)
            now = time.monotonic()
            for descriptor, _ in events:
                if descriptor == self._calls.fileno():
                    self._calls.run_callbacks(None)
                elif descriptor in self._listeners.by_descriptor:
                    self._listeners.accept(descriptor)
                elif (connection := self._connections.get(descriptor)) is None:
                    continue
                elif connection.is_receiving_large:
                    self._large_reads.append(connection)
                else:
                    self._advance(connection, now)
            for connection in self._large_reads.take(now):
                self._advance(connection, now)
            if now >= self._resumes_at:
                self._resumes_at = math.inf
                for work in self._work:
                    self._start_answers(work, now)
            if self.life.must_drain:
                self._begin_drain()
            if now >= sweep_at:
                sweep_at = now + POLL_S
                self.notify()
                self._sweep(now)
                self._report_warm()
                self._report_activity()
                if self.ppid != os.getppid() and self._stop_began_at is None:
                    self._begin_stop(now - self.settings.server.drain_s)
        for connection in list(self._connections.values()):
            connection.abort()
        self.life.end()
        self.wsgi.end_stop(JOBS_STOP_S)

    def _is_finished(self, now: float) -> bool:
        """Advance a stop that has begun; whether the process may exit."""
        if self._stop_began_at is None:
            return False
        elapsed = now - self._stop_began_at
        drain_s = min(self.settings.server.drain_s, self.settings.server.grace_s / 2)
        if self._listening_ended_at is None and elapsed >= drain_s:
            self._listening_ended_at = now
            self._listeners.close()
        if self._listening_ended_at is not None:
            is_last_moment = elapsed >= self.settings.server.grace_s - MARGINS.cancel_s
            self._end_unaccepted(now, now - self._listening_ended_at, is_last_moment)
        if elapsed >= self.settings.server.grace_s - MARGINS.cancel_s and not self._is_cancelled:
            self._is_cancelled = True
            self.wsgi.cancel_all(ShuttingDown("The server is shutting down; send the request again."))
        is_done = self._listening_ended_at is not None and not self._connections
        return is_done or elapsed >= self.settings.server.grace_s - EXIT_MARGIN_S

    def _end_unaccepted(self, now: float, waited_s: float, is_last_moment: bool) -> None:
        """End connections that wait for their client during a stop; requests that are being answered stay, and what has
        arrived is read first. After a reload there is time for requests that arrive slowly.

        Those that have begun a request and send it slowly are refused first: they are given as long to read it, and
        then all has ended when idle connections end.
        """
        for connection in list(self._connections.values()):
            if waited_s < (IDLE_LINGER_S / 2 if connection.phase is Phase.READING else IDLE_LINGER_S):
                continue
            is_unaccepted = connection.phase in {Phase.IDLE, Phase.READING, Phase.HANDSHAKE}
            is_sending = self._is_replaced and connection.phase is not Phase.IDLE
            if is_unaccepted and not is_last_moment and (is_sending or connection.has_arrived):
                continue
            if connection.has_unsent or connection.phase in {Phase.FLUSHING, Phase.LINGERING}:
                if now - connection.since > IDLE_LINGER_S / 2 and connection.phase is not Phase.ANSWERING:
                    self._close(connection)
            elif connection.phase is Phase.READING:
                self._refuse(connection, ShuttingDown("The server is shutting down."), now)
            elif connection.phase in {Phase.IDLE, Phase.HANDSHAKE}:
                self._close(connection)

    def _sweep(self, now: float) -> None:
        """Act on deadlines."""
        timeout_s = self.settings.limits.client_timeout_s
        for connection in list(self._connections.values()):
            age_s = now - connection.since
            phase = connection.phase
            if connection.has_unsent:
                if age_s > timeout_s and phase is Phase.ANSWERING:
                    connection.abort()  # its thread fails at the next send
                elif age_s > timeout_s:
                    self._close(connection)
            elif phase is Phase.READING and age_s > timeout_s:
                self._refuse(connection, RequestTimeout(f"The request was not complete after {timeout_s:g} s."), now)
            elif (
                (phase is Phase.HANDSHAKE and age_s > timeout_s)
                or (phase is Phase.IDLE and age_s > self.settings.limits.keepalive_s)
                or (phase is Phase.LINGERING and age_s > LINGER_S)
            ):
                self._close(connection)
        for queue in self._work.values():
            for connection in queue.take_late(now):
                self._refuse_waiting(connection, "All threads of this server are in use.", now)
        self._start_answers(Work.PIPELINED, now)  # completions that they waited for may have been refused

    # Connections.

    def _take(self, sock: socket.socket, client: Any, server: Any) -> None:
        """A client has connected."""
        now = time.monotonic()
        if len(self._connections) >= self._max_connections and not self._evict():
            refuse_at_once(sock, self._overloaded("All connections of this server are in use."))
            return
        max_body_bytes, tls = self.settings.limits.max_body_bytes, None if self.tls is None else self.tls.context
        try:
            connection = Connection(sock, client, server, now=now, max_body_bytes=max_body_bytes, tls=tls)
        except OSError:  # reset before it was accepted
            sock.close()
            return
        self._connections[connection.fileno()] = connection
        connection.response.on_unsent = partial(self._calls.defer, self._watch_unsent, connection)
        self._poller.register(connection.fileno(), 0)
        self._advance(connection, now)

    def _make_room(self, sock: socket.socket | None) -> None:
        if sock is not None:
            refuse_at_once(sock, self._overloaded("This server has no descriptor left."))
        self._evict()

    def _evict(self) -> bool:
        """Close the connection that has been idle for longest, or else the one that is slowest to send a request."""
        for phases in ((Phase.LINGERING,), (Phase.IDLE,), (Phase.HANDSHAKE, Phase.READING)):
            idle = [c for c in self._connections.values() if c.phase in phases]
            if idle:
                self._num_evicted += 1
                self._close(min(idle, key=lambda connection: connection.since))
                return True
        return False

    def _advance(self, connection: Connection, now: float) -> None:
        try:
            self._act(connection, connection.advance(now), now)
        except OSError as error:
            if isinstance(error, ssl.SSLError) and error.reason == "HTTP_REQUEST":
                connection.send_plain(encode_error(MalformedRequest(SPEAKS_HTTPS)))
            self._drop(connection)
        except Exception as error:
            log.error("unhandled_exception", exc_info=error)
            self._drop(connection)

    def _act(self, connection: Connection, step: Step, now: float) -> None:
        self._count_buffered(connection)
        match step:
            case Step.WAIT_TO_READ:
                self._arm(connection, select.POLLIN)
                holds_much = connection.num_buffered_bytes > bounds.MAX_UNCOUNTED_BYTES
                if holds_much and self._num_buffered > bounds.MAX_BUFFERED_BYTES:
                    self._refuse(connection, self._overloaded("Too many incomplete requests."), now)
            case Step.WAIT_TO_WRITE:
                self._arm(connection, select.POLLOUT)
            case Step.ADMIT if (head := connection.parser.head) is not None:
                self._admit(connection, head, now)
            case Step.ANSWER if (arrival := connection.arrival) is not None:
                self._enqueue(connection, arrival, now)
            case Step.REFUSE if (refusal := connection.refusal) is not None:
                self._report_refusal(refusal)
                self._refuse(connection, refusal, now)
            case Step.CLOSE:
                self._drop(connection)
            case Step.NOTHING:
                pass

    def _admit(self, connection: Connection, head: RequestHead, now: float) -> None:
        """The head of a request has arrived: refuse it, or read its body."""
        try:
            arrival = self.wsgi.admit(head)
        except TercetError as error:
            request = connection.take_refused(now)
            self._end(connection, now, keeps_connection=self._respond(connection, request, {REFUSAL: error}))
        else:
            self._act(connection, connection.read_body(arrival), now)

    def _enqueue(self, connection: Connection, arrival: Arrival, now: float) -> None:
        """A complete request waits for a thread of its class."""
        work = Work.PIPELINED if connection.is_pipelining else arrival.work
        connection.arrival = arrival = arrival._replace(work=work)
        connection.wait_for_thread(now)
        for refused in self._work[work].append(connection, arrival.owner):
            self._refuse_waiting(refused, "Too many large requests wait for their turn.", now)
        self._start_answers(work, now)

    def _refuse_waiting(self, connection: Connection, reason: str, now: float) -> None:
        """Refuse a complete request, which is no longer held."""
        self._refuse(connection, self._overloaded(reason), now)
        connection.parser.clear()
        self._count_buffered(connection)

    def _start_answers(self, work: Work, now: float) -> None:
        """Hand requests of a class that wait to free threads."""
        if work is Work.PIPELINED and self._work[Work.COMPLETIONS].has_waiting:
            return
        queue = self._work[work]
        while (connection := queue.take(now)) is not None:
            request = connection.take_request(now)
            self._count_buffered(connection)
            try:
                self._threads.submit(self._answer, connection, request, connection.arrival)
            except Overloaded as error:
                self._send_error(connection, request, error)
                self._calls.defer(self._finish, connection, False, 0.0)
        if queue.has_waiting:
            self._resumes_at = min(self._resumes_at, queue.resumes_at)
        if work is Work.COMPLETIONS and self._work[Work.PIPELINED].has_waiting:
            self._start_answers(Work.PIPELINED, now)

    def _count_buffered(self, connection: Connection) -> None:
        self._num_buffered += connection.num_buffered_bytes - connection.num_counted_bytes
        connection.num_counted_bytes = connection.num_buffered_bytes

    def _arm(self, connection: Connection, events: int) -> None:
        self._poller.modify(connection.fileno(), events | ONESHOT)

    def _watch_unsent(self, connection: Connection) -> None:
        if connection.phase is Phase.ANSWERING:
            connection.since = time.monotonic()
            self._arm(connection, select.POLLOUT)

    def _drop(self, connection: Connection) -> None:
        """The client is gone. A thread that still answers notices by itself and then `_finish` closes."""
        if connection.phase is Phase.ANSWERING:
            connection.abort()
        else:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        with suppress(OSError, ValueError, KeyError):
            self._poller.unregister(connection.fileno())
        self._connections.pop(connection.fileno(), None)
        connection.close()
        self._count_buffered(connection)

    def _overloaded(self, reason: str) -> Overloaded:
        self.wsgi.count_refused_connection(Overloaded.code)
        return Overloaded(f"{reason} Try again shortly.")

    def _refuse(self, connection: Connection, error: TercetError, now: float) -> None:
        """Answer with an error that the app does not see, and end the connection."""
        headers = cors.refusal_headers(connection.parser.received_head, self.settings.access)
        with suppress(OSError):
            connection.response.sendall(encode_error(error, headers))
        self._end(connection, now, keeps_connection=False)

    def _finish(self, connection: Connection, keeps_connection: bool, busy_s: float) -> None:
        """A thread has answered, in `busy_s` of CPU time."""
        arrival, now = connection.arrival, time.monotonic()
        assert arrival is not None
        queue = self._work[arrival.work]
        queue.finish(connection, now, busy_s)
        self._end(connection, now, keeps_connection=keeps_connection, queue=queue, owner=arrival.owner)
        self._start_answers(arrival.work, now)

    def _end(
        self,
        connection: Connection,
        now: float,
        *,
        keeps_connection: bool,
        queue: WorkQueue | None = None,
        owner: str = "",
    ) -> None:
        """A response is complete. `queue` and `owner`: of the request, if it had a thread."""
        try:
            step = connection.finish_response(now, keeps_connection=keeps_connection)
        except OSError:
            self._close(connection)
            return
        if connection.has_unsent and queue is not None:
            for slow in queue.hold_response(connection, owner):
                self._close(slow)
        if connection.phase is not Phase.CLOSED:
            self._act(connection, step, now)

    # In a thread.

    def _answer(self, connection: Connection, request: Request, arrival: Arrival) -> None:
        keeps_connection, began_at = False, time.thread_time()
        try:
            keeps_connection = self._respond(connection, request, {ARRIVAL: arrival})
        finally:
            self._calls.defer(self._finish, connection, keeps_connection, time.thread_time() - began_at)

    def _respond(self, connection: Connection, request: Request, known: dict[str, object]) -> bool:
        """Answer one request. Returns whether the connection may carry another.

        Args:
            known: what the app has said of the head, for the environment.
        """
        sock, scheme = connection.response, "http" if self.tls is None else "https"
        writer = ResponseWriter(sock.sendall, request, keeps_connection=self.alive and request.keeps_connection)
        environ = make_environ(request, scheme, sock, connection.client, connection.server) | known
        try:
            writer.respond(self.wsgi, environ)
        except OSError:  # the client is gone
            return False
        except BaseException as error:
            log.error("unhandled_exception", exc_info=error)
            if not writer.has_begun:
                self._send_error(connection, request, TercetError("The server failed."))
            return False
        return writer.keeps_connection

    def _send_error(self, connection: Connection, request: Request, error: TercetError) -> None:
        self._report_refusal(error)
        headers = cors.refusal_headers(request.head.raw, self.settings.access)
        with suppress(OSError):
            connection.response.sendall(encode_error(error, headers))

    def _report_refusal(self, error: TercetError) -> None:
        """Log and count a request that the app does not see."""
        log.info("request_refused", code=error.code)
        self.wsgi.count_unparsed_request(error.status)

    # Starting and stopping.

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
            self.alive = False  # responses now close their connections

    def _report_warm(self) -> None:
        """Report this worker as ready, which stops its predecessor."""
        is_late = time.monotonic() - self._started_at > MAX_WARM_WAIT_S
        if self.life.phase is LifePhase.LOADING and (self.wsgi.has_warm_slot or is_late):
            self.life.warm()
            if not self._listeners.are_open:
                self._listeners.open()
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
