"""What must hold before a gateway uses workers of other machines (`TERCET_POOL`): who may read what it sends, and whom
it trusts. Knows no HTTP."""

from __future__ import annotations

import ssl
from pathlib import Path

from shared.errors import StartError
from shared.pool_keys import read_pool_keys
from shared.setting_values import Address
from shared.settings import Settings
from shared.watched_files import open_file

# Ports of all entries of TERCET_POOL; the gateway has a thread for each slot.
MAX_POOL_PORTS = 256


def check_pool(settings: Settings) -> None:
    """Whether a gateway can reach the workers of `TERCET_POOL` without showing texts and its key to others.

    Raises:
        StartError: a URL is not protected, there are too many slots, or the key or the certificates cannot be used.
    """
    for url in settings.remote.pool:
        if url.scheme == "http" and not settings.access.insecure and not Address(url.host, url.port).is_loopback:
            raise StartError(
                f"TERCET_POOL has {url}, over which texts and the key would be sent unencrypted: use https:// (workers "
                "need TERCET_POOL_TLS_CERT), or set TERCET_INSECURE=1 in a network that no other machine can read."
            )
    num_ports = sum(url.last_port - url.port + 1 for url in settings.remote.pool)
    if num_ports > MAX_POOL_PORTS:
        raise StartError(f"TERCET_POOL names {num_ports} ports, of at most {MAX_POOL_PORTS}: check its ranges.")
    if settings.remote.pool_key is not None:
        read_pool_keys(settings.remote.pool_key)
    elif settings.remote.pool and not settings.access.insecure:
        raise StartError(
            "TERCET_POOL needs TERCET_POOL_KEY, the file with the workers' key (TERCET_INSECURE=1, if they need none)."
        )
    if settings.remote.pool_ca is not None:
        pool_tls_context(settings.remote.pool_ca)


def pool_tls_context(authorities: Path | None) -> ssl.SSLContext:
    """The TLS context for connections to workers: it verifies their certificates and names.

    Args:
        authorities: a file with the certificates of the authorities that are trusted; None: the system's.

    Raises:
        StartError: the file cannot be used.
    """
    if authorities is not None:
        with open_file(authorities, f"file {authorities} (TERCET_POOL_CA)"):
            pass
    try:
        context = ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        raise StartError(
            f"The file {authorities} (TERCET_POOL_CA) has no certificates in PEM that can be read "
            f"({error.strerror or 'no PEM data'})."
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
