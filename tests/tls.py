"""Makes self-signed certificates for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "tls", *, passphrase: str | None = None) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its private key, both in PEM. With a passphrase the key is encrypted."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    encryption = ["-nodes"] if passphrase is None else ["-passout", f"pass:{passphrase}"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, *encryption, *subject, "-days", "2", "-keyout", str(key), "-out", str(cert)],
        capture_output=True, check=True, timeout=30,
    )  # fmt: skip
    return cert, key
