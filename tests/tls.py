"""Certificates for tests, and clients that trust only them."""

from __future__ import annotations

import ssl
from datetime import datetime
from pathlib import Path


class Certificate:
    """The files of a certificate for the loopback interface, issued by an authority of its own."""

    def __init__(self, folder: Path, name: str = "tls") -> None:
        self.cert, self.key = folder / f"{name}.crt", folder / f"{name}.key"
        self.renew()

    def renew(self, not_after: datetime | None = None) -> None:
        """Replace the files: a new key, a new certificate, a new authority.

        Args:
            not_after: when the certificate expires; None: in years.
        """
        import trustme  # here, because every test imports this module, and a bare machine has no trustme

        self._authority = trustme.CA()
        issued = self._authority.issue_cert("localhost", "127.0.0.1", not_after=not_after)
        issued.private_key_pem.write_to_path(self.key)
        self.cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))

    def encrypt_key(self, passphrase: str) -> None:
        from cryptography.hazmat.primitives import serialization

        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        encryption = serialization.BestAvailableEncryption(passphrase.encode())
        pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        self.key.write_bytes(pem)

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a gateway that serves with these files."""
        return {"tls_cert": str(self.cert), "tls_key": str(self.key)}

    @property
    def authority_pem(self) -> bytes:
        """The current authority's own certificate."""
        return self._authority.cert_pem.bytes()

    def server(self) -> ssl.SSLContext:
        """The TLS settings of a server with these files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context

    def client(self) -> ssl.SSLContext:
        """The TLS settings of a client that trusts the current authority alone."""
        context = ssl.create_default_context()
        self._authority.configure_trust(context)
        return context
