"""When certificates expire, and OpenSSL's codes for why it refuses one.

Python's `ssl` decodes only certificates that it has verified as a peer's, so this module reads the one field from DER
(RFC 5280, section 4.1). It verifies nothing.
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime

# `verify_code` of an `ssl.SSLCertVerificationError`, from OpenSSL's <openssl/x509_vfy.h>.
EXPIRED, NAME_MISMATCH, ADDRESS_MISMATCH = 10, 62, 64
_PEM = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----([^-]+)-----END")
# Tags of DER.
_VERSION, _UTC_TIME = 0xA0, 0x17
# serialNumber, signature and issuer stand before validity.
_FIELDS_BEFORE_VALIDITY = 3


def earliest_expiry(pem: str) -> float:
    """When the first certificate of a chain expires, in Unix seconds.

    Args:
        pem: certificates that OpenSSL has accepted.

    Raises:
        ValueError: there is none, or its time is not one of RFC 5280.
    """
    return min(_expiry(base64.b64decode(encoded)) for encoded in _PEM.findall(pem))


def _expiry(der: bytes) -> float:
    certificate, _ = _content(der, 0)
    at, _ = _content(der, certificate)  # TBSCertificate
    if der[at] == _VERSION:  # is optional
        _, at = _content(der, at)
    for _ in range(_FIELDS_BEFORE_VALIDITY):
        _, at = _content(der, at)
    not_before, _ = _content(der, at)
    _, not_after = _content(der, not_before)
    start, end = _content(der, not_after)
    text = der[start:end].decode("ascii")
    if der[not_after] == _UTC_TIME:  # two digits of the year, from 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _content(der: bytes, at: int) -> tuple[int, int]:
    """Where the content of the element at `at` begins and ends."""
    length, start = der[at + 1], at + 2
    if length >= 0x80:  # that many bytes of the length follow
        num_bytes = length - 0x80
        length, start = int.from_bytes(der[start : start + num_bytes], "big"), start + num_bytes
    return start, start + length
