"""The expiry of certificates, beside what OpenSSL reads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from shared.certificates import earliest_expiry
from tests.tls import Certificate

NOW = datetime(2026, 3, 1, 12, 30, 15, tzinfo=UTC)


@pytest.mark.parametrize(
    "not_after",
    [
        NOW,
        datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),  # the last UTCTime
        datetime(2050, 1, 1, tzinfo=UTC),  # the first GeneralizedTime
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),  # "no expiry", in RFC 5280
    ],
)
def test_it_is_what_openssl_reads(tmp_path: Path, not_after: datetime) -> None:
    certificate = Certificate(tmp_path)
    certificate.renew(not_after)
    pem = certificate.cert.read_text()
    assert x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc == not_after
    assert earliest_expiry(pem) == not_after.timestamp()


def test_of_a_chain_it_is_the_earliest(tmp_path: Path) -> None:
    """A client refuses the leaf also when its authority has expired."""
    leaf, authority = Certificate(tmp_path, "leaf"), Certificate(tmp_path, "authority")
    leaf.renew(NOW + timedelta(days=1))
    authority.renew(NOW)
    text = f"subject=CN = leaf\n{leaf.cert.read_text()}\n{authority.cert.read_text()}"
    assert earliest_expiry(text) == NOW.timestamp()


def test_what_has_no_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        earliest_expiry("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
