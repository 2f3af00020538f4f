"""The store that several gateways share (`TERCET_REDIS`): one client of Redis for every use.

What is shared is small and expires: which gateway a session is at, answers that feedback may refer to, buckets and
leases of API keys. This module knows none of them. It knows the connection, and when there is none: then each use falls
back to what its gateway knows by itself (availability before exactness), and no request waits for Redis a second time
until a thread has reached it again.

No key of Redis holds a prompt, an API key or a session: their names are hashes, salted with the password of the URL.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from gateway.shared_store.client import open_redis, redis_errors
from shared.redis_urls import parse_redis_url
from shared.sockets import TCP_KEEPIDLE

# Timeout of a connection and of a command. A request waits that long once at most, when Redis is lost.
TIMEOUT_S = 0.1
# Between two attempts to reach Redis again.
RETRY_S = 0.5
# A command takes a connection for a fraction of a millisecond.
MAX_CONNECTIONS = 16
PREFIX = "tercet"
# A peer that is gone without a word is noticed after 11 s.
_KEEPALIVE = {TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
log = structlog.get_logger()


class SharedStoreAway(Exception):
    """Redis cannot be used now. Never sent to a client: the caller falls back to its gateway's own state."""


class SharedStore:
    """Thread-safe.

    Attributes:
        gateway_id: id by which other gateways address this process.
        request_ttl_ms: how long a request can last at most. What belongs to a request expires after it.
        is_reached: Redis has answered, and no command has failed since.
    """

    def __init__(self, url: str, request_timeout_s: float, count_failure: Callable[[str], None]) -> None:
        """Connects to nothing before `start`.

        Args:
            url: as `shared.redis_urls` takes it.
            count_failure: called with the name of a use that has fallen back.
        """
        parsed = parse_redis_url(url)
        self._errors = redis_errors()
        self._salt = hashlib.blake2b(parsed.password.encode(), digest_size=32).digest()
        self._address = parsed.shown
        self._redis = open_redis(
            parsed,
            TIMEOUT_S,
            max_connections=MAX_CONNECTIONS,
            socket_keepalive=True,
            socket_keepalive_options=_KEEPALIVE,
        )
        self._count_failure = count_failure
        self._receivers: dict[str, Callable[[str], None]] = {}
        self._lock = threading.Lock()
        self._is_stopped = threading.Event()
        self._was_reached = threading.Event()
        self._was_lost = False
        self.gateway_id = secrets.token_hex(8)
        self.request_ttl_ms = int(1e3 * (request_timeout_s + 10))
        self.is_reached = False

    def name(self, kind: str, *parts: str) -> str:
        """The key of Redis for something; `parts` cannot be read from it."""
        digest = hashlib.blake2b(key=self._salt, digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(4, "big") + part.encode(errors="surrogatepass"))
        return f"{PREFIX}:{kind}:{digest.hexdigest()}"

    def script(self, text: str) -> Any:
        """A Lua script, to be called with the client that `using` yields."""
        return self._redis.register_script(text)

    @contextmanager
    def using(self, use: str) -> Iterator[Any]:
        """Yields the client.

        Args:
            use: what for, a label of the metric.

        Raises:
            SharedStoreAway: Redis was lost, or is lost in the block.
        """
        try:
            if not self.is_reached:
                raise SharedStoreAway
            yield self._redis
        except self._errors as error:
            self._lose(error)
            self._count_failure(use)
            raise SharedStoreAway from error
        except SharedStoreAway:
            self._count_failure(use)
            raise

    def channel(self, kind: str, gateway_id: str) -> str:
        """Where other gateways publish messages for one."""
        return f"{PREFIX}:{kind}:{gateway_id}"

    def receive(self, kind: str, receiver: Callable[[str], None]) -> None:
        """Call `receiver`, in a thread, with each message that is published for this gateway. Before `start`."""
        self._receivers[self.channel(kind, self.gateway_id)] = receiver

    def start(self) -> None:
        """Start the thread that keeps in touch with Redis, and give it the time to reach it."""
        threading.Thread(target=self._run, name="redis", daemon=True).start()
        self._was_reached.wait(5 * TIMEOUT_S)

    def stop(self) -> None:
        self._is_stopped.set()

    def _run(self) -> None:
        while not self._is_stopped.is_set():
            try:
                self._follow()
            except self._errors as error:
                self._lose(error)
            self._is_stopped.wait(RETRY_S)

    def _follow(self) -> None:
        """Receive messages while Redis is reached."""
        self._probe()
        with self._redis.pubsub(ignore_subscribe_messages=True) as subscription:
            if self._receivers:
                subscription.subscribe(*self._receivers)
            self._reach()
            while self.is_reached and not self._is_stopped.is_set():
                if not self._receivers:
                    self._is_stopped.wait(RETRY_S)
                elif message := subscription.get_message(timeout=RETRY_S):
                    self._receivers[message["channel"].decode()](message["data"].decode(errors="replace"))

    def _probe(self) -> None:
        """A write: a replica, or a store that is full, answers reads."""
        self._redis.set(f"{PREFIX}:probe:{self.gateway_id}", 1, px=1000)

    def _reach(self) -> None:
        with self._lock:
            self.is_reached = True
            self._was_reached.set()
            if self._was_lost:
                self._was_lost = False
                log.info("redis_reached", address=self._address)

    def _lose(self, error: Exception) -> None:
        # Idle connections may lead to the same server, which was the primary before a failover.
        self._redis.connection_pool.disconnect(inuse_connections=False)
        with self._lock:
            self.is_reached = False
            if self._was_lost:
                return
            self._was_lost = True
        # The text of redis-py's errors names the host and the reason, never the password; another's may hold an answer.
        text = f": {error}" if isinstance(error, self._errors[0]) else ""
        log.warning("redis_lost", address=self._address, reason=f"{type(error).__name__}{text}")
