"""HTTP/1.1 over TCP and TLS to a worker of another machine: a transport for httpx, made of httpx's own.

`httpx.HTTPTransport` checks all of its connections under one lock before and after each call: with sixteen threads that
share one, a gateway's CPU time per answer is four times that of `UnixTransport`. So a stock of transports is kept here,
of one connection each, and each is lent to one call at a time.

It knows neither the internal protocol nor slots.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import httpx

# Of OpenSSL's <openssl/x509_vfy.h>.
_EXPIRED, _NAME_MISMATCH, _ADDRESS_MISMATCH = 10, 62, 64


class UntrustedPeer(httpx.ConnectError):
    """The peer's certificate was refused, or it does not speak TLS. It will be so until an operator acts."""


class TransportStock(httpx.BaseTransport):
    """One connection per call. Idle connections are kept and reused, the last used first. Thread-safe.

    As in httpx's own transport, the response's `network_stream` extension gives access to the socket.
    """

    def __init__(
        self, host: str, keepalive_expiry_s: float, tls_context: Callable[[], ssl.SSLContext] | None = None
    ) -> None:
        """
        Args:
            host: the name that the peer's certificate must have; the URL of a request has the address to connect to.
            keepalive_expiry_s: how long an idle connection is kept.
            tls_context: for a new connection.
        """
        self._host = host
        self._keepalive_expiry_s = keepalive_expiry_s
        self._tls_context = tls_context
        # Each with the time at which it became idle, in that order.
        self._idle: list[tuple[float, httpx.HTTPTransport]] = []
        self._is_closed = False
        self._lock = threading.Lock()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """As `httpx.HTTPTransport.handle_request`. The request's body must be iterable more than once.

        Raises:
            UntrustedPeer: its certificate was refused.
            httpx.TransportError: unreachable, timed out, or not a response in HTTP/1.1.
        """
        request.extensions["sni_hostname"] = self._host
        if (kept := self._take_idle()) is not None:
            try:
                return self._send(kept, request)
            except (httpx.TimeoutException, httpx.ConnectError):
                raise
            # The peer has closed the kept connection, and nothing of a response has arrived.
            except (httpx.NetworkError, httpx.RemoteProtocolError):
                pass
        return self._send(self._connect(), request)

    def close(self) -> None:
        """Close the idle connections; those of calls in progress are closed when the calls end."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for _, transport in idle:
            transport.close()

    def put_back(self, transport: httpx.HTTPTransport) -> None:
        """Keep a transport for the next call, and close the oldest if it has expired."""
        now = time.monotonic()
        with self._lock:
            excess = transport if self._is_closed else None
            if excess is None:
                self._idle.append((now, transport))
                if now - self._idle[0][0] > self._keepalive_expiry_s:
                    _, excess = self._idle.pop(0)
        if excess is not None:
            excess.close()

    def _take_idle(self) -> httpx.HTTPTransport | None:
        with self._lock:
            if not self._idle:
                return None
            idle_since, transport = self._idle.pop()
        if time.monotonic() - idle_since <= self._keepalive_expiry_s:
            return transport
        transport.close()
        return None  # all others have been idle for longer

    def _connect(self) -> httpx.HTTPTransport:
        return httpx.HTTPTransport(
            # httpx makes a context of its own where it gets none, though it would not use it without TLS.
            verify=_PLAIN if self._tls_context is None else self._tls_context(),
            trust_env=False,
            limits=httpx.Limits(
                max_connections=1, max_keepalive_connections=1, keepalive_expiry=self._keepalive_expiry_s
            ),
        )

    def _send(self, transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        try:
            response = transport.handle_request(request)
        except httpx.ConnectError as error:
            transport.close()
            raise _described(error) from error
        except BaseException:
            transport.close()
            raise
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _LentStream(self, transport, response.stream)
        return response


class _LentStream(httpx.SyncByteStream):
    """A response's body. Closed after its end, it puts the transport back for the next call; closed earlier, it closes
    the connection."""

    def __init__(self, stock: TransportStock, transport: httpx.HTTPTransport, stream: httpx.SyncByteStream) -> None:
        self._stock = stock
        self._transport: httpx.HTTPTransport | None = transport
        self._stream = stream
        self._is_complete = False

    def __iter__(self) -> Iterator[bytes]:
        yield from self._stream
        self._is_complete = True

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        self._stream.close()
        if self._is_complete:
            self._stock.put_back(transport)
        else:
            transport.close()


def _described(error: httpx.ConnectError) -> httpx.ConnectError:
    """The error with a text for operators, without numbers of Python's and OpenSSL's."""
    cause = _tls_error(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in {_NAME_MISMATCH, _ADDRESS_MISMATCH}:
            return UntrustedPeer("The certificate of the worker is for another name than TERCET_POOL has.")
        if cause.verify_code == _EXPIRED:
            return UntrustedPeer("The certificate of the worker has expired.")
        return UntrustedPeer(
            f"The certificate of the worker is not trusted ({cause.verify_message}): TERCET_POOL_CA names the "
            "authorities."
        )
    if cause is not None and not isinstance(cause, ssl.SSLEOFError):
        return UntrustedPeer(f"The worker does not speak TLS, or none in common ({cause.reason}).")
    return httpx.ConnectError(re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or "The connection failed.")


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS error that `error` was made from, if any. httpcore's connection pool keeps it as the context only."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error


_PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
