"""Every setting Tercet reads: typed, frozen, validated together when loaded, and then passed down.

A setting is an environment variable `TERCET_<NAME>`. This module knows names, defaults, units, reasons and ranges, and
not how a value is used. Only `build()` functions, `gunicorn.conf.py` and the command line call `Settings.load`; nothing
below them reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec import Meta

from shared.errors import StartError

PREFIX = "TERCET_"
# Set by Tercet for its own processes, never by a user: which pool a gunicorn runs, which slot a worker has, and the
# descriptors that the supervisor passes to its pools.
INTERNAL = frozenset({"TERCET_ROLE", "TERCET_SLOT", "TERCET_LISTEN_FD", "TERCET_LIFELINE_FD", "TERCET_ACTIVITY_FD"})
# Read by the command line as a client of a running server.
CLIENT = frozenset({"TERCET_API_KEY"})

Dtype = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Placement = Literal["auto", "spread", "pack"]
Compute = Literal["auto", "cpu"]
LogLevel = Literal["debug", "info", "warning", "error"]

_MODEL_NAME = re.compile(r"(synthetic:)?[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# host:port, with IPv6 in brackets. `\d` would match the digits of every script.
_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,254}|\[[0-9A-Fa-f:.]{2,45}\])(:(?P<port>[0-9]{1,5}))?")
# As _HOST_PORT, with an optional range of ports and a path.
_POOL_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,254}|\[[0-9A-Fa-f:.]{2,45}\])"
    r":(?P<port>[0-9]{1,5})(-(?P<last_port>[0-9]{1,5}))?(?P<path>(/[A-Za-z0-9._~-]+)*)/?"
)
_DATABASE = re.compile(r"(/[0-9]{0,4})?")
_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DEVICE = re.compile(r"cpu|cuda:\d{1,2}")
# Browsers, and apps that are web pages inside: Obsidian is app://obsidian.md on desktops, capacitor://localhost on iOS.
_ORIGIN_SCHEMES = {"http", "https", "app", "capacitor"}


@dataclass(frozen=True, slots=True)
class Address:
    """A host and port to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect. A host name counts as beyond loopback, except `localhost`."""
        return self.host.lower() == "localhost" or (_is_ip(self.host) and ipaddress.ip_address(self.host).is_loopback)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One entry of `TERCET_MODELS`: `name`, `name=source`, each with `*count` per device."""

    name: str
    source: str | None = None
    count: int = 1

    def __str__(self) -> str:
        source = "" if self.source is None else f"={self.source}"
        return f"{self.name}{source}" + (f"*{self.count}" if self.count != 1 else "")


@dataclass(frozen=True, slots=True)
class PoolUrl:
    """One entry of `TERCET_POOL`: where workers of one model are reached by TCP.

    Each of the ports from `port` to `last_port`, at each address of `host`, is a slot. `path` is a prefix of the paths
    of the internal protocol, "" or like "/small".
    """

    model: str
    scheme: Literal["http", "https"]
    host: str
    port: int
    last_port: int
    path: str = ""

    def __str__(self) -> str:
        ports = f"-{self.last_port}" if self.last_port != self.port else ""
        return f"{self.model}={self.scheme}://{Address(self.host, self.port)}{ports}{self.path}"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _split_host_port(text: str) -> tuple[str, str] | None:
    """Host, in lower case and without brackets, and port ("" if absent); None if the text is nothing of the kind."""
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        return None
    host = match["host"].lower()
    if host.startswith("["):
        host = host[1:-1]
        if not _is_ip(host) or ":" not in host:
            return None
    return host, match["port"] or ""


def _address(text: str) -> Address:
    host, port = _split_host_port(text) or ("", "")
    if not port or not 0 < int(port) < 65536:
        raise ValueError("must be host:port with a port from 1 to 65535, like 127.0.0.1:8000 or [::1]:8000")
    return Address(host, int(port))


def _models(text: str) -> tuple[ModelSpec, ...]:
    specs = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        body, count = entry, 1
        if match := re.fullmatch(r"(.*)\*(\d{1,3})", entry):
            body, count = match[1], int(match[2])
        name, _, source = body.partition("=")
        if not _MODEL_NAME.fullmatch(name) or count < 1 or (not source and "=" in body):
            raise ValueError(
                f"has an entry {entry!r} that is not name, name*count or name=source "
                "(like small*2,medium or legal=/models/legal-gpt2)"
            )
        specs.append(ModelSpec(name, source or None, count))
    names = [spec.name for spec in specs]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"names {min(repeated)} twice; write {min(repeated)}*2 for two workers of it")
    return tuple(specs)


def _devices(text: str) -> tuple[str, ...]:
    devices = tuple(filter(None, (part.strip() for part in text.split(","))))
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"has {device!r}; a device is cpu or cuda:N, like cuda:0,cuda:1")
    if len(set(devices)) != len(devices):
        raise ValueError("names a device twice; for several workers on one device, use a count in TERCET_MODELS")
    return devices


def _pool(text: str) -> tuple[PoolUrl, ...]:
    urls = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        model, _, url = entry.partition("=")
        match = _POOL_URL.fullmatch(url)
        if not _MODEL_NAME.fullmatch(model) or match is None:
            raise ValueError(
                f"has an entry {entry!r} that is not model=http(s)://host:port, with a range of ports for several slots"
                " and a path where it has one (like small=https://gpu-a.example:8100-8103)"
            )
        host, _port = _split_host_port(match["host"]) or ("", "")
        port, last_port = int(match["port"]), int(match["last_port"] or match["port"])
        if not host or not 0 < port <= last_port < 65536:
            raise ValueError(f"has {entry!r}; ports are from 1 to 65535, and a range goes upwards")
        scheme: Literal["http", "https"] = "https" if match["scheme"] == "https" else "http"
        urls.append(PoolUrl(model, scheme, host, port, last_port, match["path"]))
    if len(set(urls)) != len(urls):
        raise ValueError("names an address twice for the same model")
    return tuple(urls)


def _redis(text: str) -> str:
    parts = urlsplit(text)
    authority = parts.netloc.rpartition("@")[2]
    if (
        parts.scheme not in {"redis", "rediss"}
        or not _HOST_PORT.fullmatch(authority)
        or not _DATABASE.fullmatch(parts.path)
    ):
        raise ValueError("must be redis://user:password@host:port/db (or rediss://), all but the host optional")
    return text


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(filter(None, (part.strip().lower().rstrip("/") for part in text.split(","))))
    for origin in origins:
        scheme, _, host_port = origin.partition("://")
        if scheme not in _ORIGIN_SCHEMES or _split_host_port(host_port) is None:
            raise ValueError(
                f"has {origin!r}; an origin is http(s)://host[:port], or app://host or capacitor://host of an app,"
                " without a path or a *"
            )
    # Browsers leave out the scheme's own port.
    return tuple(re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", origin) for origin in origins)


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for host in hosts:
        if not _HOST_PATTERN.fullmatch(host):
            raise ValueError(f"has {host!r}; a host is a name without a port, *.name for its subdomains, or * for any")
    return hosts


def _flag(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError("must be 0 or 1")
    return text == "1"


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _job_store(text: str) -> str:
    """The URL of a job store, with an absolute path; "none" for none."""
    scheme, _, rest = text.partition(":")
    if scheme == "sqlite" and rest:
        return f"sqlite:{_path(rest)}"
    parts = urlsplit(text)
    is_valid = text == "none" or (
        (scheme in {"redis", "rediss"} and parts.hostname is not None)
        or (
            scheme == "dynamodb"
            and re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", parts.netloc) is not None
            and parse_qs(parts.query, keep_blank_values=True).keys() <= {"region", "endpoint"}
        )
    )
    if not is_valid:
        raise ValueError(
            "must be sqlite:<file>, redis://host:port/db (or rediss://), dynamodb://table?region=…&endpoint=…, or none"
        )
    return text


def _convert(text: str, kind: Any, example: str) -> Any:
    """A number in JSON's notation, or a choice; `kind` is its type with its range."""
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        if get_origin(kind) is Literal:
            raise ValueError(f"must be one of {', '.join(get_args(kind))}") from None
        number, meta = get_args(kind)
        noun = "whole number" if number is int else "number"
        raise ValueError(f"must be a {noun} from {meta.ge} to {meta.le}, like {example}") from None


def _setting(
    default: Any,
    unit: str,
    why: str,
    *,
    parse: Callable[[str], Any] | None = None,
    shown: str | None = None,
) -> Any:
    """
    Args:
        unit: unit of a number, or the kind of text; empty for a choice, which lists itself.
        parse: text to value, or ValueError that completes "NAME='text' …"; by default from the field's type.
        shown: the default as the table prints it, where it is not the value.
    """
    if shown is None:
        shown = f"{default:g}" if isinstance(default, float) else str(default)
    metadata = {"parse": parse, "shown": shown, "unit": unit, "why": why}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one running instance."""

    bind: Address = _setting(
        Address("127.0.0.1", 8000), "host:port",
        "address of the gateway; loopback by default, because any client that can connect may use the server",
        parse=_address,
    )  # fmt: skip
    insecure: bool = _setting(
        False, "0 or 1", "1 permits an address beyond loopback without API keys: any client that can connect may use "
        "the server",
        parse=_flag, shown="0",
    )  # fmt: skip
    keys: Path | None = _setting(
        None, "file", "API keys, written by `tercet key new`; with this file, requests need a key",
        parse=_path, shown="(none)",
    )  # fmt: skip
    key_rate: Annotated[int, Meta(ge=0, le=1_000_000)] = _setting(
        1200, "requests/minute", "rate limit of an API key that has none of its own; 0 disables it",
    )  # fmt: skip
    key_concurrency: Annotated[int, Meta(ge=0, le=4096)] = _setting(
        32, "requests", "requests of an API key that may run or wait at the same time; 0 disables this limit",
    )  # fmt: skip
    tls_cert: Path | None = _setting(
        None, "file", "certificate chain (PEM); with TERCET_TLS_KEY, the gateway serves HTTPS; SIGHUP reads it again",
        parse=_path, shown="(none)",
    )  # fmt: skip
    tls_key: Path | None = _setting(
        None, "file", "private key (PEM) of TERCET_TLS_CERT",
        parse=_path, shown="(none)",
    )  # fmt: skip
    run_dir: Path | None = _setting(
        None, "directory", "holds sockets, slot plan and locks; each running instance needs its own",
        parse=_path, shown="<temporary dir>/tercet-<uid>-<port>",
    )  # fmt: skip
    devices: tuple[str, ...] = _setting(
        (), "list", "devices that run workers, like cuda:0,cuda:1; indexes into CUDA_VISIBLE_DEVICES if that is set",
        parse=_devices, shown="all visible GPUs, else cpu",
    )  # fmt: skip
    models: tuple[ModelSpec, ...] = _setting(
        (), "list", "models on each device, like small*2,medium or legal=/models/legal-gpt2; *2 means two workers",
        parse=_models, shown="small if available, else embedded",
    )  # fmt: skip
    pool: tuple[PoolUrl, ...] = _setting(
        (), "list", "workers on other machines, as model=URL, like small=https://gpu-a.example:8100-8103: a slot for "
        "each port and each address of the name; with it, workers of this machine run only where TERCET_MODELS is set",
        parse=_pool, shown="(none)",
    )  # fmt: skip
    pool_key: Path | None = _setting(
        None, "file", "keys shared by gateways and the workers that listen on TCP, one per line: a gateway sends the "
        "first, workers accept each",
        parse=_path, shown="(none)",
    )  # fmt: skip
    pool_ca: Path | None = _setting(
        None, "file", "certificates (PEM) of the authorities that a gateway trusts for the workers of TERCET_POOL",
        parse=_path, shown="the system's",
    )  # fmt: skip
    pool_bind: Address | None = _setting(
        None, "host:port", "address at which the worker of slot 0 listens on TCP, slot 1 at the next port, and so on; "
        "needs TERCET_POOL_KEY. Without it, workers are reached by Unix sockets only",
        parse=_address, shown="(none)",
    )  # fmt: skip
    pool_tls_cert: Path | None = _setting(
        None, "file", "certificate chain (PEM) of workers that listen on TCP; with TERCET_POOL_TLS_KEY",
        parse=_path, shown="(none)",
    )  # fmt: skip
    pool_tls_key: Path | None = _setting(
        None, "file", "private key (PEM) of TERCET_POOL_TLS_CERT",
        parse=_path, shown="(none)",
    )  # fmt: skip
    redis: str | None = _setting(
        None, "URL", "store that several gateways share, redis://host:port/db: sessions, feedback ids and the limits "
        "of API keys hold across them; without it, each gateway has its own",
        parse=_redis, shown="(none)",
    )  # fmt: skip
    compute: Compute = _setting(
        "auto", "", "cpu runs workers that are planned for GPUs on the CPU, to try a plan without its GPUs",
    )  # fmt: skip
    dtype: Dtype = _setting(
        "auto", "", "data type of the weights; auto takes the fastest that keeps the model's quality on its device",
    )  # fmt: skip
    cpu_threads: Annotated[int, Meta(ge=0, le=1024)] = _setting(
        0, "threads", "compute threads of a CPU worker; 0 divides the cores among the workers",
    )  # fmt: skip
    max_batch: Annotated[int, Meta(ge=1, le=512)] = _setting(
        48, "sequences", "largest batch of a slot; 48 sequences are 16 requests of three branches",
    )  # fmt: skip
    cache_mb: Annotated[int, Meta(ge=0, le=1_000_000)] = _setting(
        0, "MB", "bound of the KV cache of a CPU worker, which takes memory as it is used; 0 divides 30 % of the free "
        "memory among the workers",
    )  # fmt: skip
    placement: Placement = _setting(
        "auto", "", "pack puts a request's branches on one slot, which prefills their prompt once; spread puts each on "
        "a slot of its own; auto packs while a slot has room for all of them",
    )  # fmt: skip
    queue: Annotated[int, Meta(ge=0, le=4096)] = _setting(
        96, "branches", "branches that may wait for a slot before requests are refused with 503; 96 are 32 requests",
    )  # fmt: skip
    similarity: Annotated[float, Meta(ge=1, le=100)] = _setting(
        80.0, "percent", "sentences at least this similar, character by character, are duplicates: the second is "
        "replaced",
    )  # fmt: skip
    predict_temperature: Annotated[float, Meta(ge=0.1, le=10)] = _setting(
        1.0, "ratio", "calibrates the probabilities of predicted words (strategy predict); tercet calibrate fits it",
    )  # fmt: skip
    min_usefulness: Annotated[float, Meta(ge=0, le=100)] = _setting(
        0.0, "keys", "predictions that should save fewer keys are not shown; tercet calibrate fits it",
    )  # fmt: skip
    timeout_s: Annotated[float, Meta(ge=0.05, le=600)] = _setting(
        30.0, "seconds", "longest time that a request may take; the default of max_time",
    )  # fmt: skip
    ack_ms: Annotated[int, Meta(ge=10, le=60_000)] = _setting(
        250, "milliseconds", "a branch that its worker does not acknowledge in this time is retried on another slot",
    )  # fmt: skip
    hang_s: Annotated[float, Meta(ge=0, le=600)] = _setting(
        10.0, "seconds", "an engine that completes no step in this time is killed and replaced; 0 disables this check",
    )  # fmt: skip
    load_s: Annotated[float, Meta(ge=0, le=7200)] = _setting(
        600.0, "seconds", "a worker whose model is not loaded and warmed up in this time is killed and replaced; the "
        "default allows for a slow disk and a first compilation of kernels; 0 disables this check",
    )  # fmt: skip
    grace_s: Annotated[float, Meta(ge=1, le=600)] = _setting(
        30.0, "seconds", "time that a stopping or outgoing worker has to finish accepted requests",
    )  # fmt: skip
    drain_s: Annotated[float, Meta(ge=0, le=120)] = _setting(
        0.5, "seconds", "time from readiness turning 503 to the gateway closing its listener; set it above the load "
        "balancer's probe interval",
    )  # fmt: skip
    idle_stop_s: Annotated[float, Meta(ge=0, le=604_800)] = _setting(
        0.0, "seconds", "`tercet serve` ends by itself when no completion was requested for this time; for a service "
        "manager that starts it again with the next connection (deploy/systemd); 0 disables it",
    )  # fmt: skip
    origins: tuple[str, ...] = _setting(
        (), "list", "other web origins whose pages may call this server, like https://notes.example",
        parse=_origins, shown="(none)",
    )  # fmt: skip
    hosts: tuple[str, ...] = _setting(
        (), "list", "names accepted in the Host header besides localhost and IP addresses; *.notes.example "
        "accepts its subdomains, * any name",
        parse=_hosts, shown="(none)",
    )  # fmt: skip
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = _setting(
        1 << 20, "bytes", "largest request body; a chapter of a novel has 30,000, and only its last max_tokens tokens "
        "are used",
    )  # fmt: skip
    max_connections: Annotated[int, Meta(ge=0, le=1_000_000)] = _setting(
        0, "connections", "open connections of the gateway, idle ones included; 0 derives it from the limit of open "
        "files (ulimit -n); beyond it the connection that has been idle for longest is closed",
    )  # fmt: skip
    client_timeout_s: Annotated[float, Meta(ge=0.1, le=600)] = _setting(
        10.0, "seconds", "longest time that a client may take to send a request, or to accept more of its response",
    )  # fmt: skip
    cache_dir: Path | None = _setting(
        None, "directory", "compiled kernels, results of the int8 check, and int8 weights, which workers of a model "
        "share; where it cannot be written to, each worker compiles at its start",
        parse=_path, shown="~/.cache/tercet",
    )  # fmt: skip
    jobs: str | None = _setting(
        None, "URL", "job store: sqlite:<file>, redis://host:port/db, dynamodb://table?region=…&endpoint=…, or none to "
        "serve no jobs; gateways that share a store share its jobs",
        parse=_job_store, shown="sqlite:~/.local/state/tercet/jobs-<port>.sqlite3",
    )  # fmt: skip
    job_ttl_s: Annotated[float, Meta(ge=1, le=31_536_000)] = _setting(
        86_400.0, "seconds", "how long a job's result is kept; then it is erased",
    )  # fmt: skip
    job_queue: Annotated[int, Meta(ge=1, le=1_000_000)] = _setting(
        1000, "jobs", "jobs that may be queued or running; an API key may have a quarter of them",
    )  # fmt: skip
    sagemaker: bool = _setting(
        False, "0 or 1", "1 makes `tercet serve` the server of a SageMaker container, as `--sagemaker` does",
        parse=_flag, shown="0",
    )  # fmt: skip
    traces: bool = _setting(
        False, "0 or 1", "1 exports OpenTelemetry traces of requests (`.venv/bin/pip install -e '.[otel]'`); the "
        "standard OTEL_* variables say where to",
        parse=_flag, shown="0",
    )  # fmt: skip
    log: LogLevel = _setting(
        "info", "", "lowest level that is logged, as JSON lines on stderr; prompts are never logged",
    )  # fmt: skip

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Settings:
        """Read and validate every `TERCET_` variable.

        Raises:
            StartError: some variables are unknown or have wrong values; the message names all of them.
        """
        known = {PREFIX + f.name.upper(): f for f in fields(cls)}
        kinds = get_type_hints(cls, include_extras=True)
        wrong: list[str] = []
        values: dict[str, Any] = {}
        for name in sorted(environ):
            if not name.startswith(PREFIX) or name in INTERNAL | CLIENT:
                continue
            if name not in known:
                wrong.append(f"{name} is not a setting; `tercet settings` lists them")
            elif text := environ[name].strip():
                setting = known[name]
                parse = setting.metadata["parse"]
                try:
                    values[setting.name] = (
                        parse(text) if parse else _convert(text, kinds[setting.name], setting.metadata["shown"])
                    )
                except ValueError as error:
                    shown = re.sub(r"//.*@", "//…@", text)  # a URL may hold a password
                    wrong.append(f"{name}={shown!r} {error}")
        if wrong:
            raise StartError("; ".join(wrong) + ".")
        return cls(**values)

    @property
    def run_path(self) -> Path:
        """The run directory, absolute; it may not exist yet."""
        if self.run_dir is not None:
            return self.run_dir
        return Path(tempfile.gettempdir()) / f"tercet-{os.getuid()}-{self.bind.port}"

    @property
    def job_store(self) -> str:
        """URL of the job store, or "none"."""
        return self.jobs or f"sqlite:{_path(f'~/.local/state/tercet/jobs-{self.bind.port}.sqlite3')}"

    @property
    def url(self) -> str:
        """URL at which a client on this machine reaches the gateway; a wildcard host becomes loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind.host, self.bind.host)
        return f"{'https' if self.uses_tls else 'http'}://{Address(host, self.bind.port)}"

    @property
    def requires_keys(self) -> bool:
        """Whether requests need an API key. In a SageMaker container the platform guards the server."""
        return self.keys is not None and not self.sagemaker

    @property
    def uses_tls(self) -> bool:
        """Whether the gateway serves HTTPS."""
        return self.tls_cert is not None

    def allows_host(self, header: str) -> bool:
        """Whether a `Host` header names this server.

        Guards against DNS rebinding: a page whose name was rebound to this address still sends its own name, so names
        must be listed. An IP address cannot be rebound. `*` in the list allows any host, also none, but nothing that
        is not `host[:port]`.
        """
        if not header:
            return "*" in self.hosts
        parts = _split_host_port(header)
        if parts is None:
            return False
        host, _port = parts
        return (
            host in {"localhost", self.bind.host}
            or _is_ip(host)
            or any(
                pattern in {"*", host} or (pattern.startswith("*.") and host.endswith(pattern[1:]))
                for pattern in self.hosts
            )
        )

    @classmethod
    def table(cls) -> list[tuple[str, str, str, str]]:
        """Rows of (variable, default, unit, reason), in the order of declaration."""
        kinds = get_type_hints(cls, include_extras=True)
        return [
            (
                PREFIX + f.name.upper(),
                f.metadata["shown"],
                f.metadata["unit"] or ", ".join(get_args(kinds[f.name])),
                f.metadata["why"],
            )
            for f in fields(cls)
        ]
