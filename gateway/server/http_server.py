"""The gateway's HTTP server: which connections are open, what a thread answers, when the process stops.

gunicorn loads `GatewayServer` as its worker class. The main thread accepts connections, reads requests and flushes
responses without blocking (`connections`). A complete request is answered by a thread, with gunicorn's own parser and
WSGI code unless it is plain (`plain_requests`). What a client may hold is bounded: in time by
`TERCET_CLIENT_TIMEOUT_S`, in number by the limit of open files, in memory by `MAX_BUFFERED_BYTES`.

Stopping has three forms. TERM alone: readiness turns 503 for `TERCET_DRAIN_S`, the listener closes, accepted requests
finish, and shortly before the grace ends the remaining ones are cancelled, so that every client has an answer. After a
reload, or if the master is dead: as TERM, but the listener closes at once.

One file, because all of it changes the state of connections in one thread. It knows neither routes nor dialects, and
of the app only `ServedApp`. gunicorn's master imports this module, so it must not import the app. It calls methods of
gunicorn's `ThreadWorker` that gunicorn does not promise to keep; tests/gateway/server/test_http_server.py checks the
pinned version.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import select
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import structlog
from gunicorn.http import get_parser
from gunicorn.http.errors import LimitRequestHeaders, LimitRequestLine, NoMoreData, ParseException
from gunicorn.http.wsgi import Response, base_environ
from gunicorn.workers.gthread import ThreadWorker

from gateway import cors
from gateway.server.connections import LINGER_S, Connection, Phase, RequestSource, Step
from gateway.server.error_responses import encode_error, send_once
from gateway.server.large_reads import LargeReads
from gateway.server.plain_requests import plain_environ, plain_head
from gateway.server.served_app import ServedApp
from gateway.server.work import Work
from gateway.server.work_queue import WorkQueue
from shared.call_threads import CallThreads
from shared.errors import (
    SPEAKS_HTTPS,
    HeadersTooLarge,
    MalformedRequest,
    Overloaded,
    RequestTimeout,
    ShuttingDown,
    TercetError,
    UrlTooLong,
)
from shared.log_stream import finish_log
from shared.masters.leases import Leases
from shared.masters.startup import ServerTls
from shared.masters.worker_life import LifePhase, WorkerLife
from shared.settings import Settings
from shared.sockets import ONESHOT, Poller

log = structlog.get_logger()

# How long a thread may hold the interpreter while the main thread waits for it (Python's default: 5 ms). Each thread
# that waits wakes up as often, so a shorter interval costs CPU time (docs/PERFORMANCE.md, CPU per answer).
SWITCH_INTERVAL_S = 0.002
POLL_S = 0.25  # the longest time between two looks at deadlines
STOP_POLL_S = 0.05  # and during a stop, which passes several of them one after the other
# Requests that are not complete yet, of all connections together; a connection that holds little is not refused.
MAX_BUFFERED_BYTES = 256 << 20
MAX_UNCOUNTED_BYTES = 8 << 10
# Descriptors kept free for log, metrics, state streams, and files that libraries open.
SPARE_DESCRIPTORS = 32
MAX_CONNECTIONS = 10_000
# Share of the remaining file descriptors for clients; the rest is for branch connections, three to a request.
CLIENT_SHARE = 0.6
# Threads of each class of requests besides completions (`gateway.server.work_queue`). They compute for a few
# milliseconds, or wait for one store, worker or file; the interpreter runs one thread at a time, so more of them would
# answer no more requests a second. Of those that tokenize, two have a turn (MAX_TEXTS in gateway/pool/tokenizing.py),
# the others parse or encode; of those for jobs, as many may wait for a store (MAX_CALLS in gateway/jobs/store.py).
# Large requests have half of them, because they may take seconds.
MAX_SMALL = 4
MAX_LARGE = 2
# Health checks are answered in less than a millisecond. A balancer or SageMaker replaces a server that does not answer
# them in time, and its load moves to the others.
MAX_CHECKING = 2
# Requests of clients that send the next one before they have read the last response are answered by few threads, and
# after completions: no client in use does it, and a flood of them would cost the others their turn.
MAX_PIPELINING = 4
# A completion that finds no free thread for this long is refused, and a large one somewhat later. There are threads for
# all completions that may run or wait, so without one it would be refused anyway. Other requests wait as long as a
# request may take, without a thread.
MAX_READY_WAIT_S = 0.2
# Share of the bytes that may be buffered which the requests of one class may have while they wait for a thread, 32 of
# the largest by default: all classes together leave a quarter to requests that are not complete. Of completions more
# wait, and briefly.
CLASS_SHARE, COMPLETIONS_SHARE = 1 / 8, 1 / 4
# How long a stopping worker keeps idle connections: a client may be sending a request on one.
IDLE_LINGER_S = 1.0
# Remaining requests are cancelled this long before the grace ends, so that their answers can still leave.
CANCEL_MARGIN_S = 0.75
EXIT_MARGIN_S = 0.1
# At the exit, the longest wait for jobs that return to their queue: their store may be unavailable.
JOBS_STOP_S = 1.0
# A new worker reports itself as ready once it knows a warm slot, or after this time: the pool may be down.
MAX_WARM_WAIT_S = 5.0
SMALL_CLASSES = (Work.TOKENIZING, Work.JOBS, Work.FEEDBACK, Work.READS)
_ACCEPTS_AT_ONCE = 64
_DESCRIPTORS = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


# What gunicorn's response object asks of the request.
_PLAIN_REQUEST = SimpleNamespace(method="POST", version=(1, 1), should_close=lambda: False)


class GatewayServer(ThreadWorker):  # type: ignore[misc]  # gunicorn has no type hints
    """`gunicorn.conf.py` sets `life`, `leases`, `slot_index`, `settings`, `tls` and `activity_fd` before the fork."""

    life: WorkerLife
    leases: Leases
    slot_index: int  # its place in the leases
    settings: Settings
    tls: ServerTls | None
    activity_fd: int | None  # of a pipe to the supervisor; it gets a byte while completions are requested
    wsgi: ServedApp
    alive: bool
    max_connections = MAX_CONNECTIONS  # fewer where descriptors do not suffice

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
        self._spare_file = open(os.devnull, "rb")  # noqa: SIM115
        self._poller = Poller()
        try:
            super().init_process()  # returns when the worker stops
        except Exception as error:
            log.error("unhandled_exception", exc_info=error)
            raise
        finally:
            # An interpreter that exits would stop these threads anywhere.
            if any(queue.num_answering for queue in self._work.values()):
                finish_log()
                os._exit(0)

    def init_signals(self) -> None:
        """Leave signals to `life`."""

    def load_wsgi(self) -> None:
        super().load_wsgi()
        self._derive_limits()
        self._threads = CallThreads("answer", sum(queue.max_threads for queue in self._work.values()))
        self._base_environ = {
            **base_environ(self.cfg),
            "wsgi.multithread": True,
            "wsgi.url_scheme": "http" if self.tls is None else "https",
            "SERVER_PROTOCOL": "HTTP/1.1",
            "SCRIPT_NAME": "",
        }
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        completions = self._work[Work.COMPLETIONS]
        if self.tls is not None:
            expires_at = self.tls.expires_at
            text = "When the certificate that is served expires, in Unix seconds"
            self.wsgi.watch_server({"certificate_expiry_seconds": (text, lambda: expires_at)})
        self.wsgi.watch_server(
            {
                "open_connections": ("Open client connections", lambda: len(self._connections)),
                "max_connections": ("Bound of open client connections", lambda: self._max_connections),
                "evicted_connections": (
                    "Connections closed to make room for new ones, since the start",
                    lambda: self._num_evicted,
                ),
                "buffered_bytes": ("Bytes of requests that wait for their end or a thread", lambda: self._num_buffered),
                "busy_threads": (
                    "Threads that answer a request",
                    lambda: sum(queue.num_answering for queue in self._work.values()),
                ),
                "max_busy_threads": ("Bound of threads that answer completions", lambda: completions.max_threads),
                "open_descriptors": ("Open file descriptors", lambda: len(os.listdir(_DESCRIPTORS))),
                "max_descriptors": ("Limit of open file descriptors", lambda: soft),
            }
        )
        self._started_at = time.monotonic()
        self.life.load(partial(self.method_queue.defer, lambda: None))

    def _derive_limits(self) -> None:
        """How many connections may be open and how many requests of each class may be answered, so that descriptors
        suffice. Classes besides completions use few of the spare ones."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = max(16, soft - len(os.listdir(_DESCRIPTORS)) - SPARE_DESCRIPTORS)
        for_clients = min(MAX_CONNECTIONS, int(CLIENT_SHARE * free))
        self._max_connections = min(self.max_connections, for_clients)
        max_answering = max(2, min(self.cfg.threads, self._max_connections, (free - for_clients) // 3))
        timeout_s = self.settings.limits.timeout_s
        of_class, of_completions = int(CLASS_SHARE * MAX_BUFFERED_BYTES), int(COMPLETIONS_SHARE * MAX_BUFFERED_BYTES)
        completions = WorkQueue(max_answering, MAX_READY_WAIT_S, of_completions)
        self._work = {work: WorkQueue(MAX_SMALL, timeout_s, of_class, MAX_LARGE, completions) for work in SMALL_CLASSES}
        self._work[Work.COMPLETIONS] = completions
        self._work[Work.HEALTH] = WorkQueue(MAX_CHECKING, timeout_s, MAX_UNCOUNTED_BYTES * self._max_connections)
        self._work[Work.PIPELINED] = WorkQueue(MAX_PIPELINING, float("inf"), of_class)

    # The main loop.

    def run(self) -> None:
        self._poller.register(self.method_queue.fileno(), select.POLLIN)
        for listener in self.sockets:
            listener.setblocking(False)
        # While a predecessor serves, it takes the connections: this process knows no slot yet.
        self._is_accepting = len(self.leases.holders(self.slot_index)) <= 1
        if self._is_accepting:
            self._open_listeners()
        listeners = {listener.fileno(): listener for listener in self.sockets}
        sweep_at = 0.0
        while not self._is_finished(time.monotonic()):
            poll_s = POLL_S if self._stop_began_at is None else STOP_POLL_S
            resumes_at = min(self._resumes_at, self._large_reads.resumes_at)
            if resumes_at < math.inf:
                poll_s = min(poll_s, max(0.0, resumes_at - time.monotonic()))
            events = self._poller.poll(poll_s)
            now = time.monotonic()
            for descriptor, _ in events:
                if descriptor == self.method_queue.fileno():
                    self.method_queue.run_callbacks(None)
                elif descriptor in listeners:
                    self._accept(listeners[descriptor], now)
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
                if not self.is_parent_alive() and self._stop_began_at is None:
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
            self._close_listeners(now)
        if self._listening_ended_at is not None:
            is_last_moment = elapsed >= self.settings.server.grace_s - CANCEL_MARGIN_S
            self._end_unaccepted(now, now - self._listening_ended_at, is_last_moment)
        if elapsed >= self.settings.server.grace_s - CANCEL_MARGIN_S and not self._is_cancelled:
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
            elif phase is Phase.READY and (queue := self._work[connection.work]).is_late(connection, now):
                queue.remove(connection)
                self._refuse_waiting(connection, "All threads of this server are in use.", now)
            elif phase is Phase.READING and age_s > timeout_s:
                self._refuse(connection, RequestTimeout(f"The request was not complete after {timeout_s:g} s."), now)
            elif (
                (phase is Phase.HANDSHAKE and age_s > timeout_s)
                or (phase is Phase.IDLE and age_s > self.settings.limits.keepalive_s)
                or (phase is Phase.LINGERING and age_s > LINGER_S)
            ):
                self._close(connection)
        self._start_answers(Work.PIPELINED, now)  # completions that they waited for may have been refused

    # Connections.

    def _accept(self, listener: Any, now: float) -> bool:
        """Take connections from the backlog. Returns whether more may wait there."""
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, client = listener.accept()
            except ConnectionAbortedError:
                continue
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._refuse_with_spare_descriptor(listener)
                return False
            if len(self._connections) >= self._max_connections and not self._evict():
                send_once(sock, encode_error(self._overloaded("All connections of this server are in use.")))
                sock.close()
                continue
            try:
                connection = Connection(
                    sock,
                    client,
                    listener.getsockname(),
                    now=now,
                    max_body_bytes=self.settings.limits.max_body_bytes,
                    tls=None if self.tls is None else self.tls.context,
                )
            except OSError:  # reset before it was accepted
                sock.close()
                continue
            self._connections[connection.fileno()] = connection
            connection.response.on_unsent = partial(self.method_queue.defer, self._watch_unsent, connection)
            self._poller.register(connection.fileno(), 0)
            self._advance(connection, now)
        return True

    def _evict(self) -> bool:
        """Close the connection that has been idle for longest, or else the one that is slowest to send a request."""
        for phases in ((Phase.LINGERING,), (Phase.IDLE,), (Phase.HANDSHAKE, Phase.READING)):
            idle = [c for c in self._connections.values() if c.phase in phases]
            if idle:
                self._num_evicted += 1
                self._close(min(idle, key=lambda connection: connection.since))
                return True
        return False

    def _refuse_with_spare_descriptor(self, listener: Any) -> None:
        """Out of descriptors: take the connection with the one kept for this, refuse it, and make room."""
        with suppress(OSError):
            self._spare_file.close()
            sock, _ = listener.accept()
            send_once(sock, encode_error(self._overloaded("This server has no descriptor left.")))
            sock.close()
        self._evict()
        with suppress(OSError):
            self._spare_file = open(os.devnull, "rb")  # noqa: SIM115

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
                if connection.num_buffered_bytes > MAX_UNCOUNTED_BYTES and self._num_buffered > MAX_BUFFERED_BYTES:
                    self._refuse(connection, self._overloaded("Too many incomplete requests."), now)
            case Step.WAIT_TO_WRITE:
                self._arm(connection, select.POLLOUT)
            case Step.ANSWER if (refusal := self._early_refusal(connection)) is not None:
                self._take_request(connection, now)
                self._refuse(connection, refusal, now, keeps_connection=True)
            case Step.ANSWER:
                self._enqueue(connection, now)
            case Step.REFUSE_HEAD:
                self._refuse(connection, HeadersTooLarge("The request's headers are longer than 64 KiB."), now)
            case Step.REFUSE_BODY:
                self.wsgi.count_unparsed_request(MalformedRequest.status)
                self._refuse(connection, MalformedRequest(connection.refusal), now)
            case Step.CLOSE:
                self._drop(connection)
            case Step.NOTHING:
                pass

    def _early_refusal(self, connection: Connection) -> TercetError | None:
        if not self.alive or not connection.is_lone_request:
            return None
        return self.wsgi.find_early_refusal(connection.request_head)

    def _enqueue(self, connection: Connection, now: float) -> None:
        """A complete request waits for a thread of its class."""
        connection.work, connection.owner = self.wsgi.classify(connection.request_head)
        if connection.is_pipelining:
            connection.work = Work.PIPELINED
        connection.wait_for_thread(now)
        for refused in self._work[connection.work].append(connection, connection.owner):
            self._refuse_waiting(refused, "Too many large requests wait for their turn.", now)
        self._start_answers(connection.work, now)

    def _refuse_waiting(self, connection: Connection, reason: str, now: float) -> None:
        """Refuse a complete request, which is no longer held."""
        self._refuse(connection, self._overloaded(reason), now)
        connection.discard_received()
        self._count_buffered(connection)

    def _start_answers(self, work: Work, now: float) -> None:
        """Hand requests of a class that wait to free threads."""
        if work is Work.PIPELINED and self._work[Work.COMPLETIONS].has_waiting:
            return
        queue = self._work[work]
        while (connection := queue.take(now)) is not None:
            request = self._take_request(connection, now)
            try:
                self._threads.submit(self._answer, connection, request)
            except Overloaded as error:
                self._send_error(connection, error, request)
                self.method_queue.defer(self._finish, connection, False, 0.0)
        if queue.has_waiting:
            self._resumes_at = min(self._resumes_at, queue.resumes_at)
        if work is Work.COMPLETIONS and self._work[Work.PIPELINED].has_waiting:
            self._start_answers(Work.PIPELINED, now)

    def _take_request(self, connection: Connection, now: float) -> bytearray:
        request = connection.take_request(now)
        self._count_buffered(connection)
        return request

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

    def _refuse(
        self, connection: Connection, error: TercetError, now: float, *, keeps_connection: bool = False
    ) -> None:
        """Answer with an error, without a thread."""
        headers = self._cors_headers(connection.received_head)
        try:
            connection.response.sendall(encode_error(error, keeps_connection=keeps_connection, headers=headers))
            step = connection.finish_response(now, keeps_connection=keeps_connection)
        except OSError:
            self._close(connection)
            return
        self._act(connection, step, now)

    def _cors_headers(self, request: bytes) -> list[tuple[str, str]]:
        """The headers that let a page of a listed origin read why its request was refused before it was parsed."""
        origin = cors.origin_of(request) if self.settings.access.origins else None
        return cors.response_headers(origin) if origin and self.settings.access.allows_origin(origin) else []

    def _finish(self, connection: Connection, keeps_connection: bool, busy_s: float) -> None:
        """A thread has answered, in `busy_s` of CPU time."""
        work, owner, now = connection.work, connection.owner, time.monotonic()
        self._work[work].finish(connection, now, busy_s)
        try:
            step = connection.finish_response(now, keeps_connection=keeps_connection)
        except OSError:
            self._close(connection)
        else:
            if connection.has_unsent:
                for slow in self._work[work].hold_response(connection, owner):
                    self._close(slow)
            if connection.phase is not Phase.CLOSED:
                self._act(connection, step, now)
        self._start_answers(work, now)

    # In a thread.

    def _answer(self, connection: Connection, data: bytearray) -> None:
        keeps_connection, began_at = False, time.thread_time()
        try:
            keeps_connection = self._respond(connection, data)
        finally:
            self.method_queue.defer(self._finish, connection, keeps_connection, time.thread_time() - began_at)

    def _respond(self, connection: Connection, data: bytearray) -> bool:
        """Answer one request. Returns whether the connection may carry another."""
        # What gunicorn's `handle_request` needs of a connection.
        answered = SimpleNamespace(sock=connection.response, client=connection.client, server=connection.server)
        try:
            if (environ := self._plain_environ(connection, data)) is not None:
                return self._respond_plainly(connection, environ)
            request = next(get_parser(self.cfg, RequestSource(data), connection.client))
            if connection.is_last_request:
                request.force_close()
            return bool(self.handle_request(request, answered))
        except (NoMoreData, StopIteration):
            return False
        except ParseException as error:
            self._send_error(connection, _malformed(error), data)
        except OSError:  # the client is gone
            return False
        except BaseException as error:
            log.error("unhandled_exception", exc_info=error)
            self._send_error(connection, TercetError("The server failed."), data)
        return False

    def _plain_environ(self, connection: Connection, data: bytearray) -> dict[str, Any] | None:
        is_kept = self.alive and not connection.is_last_request
        if not is_kept or not isinstance(connection.client, tuple) or not isinstance(connection.server, tuple):
            return None
        return plain_environ(data, self._base_environ, connection.response, connection.client, connection.server)

    def _respond_plainly(self, connection: Connection, environ: dict[str, Any]) -> bool:
        """`handle_request` for a plain request. gunicorn's response object writes what is not a plain response."""
        response = Response(_PLAIN_REQUEST, connection.response, self.cfg)
        write: Callable[[bytes], None] = response.write

        def start_response(
            status: str, headers: list[tuple[str, str]], exc_info: Any = None
        ) -> Callable[[bytes], None]:
            nonlocal write
            if exc_info is None and (head := plain_head(status, headers)) is not None:
                connection.response.sendall(head)
                write = connection.response.sendall
            else:
                response.start_response(status, headers, exc_info)
            return write

        body = self.wsgi(environ, start_response)
        try:
            for part in body:
                write(part)
            if response.status is not None:
                response.close()
        except OSError:
            raise
        except BaseException as error:
            log.error("unhandled_exception", exc_info=error)
            return False  # the response has begun; that the connection ends shows that it is not complete
        finally:
            if hasattr(body, "close"):
                body.close()
        return response.status is None or not response.should_close()

    def _send_error(self, connection: Connection, error: TercetError, request: bytearray) -> None:
        log.info("request_refused", code=error.code)
        self.wsgi.count_unparsed_request(error.status)
        with suppress(OSError):
            connection.response.sendall(encode_error(error, headers=self._cors_headers(bytes(request))))

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
            if not self._is_accepting:
                self._is_accepting = True
                self._open_listeners()
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

    def _open_listeners(self) -> None:
        for listener in self.sockets:
            self._poller.register(listener.fileno(), select.POLLIN)

    def _close_listeners(self, now: float) -> None:
        """Take the connections that wait in the backlog, then close. The kernel resets what is left in a backlog. Those
        of a predecessor that serves are left to it."""
        self._listening_ended_at = now
        for listener in self.sockets:
            while self._is_accepting and self._accept(listener, now):
                pass
            with suppress(OSError, KeyError):
                self._poller.unregister(listener.fileno())
            listener.close()


def _malformed(error: ParseException) -> TercetError:
    """gunicorn's parse error as ours. Its text is dropped: it repeats what the client sent."""
    if isinstance(error, LimitRequestLine):
        return UrlTooLong("The request line is longer than 4,094 bytes; send the text in the body of a POST.")
    if isinstance(error, LimitRequestHeaders):
        return HeadersTooLarge("At most 1,000 header fields are accepted, of 64 KiB together.")
    return MalformedRequest("The request line or a header field is not valid HTTP/1.1.")
