"""What a gateway needs to use workers of other machines: the key, and the certificates that it trusts. Both are read
again when their files change. Knows no slots."""

from __future__ import annotations

import hashlib
import ssl
from functools import cached_property
from pathlib import Path

from shared.pool_keys import watch_pool_keys
from shared.remote_pools import pool_tls_context
from shared.watched_files import WatchedFiles


class RemoteAccess:
    """Thread-safe; one for all slots, because a TLS context takes milliseconds and memory to make."""

    def __init__(self, key_path: Path | None, authorities: Path | None) -> None:
        """
        Args:
            key_path: path of the key file. None if no key is sent.
            authorities: a file of certificates; None: the system's.

        Raises:
            StartError: a file cannot be used.
        """
        self._authorities = authorities
        self._keys = None if key_path is None else watch_pool_keys(key_path)

    @property
    def key(self) -> str:
        """The key to send, "" for none."""
        return "" if self._keys is None else self._keys.value[0]

    @cached_property
    def _contexts(self) -> WatchedFiles[ssl.SSLContext]:
        paths = () if self._authorities is None else (self._authorities,)
        return WatchedFiles("TERCET_POOL_CA", paths, lambda: pool_tls_context(self._authorities))

    def tls_context(self) -> ssl.SSLContext:
        """Return the TLS context of new connections.

        Raises:
            StartError: the system's certificates cannot be used.
        """
        return self._contexts.value

    def session_id(self, identity: bytes) -> bytes:
        """The value of the header `X-Session-Id`, by which load balancers keep requests for a document together: equal
        for equal identities, in all gateways with this key. Without the key nothing can be learned from it."""
        return hashlib.blake2b(identity, digest_size=16, key=self.key.encode()[:64]).hexdigest().encode()
