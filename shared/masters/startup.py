"""What must hold before a pool starts: who may use it, a listening socket, a current slot plan, an end with its users.

To be called in a gunicorn master or the supervisor. The plan is made in a process of its own, so that no master loads
CUDA or a model library.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from shared.api_keys import read_keys
from shared.certificates import earliest_expiry
from shared.errors import StartError, refusing_os_errors
from shared.extras import ROOT, install_command
from shared.masters.run_directory import prepare_run_directory
from shared.plain_files import open_lock
from shared.plan import PLAN_LOCK_FILE, Plan, read_current_plan, read_plan
from shared.pool_keys import watch_pool_keys
from shared.redis_urls import REDIS_SCHEMES
from shared.remote_pools import check_pool
from shared.setting_values import Address
from shared.settings import Settings
from shared.watched_files import WatchedFiles, in_time, open_file

BACKLOG = 2048  # connections that wait to be accepted; gunicorn's default
MAX_PORT = 65535
FIRST_PASSED_FD = 3  # SD_LISTEN_FDS_START in <systemd/sd-daemon.h>
# The extra of pyproject.toml and the package that a store needs, by the scheme of its URL.
_STORE_LIBRARIES = {**dict.fromkeys(REDIS_SCHEMES, ("redis", "redis")), "dynamodb": ("dynamodb", "boto3")}


def listen(address: Address, environ: Mapping[str, str]) -> socket.socket:
    """The gateway's listening socket: bound here, or passed by a service manager that keeps it across restarts.

    A socket is passed as systemd passes it (`sd_listen_fds(3)`): `LISTEN_PID` is this process and `LISTEN_FDS` is 1.

    Raises:
        StartError: the address cannot be bound, or the socket passed is not a listening TCP socket of this port.
    """
    if not is_activated(environ):
        listener = _bind(address)
        listener.listen(BACKLOG)
        return listener
    if environ.get("LISTEN_FDS") != "1":
        raise StartError("Tercet takes exactly one socket (LISTEN_FDS=1): configure one ListenStream.")
    try:
        listener = socket.socket(fileno=FIRST_PASSED_FD)
        is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    except OSError as error:
        raise StartError(f"Descriptor {FIRST_PASSED_FD} is no socket ({error.strerror}): check LISTEN_FDS.") from error
    if not is_listening or listener.family not in {socket.AF_INET, socket.AF_INET6}:
        raise StartError(f"Descriptor {FIRST_PASSED_FD} is not a listening TCP socket: configure a ListenStream.")
    found = Address(*listener.getsockname()[:2])
    if found.port != address.port or (address.is_loopback and not found.is_loopback):
        raise StartError(f"The socket that was passed is bound to {found}, TERCET_BIND is {address}: make them equal.")
    return listener


def is_activated(environ: Mapping[str, str]) -> bool:
    """Whether a service manager has passed sockets to this process."""
    return environ.get("LISTEN_PID") == str(os.getpid())


def check_address_free(address: Address) -> None:
    """Bind the address once. gunicorn itself retries for five seconds, and then logs less.

    Raises:
        StartError: the address cannot be bound.
    """
    _bind(address).close()


def _bind(address: Address, who: str = "The gateway", setting: str = "TERCET_BIND") -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address.host, address.port))
    except OSError as error:
        bound.close()
        raise StartError(
            f"{who} cannot listen on {address} ({error.strerror}): set {setting} to another host:port."
        ) from error
    return bound


def stop_with_holders(pipe: int) -> None:
    """Send SIGTERM to this process when no process holds the write end of `pipe` any more.

    The kernel sends it, so that it needs no thread and comes however the holders end; macOS does not.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGTERM)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if poll.poll(0):  # they were gone before
        signal.raise_signal(signal.SIGTERM)


def check_access(settings: Settings) -> None:
    """Who may use the gateway: its address needs API keys, and the key file and the TLS files must be usable. Also
    whether the library of its job store is installed.

    Raises:
        StartError: the gateway would serve without protection, without jobs, or not at all.
    """
    if settings.requires_keys and settings.access.keys is not None:
        in_time("TERCET_KEYS", partial(read_keys, settings.access.keys))
    check_exposure(settings, settings.server.bind)
    if not settings.server.sagemaker:  # it serves no jobs
        _check_store_library(settings.job_store)
    in_time("TERCET_POOL_KEY or TERCET_POOL_CA", partial(check_pool, settings))
    gateway_tls(settings)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The TLS settings of a server.

    Attributes:
        expires_at: Unix seconds; when the first certificate of its chain expires.
    """

    context: ssl.SSLContext
    expires_at: float


def gateway_tls(settings: Settings) -> ServerTls | None:
    """The TLS settings of the gateway, None for none.

    Raises:
        StartError: the TLS files are unusable.
    """
    cert, key = settings.access.tls_cert, settings.access.tls_key
    _check_pair(cert, key, "TERCET_TLS_CERT", "TERCET_TLS_KEY")
    if cert is None or key is None:
        return None
    return in_time("TERCET_TLS_CERT or TERCET_TLS_KEY", partial(server_tls, cert, key))


@dataclass(frozen=True, slots=True)
class PortAccess:
    """Who may use the workers' TCP ports: the keys, and the TLS settings, None without TLS. Both follow their files."""

    keys: WatchedFiles[tuple[str, ...]]
    tls: WatchedFiles[ServerTls] | None


def check_pool_port(settings: Settings, num_slots: int, *, checks_ports: bool = True) -> PortAccess | None:
    """Whether workers may listen on TCP as `TERCET_POOL_BIND` says: with keys, beyond loopback with TLS, at free ports.
    Returns None if they need not.

    Args:
        checks_ports: whether the ports are free; a predecessor that is about to end may still hold them.

    Raises:
        StartError: other machines could use the workers without a key or read what is sent, or a port or file is
            unusable.
    """
    address = settings.remote.pool_bind
    if address is None:
        return None
    if settings.remote.pool_key is None:
        raise StartError(
            f"Workers listen at {address} (TERCET_POOL_BIND) only with keys: write one with `openssl rand -hex 32` to "
            "a file of mode 600 and set TERCET_POOL_KEY to it."
        )
    keys = watch_pool_keys(settings.remote.pool_key)
    tls = None
    cert, key = settings.remote.pool_tls_cert, settings.remote.pool_tls_key
    _check_pair(cert, key, "TERCET_POOL_TLS_CERT", "TERCET_POOL_TLS_KEY")
    if cert is not None and key is not None:
        tls = WatchedFiles("TERCET_POOL_TLS_CERT", (cert, key), partial(server_tls, cert, key))
    if tls is None and not address.is_loopback and not settings.access.insecure:
        raise StartError(
            f"Prompts and keys would cross the network to {address} (TERCET_POOL_BIND) unencrypted: set "
            "TERCET_POOL_TLS_CERT and TERCET_POOL_TLS_KEY, or TERCET_INSECURE=1 to permit it."
        )
    if address.port + num_slots - 1 > MAX_PORT:
        raise StartError(f"TERCET_POOL_BIND={address} leaves no port for each of {num_slots} slots: lower its port.")
    for port in range(address.port, address.port + num_slots if checks_ports else 0):
        _bind(Address(address.host, port), "A worker", "TERCET_POOL_BIND").close()
    return PortAccess(keys, tls)


def _check_pair(cert: Path | None, key: Path | None, cert_name: str, key_name: str) -> None:
    if (cert is None) != (key is None):
        raise StartError(f"{cert_name} and {key_name} belong together: set both, or neither.")


def server_tls(cert: Path, key: Path) -> ServerTls:
    """The TLS settings of a server with these files.

    Raises:
        StartError: they cannot be read, or are not a certificate and its unencrypted key.
    """
    for path in (cert, key):
        with open_file(path, f"TLS file {path}"):
            pass
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An encrypted key would prompt for its passphrase: an empty passphrase makes it an error.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise StartError(
            f"The TLS files {cert} and {key} are not a certificate and its unencrypted "
            f"private key, both in PEM ({error.reason or 'no PEM data'})."
        ) from error
    try:
        return ServerTls(context, earliest_expiry(cert.read_text(encoding="latin-1")))
    except (OSError, ValueError) as error:
        raise StartError(f"The TLS file {cert} does not say when its certificates expire ({error}).") from error


def _check_store_library(url: str) -> None:
    scheme = url.partition(":")[0]
    extra, module = _STORE_LIBRARIES.get(scheme, ("", ""))
    if module and find_spec(module) is None:
        raise StartError(
            f"TERCET_JOBS={scheme} needs the Python package {module}, which is not installed: {install_command(extra)}"
        )


def check_exposure(settings: Settings, address: Address) -> None:
    """Whether the gateway may listen on an address. gunicorn may have another than `TERCET_BIND`: from its own options
    or from a service manager.

    Raises:
        StartError: other machines can connect, and need no API key.
    """
    is_guarded = settings.access.keys is not None or settings.server.sagemaker
    if not is_guarded and not settings.access.insecure and not address.is_loopback:
        raise StartError(
            f"Other machines could use the gateway at {address} without an API key: set TERCET_KEYS to a file "
            "that `tercet key new NAME` writes, or TERCET_INSECURE=1 (`tercet serve --insecure`) to permit it."
        )


def read_or_make_plan(settings: Settings, environ: Mapping[str, str]) -> Plan:
    """The plan for these settings: the run directory's if it is current, else one made by `tercet plan --write`.

    A lock makes two masters that start together take turns, so that checkpoints are fetched once.

    Raises:
        StartError: the plan cannot be made; `tercet plan` has printed the reason on stderr.
    """
    run_path = prepare_run_directory(settings)
    with refusing_os_errors("The lock of the slot plan cannot be opened in", run_path):
        lock = open_lock(run_path / PLAN_LOCK_FILE)
    with lock:
        if (plan := read_current_plan(settings, environ)) is not None:
            return plan
        command = [sys.executable, "-m", "deploy", "plan", "--write"]
        if subprocess.run(command, cwd=ROOT, env=dict(environ), stdout=subprocess.DEVNULL, check=False).returncode:
            raise StartError("The slot plan could not be made; the reason is in the lines above.")
        return read_plan(run_path)
