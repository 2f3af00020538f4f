"""The gateway's HTTP server: which connections are open, and what a thread answers.

Of its threads one leads: it polls all sockets, accepts connections, reads requests and flushes responses without
blocking (`connections`). When a request is complete, the leader answers it itself (`wsgi`), and another thread leads:
D. C. Schmidt et al., "Leader/Followers", PLoP 2000. A client's resources are bounded: in time by
`TERCET_CLIENT_TIMEOUT_S`, in number by the limit of open files, in memory by `MAX_BUFFERED_BYTES`.

It knows no route, and of the app only `ServedApp`.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import structlog

from gateway.server import bounds
from gateway.server.connections import LINGER_S, Connection, Phase, Step
from gateway.server.listeners import Listeners
from gateway.server.request_parser import NO_HEAD, Request, RequestHead
from gateway.server.served_app import ARRIVAL, Arrival, ServedApp, Work
from gateway.server.work_queue import WorkQueue
from gateway.server.wsgi import ResponseWriter, make_environ
from shared.errors import SPEAKS_HTTPS, MalformedRequest, Overloaded, RequestTimeout, ShuttingDown, TercetError
from shared.settings import Settings
from shared.sockets import ONESHOT, Poller
from shared.telemetry import finish_log

log = structlog.get_logger()

# The longest time until the leader looks again at requests that wait.
POLL_S = 0.25
# Sockets that it acts on at a time. What it refuses of them is answered before it looks at the others.
MAX_EVENTS = 16
# How long a stopping server keeps idle connections: a client may be sending a request on one.
IDLE_LINGER_S = 1.0
# Where a descriptor lacked, and a new client was refused for it, no connection is closed before it is this old: its
# client is about to send a request.
FRESH_S = 0.25

_Taken: TypeAlias = tuple[Connection, Request, Arrival]


class HttpServer:
    """The connections of one process and the threads that answer their requests.

    Attributes:
        keeps_connections: a connection may carry another request after a response. False while the process stops.
    """

    def __init__(
        self,
        app: ServedApp,
        settings: Settings,
        tls: ssl.SSLContext | None,
        sockets: Iterable[Any],
        max_connections: int,
        max_threads: int,
    ) -> None:
        """
        Args:
            sockets: at which it listens once `listen` is called.
            max_connections, max_threads: where descriptors suffice; threads that answer completions.
        """
        self.keeps_connections = True
        self._app = app
        self._settings = settings
        self._tls = tls
        timeout_s = settings.limits.timeout_s
        self._max_connections, self._work = bounds.divide_descriptors(max_connections, max_threads, timeout_s)
        self._leading = threading.Lock()  # of the thread that polls
        # Guards everything below: sockets, connections, queues. Never held while a thread waits or the app answers.
        self._lock = threading.RLock()
        self._num_following = 0  # threads that wait to lead
        self._num_threads = 0
        self._connections: dict[int, Connection] = {}
        self._refused: list[Connection] = []  # by the heads of their requests: the thread that leads answers them
        self._num_buffered = 0  # bytes, as `MAX_BUFFERED_BYTES` bounds them
        self._num_evicted = 0
        self._poller = Poller()
        self._listeners = Listeners(sockets, self._poller, self._take, self._make_room)

    @property
    def has_connections(self) -> bool:
        return bool(self._connections)

    @property
    def num_answering(self) -> int:
        """Threads that answer a request."""
        return sum(queue.num_answering for queue in self._work.values())

    @property
    def gauges(self) -> Mapping[str, tuple[str, Callable[[], float]]]:
        """Texts and functions by name."""
        return {
            "open_connections": ("Open client connections", lambda: len(self._connections)),
            "max_connections": ("Bound of open client connections", lambda: self._max_connections),
            "evicted_connections": (
                "Connections closed to make room for new ones, since the start",
                lambda: self._num_evicted,
            ),
            "buffered_bytes": ("Bytes of requests that wait for their end or a thread", lambda: self._num_buffered),
            "busy_threads": ("Threads that answer a request", lambda: self.num_answering),
            "max_busy_threads": (
                "Bound of threads that answer completions",
                lambda: self._work[Work.COMPLETIONS].max_threads,
            ),
            "open_descriptors": ("Open file descriptors", bounds.num_open_descriptors),
            "max_descriptors": ("Limit of open file descriptors", bounds.max_descriptors),
        }

    def listen(self) -> None:
        """Take connections, if it does not yet."""
        with self._lock:
            if not self._listeners.are_open:
                self._listeners.open()

    def end_listening(self) -> None:
        with self._lock:
            self._listeners.close()

    def start(self) -> None:
        """Start the first thread.

        Raises:
            RuntimeError: it cannot be started.
        """
        with self._lock:
            if not self._start_thread():
                raise RuntimeError("The server's first thread cannot be started.")

    def abort(self) -> None:
        """End all connections."""
        with self._lock:
            for connection in self._connections.values():
                connection.abort()

    def sweep(self, now: float) -> None:
        """Act on deadlines, at `now` (`time.monotonic()`)."""
        with self._lock:
            timeout_s = self._settings.limits.client_timeout_s
            for connection in list(self._connections.values()):
                age_s = now - connection.since
                phase = connection.phase
                if connection.has_unsent:
                    if age_s > timeout_s and phase is Phase.ANSWERING:
                        connection.abort()  # its thread fails at the next send
                    elif age_s > timeout_s:
                        self._close(connection)
                elif phase is Phase.READING and age_s > timeout_s:
                    self._refuse(
                        connection, RequestTimeout(f"The request was not complete after {timeout_s:g} s."), now
                    )
                elif (
                    (phase is Phase.HANDSHAKE and age_s > timeout_s)
                    or (phase is Phase.IDLE and age_s > self._settings.limits.keepalive_s)
                    or (phase is Phase.LINGERING and age_s > LINGER_S)
                ):
                    self._close(connection)
            for queue in self._work.values():
                for connection in queue.take_late(now):
                    self._refuse_waiting(connection, "All threads of this server are in use.", now)

    def end_unaccepted(self, now: float, waited_s: float, *, is_last_moment: bool, is_replaced: bool) -> None:
        """End connections that wait for their client during a stop; requests that are being answered stay, and what has
        arrived is read first.

        Those that have begun a request and send it slowly are refused first: they are given as long to read it, and
        then all has ended when idle connections end.

        Args:
            waited_s: time since the listeners have closed.
            is_last_moment: the grace ends now.
            is_replaced: after a reload: there is time for requests that arrive slowly.
        """
        with self._lock:
            for connection in list(self._connections.values()):
                if waited_s < (IDLE_LINGER_S / 2 if connection.phase is Phase.READING else IDLE_LINGER_S):
                    continue
                is_unaccepted = connection.phase in {Phase.IDLE, Phase.READING, Phase.HANDSHAKE}
                is_sending = is_replaced and connection.phase is not Phase.IDLE
                if is_unaccepted and not is_last_moment and (is_sending or connection.has_arrived):
                    continue
                if connection.has_unsent or connection.phase in {Phase.FLUSHING, Phase.LINGERING}:
                    if now - connection.since > IDLE_LINGER_S / 2 and connection.phase is not Phase.ANSWERING:
                        self._close(connection)
                elif connection.phase is Phase.READING:
                    self._refuse(connection, ShuttingDown("The server is shutting down."), now)
                elif connection.phase in {Phase.IDLE, Phase.HANDSHAKE}:
                    self._close(connection)

    # In a thread that leads.

    def _serve(self) -> None:
        """Lead until a request is complete, answer it, and those that have waited for its thread; then follow."""
        try:
            while True:
                with self._leading:
                    taken: _Taken | None = self._lead()
                while taken is not None:
                    self._answer(*taken)
                    with self._lock:
                        taken = self._take_request(time.monotonic())
                with self._lock:
                    self._num_following += 1
        except BaseException as error:  # no other thread would lead
            log.error("unhandled_exception", exc_info=error)
            finish_log()
            os._exit(1)

    def _lead(self) -> _Taken:
        """Act on the events of all sockets, until a request has a thread: this one. Meanwhile answer what is refused:
        to hand it to another thread would take as long as to answer it."""
        with self._lock:
            self._num_following -= 1
        events: list[tuple[int, int]] = []
        while True:
            with self._lock:
                now = time.monotonic()
                for descriptor, _ in events:
                    if descriptor in self._listeners.by_descriptor:
                        self._listeners.accept(descriptor)
                    elif (connection := self._connections.get(descriptor)) is not None:
                        self._advance(connection, now)
                while (taken := self._take_request(now)) is not None:
                    if self._num_following or self._start_thread():
                        return taken
                    error = _overloaded("No thread can be started now.")
                    self._send_error(taken[0].response.sendall, taken[1].head, error)
                    self._finish(taken[0], taken[2], keeps_connection=False)
                refused = [self._begin(each, now) for each in self._refused if each.phase is Phase.READY]
                self._refused.clear()
            for taken in refused:
                self._answer(*taken)
            # A request behind one that was refused may wait in a queue now.
            events = self._poller.poll(0.0 if refused else POLL_S, MAX_EVENTS)

    def _start_thread(self) -> bool:
        """Start a thread that follows. Returns whether it could be started."""
        try:
            threading.Thread(target=self._serve, name=f"answer_{self._num_threads + 1}", daemon=True).start()
        except (RuntimeError, MemoryError) as error:
            log.error("thread_not_started", reason=str(error))
            return False
        self._num_threads += 1
        self._num_following += 1
        return True

    def _take_request(self, now: float) -> _Taken | None:
        """A complete request that may be answered now."""
        for work, queue in self._work.items():
            if not queue.waiting or (work is Work.PIPELINED and self._work[Work.COMPLETIONS].waiting):
                continue
            if (connection := queue.take()) is not None:
                return self._begin(connection, now)
        return None

    def _begin(self, connection: Connection, now: float) -> _Taken:
        """Take a request out of its connection, to answer it."""
        assert connection.arrival is not None
        taken = connection, connection.take_request(now), connection.arrival
        self._count_buffered(connection)
        return taken

    # Connections.

    def _take(self, sock: socket.socket, client: Any, server: Any) -> None:
        """A client has connected."""
        now = time.monotonic()
        if len(self._connections) >= self._max_connections and not self._evict(now):
            self._refuse_at_once(sock, "All connections of this server are in use.")
            return
        max_body_bytes, tls = self._settings.limits.max_body_bytes, self._tls
        try:
            connection = Connection(
                sock, client, server, now=now, max_body_bytes=max_body_bytes, charge=self._app.charge, tls=tls
            )
        except OSError:  # reset before it was accepted
            sock.close()
            return
        self._connections[connection.fileno()] = connection
        connection.response.on_unsent = partial(self._watch_unsent, connection)
        self._poller.register(connection.fileno(), 0)
        self._advance(connection, now)

    def _make_room(self, sock: socket.socket | None) -> None:
        if sock is not None:
            self._refuse_at_once(sock, "This server has no descriptor left.")
        self._evict(time.monotonic() - FRESH_S)

    def _evict(self, until: float) -> bool:
        """Close the connection that has been idle for longest, or else the one that is slowest to send a request, of
        those that are so since `until`."""
        for phases in ((Phase.LINGERING,), (Phase.IDLE,), (Phase.HANDSHAKE, Phase.READING)):
            idle = [c for c in self._connections.values() if c.phase in phases and c.since <= until]
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
                self._send_error(connection.send_plain, NO_HEAD, MalformedRequest(SPEAKS_HTTPS))
            self._drop(connection)
        except Exception as error:
            log.error("unhandled_exception", exc_info=error)
            self._drop(connection)

    def _act(self, connection: Connection, step: Step, now: float) -> None:
        self._count_buffered(connection)
        match step:
            case Step.WAIT_TO_READ:
                self._arm(connection, select.POLLIN)
                holds_much = connection.num_counted_bytes > bounds.MAX_UNCOUNTED_BYTES
                if holds_much and self._num_buffered > bounds.MAX_BUFFERED_BYTES:
                    self._refuse(connection, _overloaded("Too many incomplete requests."), now)
            case Step.WAIT_TO_WRITE:
                self._arm(connection, select.POLLOUT)
            case Step.ADMIT if (head := connection.parser.head) is not None:
                arrival = self._app.admit(head, connection.client)
                if arrival.refusal is None:
                    self._act(connection, connection.read_body(arrival), now)
                else:
                    self._enqueue(connection, arrival, now)
            case Step.ANSWER if connection.arrival is not None:
                self._enqueue(connection, connection.arrival, now)
            case Step.REFUSE if (refusal := connection.refusal) is not None:
                self._refuse(connection, refusal, now)
            case Step.CLOSE:
                self._drop(connection)
            case Step.NOTHING:
                pass

    def _enqueue(self, connection: Connection, arrival: Arrival, now: float) -> None:
        """A request that is complete waits for a thread of its class; one that is refused, for the one that leads."""
        if connection.is_pipelining:
            arrival = arrival._replace(work=Work.PIPELINED)
        connection.arrival = arrival
        connection.wait_for_thread(now)
        if arrival.work is Work.REFUSED:
            self._refused.append(connection)
            return
        for refused in self._work[arrival.work].append(connection, arrival.owner):
            self._refuse_waiting(refused, "Too many bytes of requests wait for a thread.", now)

    def _refuse_waiting(self, connection: Connection, reason: str, now: float) -> None:
        """Refuse a complete request, which is no longer held."""
        self._refuse(connection, _overloaded(reason), now)
        connection.parser.clear()
        self._count_buffered(connection)

    def _count_buffered(self, connection: Connection) -> None:
        num_bytes = connection.parser.num_bytes
        self._num_buffered += num_bytes - connection.num_counted_bytes
        connection.num_counted_bytes = num_bytes

    def _arm(self, connection: Connection, events: int) -> None:
        self._poller.modify(connection.fileno(), events | ONESHOT)

    def _watch_unsent(self, connection: Connection) -> None:
        """Some of a response has begun to wait for its client."""
        with self._lock:
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

    def _refuse(self, connection: Connection, error: TercetError, now: float) -> None:
        """Answer a request that is not passed to the app, and end the connection."""
        self._send_error(connection.response.sendall, connection.parser.answered_head, error)
        self._end(connection, now, keeps_connection=False)

    def _finish(self, connection: Connection, arrival: Arrival, *, keeps_connection: bool) -> None:
        """A request is answered."""
        if (queue := self._work.get(arrival.work)) is not None:
            queue.finish()
        self._end(connection, time.monotonic(), keeps_connection=keeps_connection, queue=queue, owner=arrival.owner)

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

    def _refuse_at_once(self, sock: socket.socket, reason: str) -> None:
        """Send a client that has sent nothing what its socket takes. Over TLS it sees a failed handshake."""
        sock.setblocking(False)
        self._send_error(sock.send, NO_HEAD, _overloaded(reason))
        sock.close()

    # Answering, without the lock.

    def _answer(self, connection: Connection, request: Request, arrival: Arrival) -> None:
        keeps_connection = False
        try:
            keeps_connection = self._respond(connection, request, arrival)
        finally:
            with self._lock:
                self._finish(connection, arrival, keeps_connection=keeps_connection)

    def _respond(self, connection: Connection, request: Request, arrival: Arrival) -> bool:
        """Answer one request. Returns whether the connection may carry another."""
        sock, scheme = connection.response, "http" if self._tls is None else "https"
        writer = ResponseWriter(
            sock.sendall, request.head, keeps_connection=self.keeps_connections and request.keeps_connection
        )
        try:
            if arrival.refusal is not None:
                writer.respond(partial(self._app.refuse, request.head, arrival.refusal))
            else:
                environ = make_environ(request, scheme, sock, connection.client, connection.server)
                environ[ARRIVAL] = arrival
                writer.respond(partial(self._app, environ))
        except OSError:  # the client is gone
            return False
        except BaseException as error:
            log.error("unhandled_exception", exc_info=error)
            if not writer.has_begun:
                self._send_error(sock.sendall, request.head, TercetError("The server failed."))
            return False
        return writer.keeps_connection

    def _send_error(self, send: Callable[[bytes], Any], head: RequestHead, error: TercetError) -> None:
        """Send an error in place of the app's answer."""
        try:
            ResponseWriter(send, head, keeps_connection=False).respond(partial(self._app.refuse, head, error))
        except OSError:  # the client is gone
            pass
        except Exception as failure:
            log.error("unhandled_exception", exc_info=failure)


def _overloaded(reason: str) -> Overloaded:
    return Overloaded(f"{reason} Try again shortly.")
