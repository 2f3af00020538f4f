"""The server's side of TLS on a socket that does not block.

OpenSSL reads a socket until it has data for the application. A client that sends records without such data (requests
for new keys), or with one byte each, would hold the thread that reads for as long as it sends. Here each call reads the
socket once, and what needs too many bytes for nothing ends the connection. Knows no HTTP.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

# What a record holds at most (RFC 8446, § 5.1).
RECORD_BYTES = 16 << 10
# Bytes without data for the application: a handshake takes a few kilobytes, an incomplete record 16 KiB and a little.
MAX_SILENT_BYTES = 64 << 10


class TlsSocket:
    """A connection that was accepted. One thread at a time calls its methods."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        """
        Args:
            sock: non-blocking. Its caller closes it.
        """
        self._sock = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._num_silent_bytes = 0  # received since there was data for the application
        self._unsent = b""  # encrypted
        self._num_encrypted = 0  # bytes of the application that the unsent bytes end with
        self.has_ended = False  # the client sends no more data

    def fileno(self) -> int:
        return self._sock.fileno()

    def do_handshake(self) -> None:
        """Advance the handshake.

        Raises:
            ssl.SSLWantReadError, ssl.SSLWantWriteError: it is not complete.
            OSError: it failed. `ssl.SSLError` is one.
        """
        self._receive(RECORD_BYTES)
        is_complete = False
        try:
            self._tls.do_handshake()
            is_complete = True
        except ssl.SSLWantReadError:
            pass
        finally:  # also the alert that says why it failed
            is_sent = self._flush()
        if not is_sent:
            raise ssl.SSLWantWriteError
        if not is_complete:
            raise ssl.SSLWantReadError

    def recv(self, size: int) -> bytes:
        """Read at most `size` bytes from the socket. Returns all data that they complete, b"" at the end of the data.

        Raises:
            ssl.SSLWantReadError: they complete none.
            OSError: the connection failed.
        """
        self._receive(size)
        parts = []
        try:
            while part := self._tls.read(size):
                parts.append(part)
            self.has_ended = True
        except ssl.SSLEOFError:  # without the client's close_notify; HTTP says itself where a request ends
            self.has_ended = True
        except ssl.SSLWantReadError:
            if not parts:
                raise
        finally:
            with suppress(OSError):
                self._flush()
        if parts:
            self._num_silent_bytes = 0
        return b"".join(parts)

    def send(self, data: bytearray) -> int:
        """Send some of the data; returns how much.

        Raises:
            BlockingIOError: nothing can be sent now. The next call must begin with the same data.
            OSError: the connection failed.
        """
        if not self._num_encrypted:
            self._num_encrypted = self._tls.write(data[:RECORD_BYTES])
        if not self._flush():
            raise BlockingIOError
        num_sent, self._num_encrypted = self._num_encrypted, 0
        return num_sent

    def end(self) -> None:
        """Tell the client that no more data follows. Does not wait for its answer."""
        with suppress(OSError, ValueError):
            self._tls.unwrap()
        with suppress(OSError):
            self._flush()

    def _receive(self, size: int) -> None:
        """
        Raises:
            ConnectionError: the client sends, but no data.
        """
        try:
            data = self._sock.recv(size)
        except BlockingIOError:
            return
        if not data:
            self._incoming.write_eof()
            return
        self._num_silent_bytes += len(data)
        if self._num_silent_bytes > MAX_SILENT_BYTES:
            raise ConnectionAbortedError("The client sends records without data.")
        self._incoming.write(data)

    def _flush(self) -> bool:
        """Send what is encrypted. Returns whether all of it was sent."""
        while self._unsent or self._outgoing.pending:
            self._unsent = self._unsent or self._outgoing.read()
            try:
                num_sent = self._sock.send(self._unsent)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[num_sent:]
        return True
