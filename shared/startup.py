"""What must hold before a pool starts: its address is free and not open to all, and the slot plan is current.

To be called in a gunicorn master or the supervisor. The plan is made in a process of its own, so that no master loads
CUDA or a model library.
"""

from __future__ import annotations

import fcntl
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.errors import StartError
from shared.keys import read_keys
from shared.plan import PLAN_LOCK_FILE, Plan, read_current_plan, read_plan
from shared.run_directory import prepare_run_directory
from shared.settings import Address, Settings


def check_address_free(address: Address) -> None:
    """Bind the address once. gunicorn itself retries for five seconds, and then logs less.

    Raises:
        StartError: the address cannot be bound.
    """
    with socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            raise StartError(
                f"The gateway cannot listen on {address} ({error.strerror}): set TERCET_BIND to another host:port."
            ) from error


def check_access(settings: Settings) -> None:
    """Who may use the gateway: its address needs API keys, and the key file and the TLS files must be usable.

    Raises:
        StartError: the gateway would serve without protection, or not at all.
    """
    if settings.keys is not None:
        read_keys(settings.keys)
    if settings.keys is None and not settings.insecure and not settings.bind.is_loopback:
        raise StartError(
            f"Other machines could use the gateway at {settings.bind} without an API key: set TERCET_KEYS to a file "
            "that `tercet key new NAME` writes, or TERCET_INSECURE=1 (`tercet serve --insecure`) to permit it."
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise StartError("TERCET_TLS_CERT and TERCET_TLS_KEY belong together: set both, or neither.")
    if settings.tls_cert is None or settings.tls_key is None:
        return
    for path in (settings.tls_cert, settings.tls_key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise StartError(f"The TLS file {path} cannot be read ({error.strerror}).") from error
    try:
        # An encrypted key would prompt for its passphrase: an empty passphrase makes it an error.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except ssl.SSLError as error:
        raise StartError(
            f"The TLS files {settings.tls_cert} and {settings.tls_key} are not a certificate and its unencrypted "
            f"private key, both in PEM ({error.reason or 'no PEM data'})."
        ) from error


def read_or_make_plan(settings: Settings, environ: Mapping[str, str]) -> Plan:
    """The plan for these settings: the run directory's if it is current, else one made by `tercet plan --write`.

    A lock makes two masters that start together take turns, so that checkpoints are fetched once.

    Raises:
        StartError: the plan cannot be made; `tercet plan` has printed the reason on stderr.
    """
    run_path = prepare_run_directory(settings)
    with (run_path / PLAN_LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (plan := read_current_plan(settings, environ)) is not None:
            return plan
        command = [sys.executable, "-m", "deploy", "plan", "--write"]
        root = Path(__file__).parent.parent
        if subprocess.run(command, cwd=root, env=dict(environ), stdout=subprocess.DEVNULL, check=False).returncode:
            raise StartError("The slot plan could not be made; the reason is in the lines above.")
        return read_plan(run_path)
