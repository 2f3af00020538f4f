"""The gunicorn worker class of the worker pool: one process per slot, two generations of it during a reload.

Decides when the process accepts connections and when it stops. Of the model it knows only whether it is warm.

On SIGHUP the master forks a successor of each worker and stops a worker once its successor is warm
(`shared.masters.generations`). Both share the listening socket, so that no request is refused in between; a successor
accepts only when it is warm, and ends if it cannot load its model.

The class overrides methods of gunicorn's `ThreadWorker` and reads its connection objects, which gunicorn does not
promise to keep: `tests/workers/test_gunicorn_worker.py` checks the pinned version. docs/PERFORMANCE.md has what they
save ("CPU per answer").
"""

from __future__ import annotations

import gc
import math
import os
import select
import selectors
import socket
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from gunicorn.sock import UnixSocket
from gunicorn.workers.gthread import ThreadWorker

from shared import wire
from shared.call_threads import CallThreads
from shared.errors import Overloaded, SlotFull, StartError, TercetError
from shared.masters.generations import START_FAILED_EXIT_CODE
from shared.masters.run_directory import file_identity, restore_run_directory
from shared.masters.worker_life import LifePhase
from shared.telemetry import finish_log, num_dropped_records
from workers.tcp_port import TcpConnection, TcpPort, refuse

if TYPE_CHECKING:
    from shared.masters.leases import Leases
    from shared.masters.startup import PortAccess
    from shared.masters.worker_life import WorkerLife
    from shared.plan import Slot
    from workers.app import BranchLines, SlotApp
    from workers.service import SlotService

log = structlog.get_logger()

# How long an HTTP thread may hold the interpreter while the engine thread waits for it. Python's default, 5 ms, is as
# long as a decode step.
SWITCH_INTERVAL_S = 0.0005

# How long a thread waits on its connection for the next request before it returns the connection to the main thread's
# poller. A request that comes by way of the poller wakes two threads instead of one, and the three branches of a
# request then queue for the main thread.
NEXT_REQUEST_WAIT_MS = 5000

# As in the gateway: collections are for cycles, which the branches in progress do not make.
MAX_YOUNG_OBJECTS = 10_000

# The longest pause of a worker that cannot import its app, before it ends and its master forks another; as long as the
# longest before a load.
MAX_IMPORT_PAUSE_S = 30.0

# From the announcement that the worker drains to its refusal of requests.
ANNOUNCE_S = 0.2

# The pause before a connection is accepted again that could not be.
ACCEPT_PAUSE_S = 0.1

READ_BYTES = 1 << 16


class SlotWorker(ThreadWorker):  # type: ignore[misc]  # gunicorn has no type hints
    """A `gthread` worker that serves one slot. `gunicorn.conf.py` sets the first five attributes before the fork."""

    life: WorkerLife
    slot: Slot
    slot_index: int
    leases: Leases
    pool_access: PortAccess | None
    socket_file: tuple[int, int] | None  # of the listening Unix socket's file
    wsgi: SlotApp
    alive: bool
    _port: TcpPort | None = None

    @property
    def service(self) -> SlotService:
        return self.wsgi.service

    def init_process(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._is_drained = False
        self._is_warm = False
        self._ends_at = math.inf  # when it leaves the main loop
        self._num_busy = 0  # threads that answer a request or wait for their connection's next
        self._count_lock = threading.Lock()
        self._released, self._release = os.pipe()  # what is in it ends waits for the next request
        os.set_blocking(self._released, False)
        os.set_blocking(self._release, False)
        self._threads = CallThreads("http", self.cfg.threads)  # in place of gunicorn's, which end the main loop
        access = self.pool_access
        if access is not None:
            self._port = TcpPort(access, partial(self.method_queue.defer, self._enter_waiting))
        # While a predecessor serves, this worker must not take its requests.
        self._has_predecessor = len(self.leases.holders(self.slot_index)) > 1
        super().init_process()  # returns when the worker stops

    def init_signals(self) -> None:
        """Leave signals to `life`."""

    def load_wsgi(self) -> None:
        try:
            super().load_wsgi()
        except Exception:
            if not self._has_predecessor:  # the master forks the next worker at once
                time.sleep(min(MAX_IMPORT_PAUSE_S, 2.0 ** self.leases.num_failures(self.slot_index)))
            raise
        self.service.start(
            age=self.age,
            # A reload is a decision of the operator, so its successors load without a delay.
            num_failures=0 if self._has_predecessor else self.leases.num_failures(self.slot_index),
            read_counts=self._read_counts,
            read_certificate_expiry=self._certificate_expiry,
            on_change=self._wake,
        )
        self.life.load(self._wake)

    def run(self) -> None:
        try:
            super().run()
        except Exception as error:
            log.error("unhandled_exception", exc_info=error)
            raise
        finally:
            self.life.end()
            # The interpreter would wait for threads that answer, and abort in the thread that loads.
            if not self.service.close() or self._num_busy:
                finish_log()
                os._exit(0)

    def _read_counts(self) -> dict[str, float]:
        return {**self.leases.counts(self.slot_index), "log_records_dropped": float(num_dropped_records())}

    def _certificate_expiry(self) -> float:
        tls = None if self.pool_access is None else self.pool_access.tls
        return 0.0 if tls is None else tls.value.expires_at

    def _wake(self) -> None:
        """Run the main loop once more; callable from any thread."""
        self.method_queue.defer(lambda: None)

    def _announce_end(self) -> None:
        """Begin to stop. The end is announced before the worker refuses requests: branches already placed here can
        still arrive, so all branches of an answer stay together."""
        self.life.drain(ANNOUNCE_S + self.cfg.graceful_timeout)
        self.service.announce_drain()
        self._ends_at = time.monotonic() + ANNOUNCE_S

    def wait_for_and_dispatch_events(self, timeout: float) -> None:
        super().wait_for_and_dispatch_events(min(timeout, max(0.0, self._ends_at - time.monotonic())))
        if time.monotonic() >= self._ends_at:
            self.alive, self._ends_at = False, math.inf

    def notify(self) -> None:
        """The heartbeat, once per turn of the main loop, which also acts on state changes."""
        super().notify()
        if self.life.must_drain:
            self._announce_end()
        if self.life.phase is LifePhase.LOADING and self.service.is_warm:
            self.life.warm()
            self._is_warm = True
            gc.freeze()  # else a full collection walks all that was loaded: 60 ms during which every thread waits
            gc.set_threshold(MAX_YOUNG_OBJECTS)
            self.leases.mark_warm(self.slot_index, self.age)
            self.set_accept_enabled(self.alive)
        if self._has_predecessor and self.life.phase is LifePhase.LOADING and self.service.state().state == "failed":
            self._end_reload()
        # A master that stops removes the file before its workers have drained.
        may_restore = self.alive and self._accepting and self.life.phase is not LifePhase.DRAINING
        if may_restore and file_identity(Path(self.slot.socket)) != self.socket_file:
            self._restore_socket()
        if self._port is not None:
            self._port.end_late()
        if not self.alive and not self._is_drained:
            self._is_drained = True
            for listener in self.sockets:
                if listener.sock.family != socket.AF_UNIX:
                    listener.close()  # connections are refused, and do not wait in it until the process ends
            self._end_waits()
            self.service.drain(self.cfg.graceful_timeout)

    def _restore_socket(self) -> None:
        """Listen on a new socket in place of one whose file was removed, which cannot be linked again.

        The newest generation that accepts has the file; the listener that the master holds remains without one.
        """
        if self.leases.successor_is_warm(self.slot_index, self.age):
            return
        path = Path(self.slot.socket)
        try:
            restore_run_directory(path.parent)
            listener = UnixSocket(str(path), self.cfg, self.log)
        except (OSError, ValueError, StartError) as error:
            if self.socket_file is not None:
                log.error("socket_not_restored", slot=self.slot_index, reason=str(error))
            self.socket_file = None
            return
        self.set_accept_enabled(False)
        for lost in [each for each in self.sockets if each.sock.family == socket.AF_UNIX]:
            while select.select([lost.sock], [], [], 0)[0]:  # connected before the file was removed
                self.accept(lost)
            self.sockets.remove(lost)
            lost.close()
        self.sockets.append(listener)
        self.socket_file = file_identity(path)
        self.set_accept_enabled(True)
        log.warning("socket_restored", slot=self.slot_index)

    def accept(self, listener: Any) -> None:
        """As gunicorn's; a connection on TCP holds no thread before it has sent something. Where descriptors or memory
        do not suffice, it waits to be accepted."""
        try:
            if self._port is None or listener.sock.family == socket.AF_UNIX:
                super().accept(listener)
                return
            sock, client = listener.accept()
            conn = self._port.connection(self.cfg, sock, client, listener.getsockname())
        except (BlockingIOError, ConnectionAbortedError):  # another generation was faster, or the client is gone
            return
        except OSError as error:
            log.error("connection_not_accepted", slot=self.slot_index, reason=error.strerror)
            time.sleep(ACCEPT_PAUSE_S)  # it is tried again at once
            return
        if conn is not None:
            self.nr_conns += 1
            self.pending_conns.append(conn)
            self.poller.register(conn.sock, selectors.EVENT_READ, partial(self.on_pending_socket_readable, conn))

    def enqueue_req(self, conn: Any) -> None:
        if self._port is not None and isinstance(conn, TcpConnection) and not self._port.try_enter(conn):
            return
        if self._num_busy >= self.cfg.threads:
            self._end_waits()
        self._submit(conn)

    def _submit(self, conn: Any) -> None:
        try:
            self._threads.submit(self._serve, conn)
        except Overloaded:
            if not isinstance(conn, TcpConnection):  # over TLS the gateway sees a failed handshake
                refuse(conn.sock, SlotFull("This worker can start no thread now."))
            self.nr_conns -= 1
            conn.close()

    def _serve(self, conn: Any) -> None:
        """Handle a connection's request; whatever it raises ends that request and its connection."""
        done = Future[object]()
        try:
            done.set_result(self.handle(conn))
        except BaseException as error:
            log.error("unhandled_exception", exc_info=error)
            done.set_result(False)
        self.method_queue.defer(self.finish_request, conn, done)

    def _enter_waiting(self) -> None:
        assert self._port is not None
        while (conn := self._port.next_waiting()) is not None:
            self._submit(conn)

    def handle(self, conn: Any) -> object:
        """gunicorn's `handle`, repeated on the same thread while the connection's next request comes soon."""
        with self._count_lock:
            self._num_busy += 1
        try:
            while True:
                result = self._handle_generate(conn) if conn.initialized else super().handle(conn)
                if result is not True or not self._wait_for_next_request(conn):
                    return result
        finally:
            with self._count_lock:
                self._num_busy -= 1
            if self._port is not None and isinstance(conn, TcpConnection):
                self._port.leave(conn)

    def handle_request(self, req: Any, conn: Any) -> object:
        """gunicorn's, for requests that may be served."""
        if self._port is not None and isinstance(conn, TcpConnection):
            try:
                self._port.check(conn, req.method, req.path, req.headers)
            except TercetError as error:
                refuse(conn.sock, error, dict(req.headers).get("X-REQUEST-ID", ""))
                return False
        return super().handle_request(req, conn)

    def _handle_generate(self, conn: Any) -> object:
        """gunicorn's `handle` for a connection with data; for a branch's request without its parser and WSGI.

        They cost more than all else that a branch does in its thread. What is not exactly as the gateway sends it, and
        what is refused, goes gunicorn's way.
        """
        if conn.parser.unreader.buf.getvalue():  # already read from the socket
            return super().handle(conn)
        try:
            if isinstance(conn, TcpConnection):
                data, num_head_bytes = self._receive_over_tcp(conn)
            else:
                data = conn.sock.recv(READ_BYTES)
                head = wire.match_head(data)
                is_complete = head is not None and len(data) == head.num_bytes + head.content_length
                num_head_bytes = head.num_bytes if head is not None and is_complete else 0
            if not data:
                return False
            if num_head_bytes:
                conn.sock.setblocking(True)
                if (lines := self._start_branch(data[num_head_bytes:], conn.sock)) is not None:
                    return self._send_lines(lines, conn.sock, keeps_connection=self.alive)
        except OSError:  # the gateway is gone
            return False
        except Exception as error:  # noqa: BLE001 - as in gunicorn
            self.handle_error(None, conn.sock, conn.client, error)
            return False
        conn.parser.unreader.unread(data)
        return super().handle(conn)

    def _receive_over_tcp(self, conn: TcpConnection) -> tuple[bytes, int]:
        """The beginning of a request, and 0; of a branch's request with a key all of it, and the length of its head.
        Empty: the gateway has closed the connection."""
        conn.sock.setblocking(True)  # TLS may have to read more than once
        data: bytes = conn.sock.recv(READ_BYTES)
        head = wire.match_head(data)
        if head is None or self._port is None or not self._port.knows(conn, head.authorization):
            return data, 0
        num_bytes = head.num_bytes + head.content_length
        while len(data) < num_bytes:
            if not (part := conn.sock.recv(READ_BYTES)):
                return b"", 0
            data += part
        return data, head.num_bytes if len(data) == num_bytes else 0

    def _wait_for_next_request(self, conn: Any) -> bool:
        # As many threads wait as branches may run; the remaining threads are for other connections.
        if not self.alive or self._num_busy > self.slot.max_batch:
            return False
        if isinstance(conn, TcpConnection):
            if conn.is_entering:  # it has shown no key
                return False
            if conn.has_data:
                return True
        if conn.parser.unreader.buf.getvalue():  # already read from the socket, which poll cannot see
            return True
        poll = select.poll()
        poll.register(conn.sock, select.POLLIN)
        poll.register(self._released, select.POLLIN)
        ready = dict(poll.poll(NEXT_REQUEST_WAIT_MS))
        if self._released in ready and self.alive:  # a stopping worker leaves it set, for later waits
            with suppress(BlockingIOError):  # another thread has reset it
                os.read(self._released, READ_BYTES)
        return conn.sock.fileno() in ready

    def _end_waits(self) -> None:
        with suppress(BlockingIOError):  # it is full
            os.write(self._release, b".")

    def _start_branch(self, content: bytes, sock: socket.socket) -> BranchLines | None:
        """None: it is refused."""
        try:
            return self.wsgi.generate(content, sock)
        except Exception:  # noqa: BLE001 - the app refuses it again, in words
            return None

    def _send_lines(self, lines: BranchLines, sock: socket.socket, *, keeps_connection: bool) -> bool:
        """Send a branch's lines, those that are there together in one send. Returns whether the connection is kept.

        Raises:
            OSError: the gateway is gone.
        """
        data = wire.LINES_HEAD if keeps_connection else wire.CLOSING_LINES_HEAD
        try:
            for line in lines:
                data += wire.chunk(line)
                if not lines.is_complete:
                    sock.sendall(data)
                    data = b""
            sock.sendall(data + wire.LAST_CHUNK)
        finally:
            lines.close()
        return keeps_connection

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Close the connection. gunicorn would log and return the exception's text, which repeats what was sent."""
        log.error("request_failed", kind=type(exc).__name__)

    def set_accept_enabled(self, enabled: bool) -> None:
        """An incoming generation does not accept before it is warm."""
        super().set_accept_enabled(enabled and (self._is_warm or not self._has_predecessor))

    def _end_reload(self) -> None:
        """End a successor that cannot load. Its predecessor serves on, so a retry can wait for the next reload."""
        log.error("reload_failed", slot=self.slot_index, reason=self.service.state().reason)
        finish_log()
        os._exit(START_FAILED_EXIT_CODE)
