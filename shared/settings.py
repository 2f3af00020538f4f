"""Every setting Tercet reads: typed, frozen, validated together when loaded, and then passed down.

A setting is an environment variable `TERCET_<NAME>`. This module knows names, defaults, units, reasons and ranges, and
not how a value is used. Only `build()` functions, `gunicorn.conf.py` and the command line call `Settings.load`; nothing
below them reads the environment.
"""

from __future__ import annotations

import inspect
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import parse_qs, urlsplit

import msgspec
from msgspec import Meta

from shared.errors import StartError
from shared.home import START_DIRECTORY, absolute_path, home_directory, start_directory
from shared.redis_urls import REDIS_SCHEMES, parse_redis_url
from shared.run_paths import default_run_path

PREFIX = "TERCET_"
# Set by Tercet for its own processes, never by a user: which pool a gunicorn runs, which slot a worker has, the
# descriptors that the supervisor passes to its pools, whether it has just been started itself, and where.
INTERNAL = frozenset(
    {
        "TERCET_ROLE",
        "TERCET_SLOT",
        "TERCET_LISTEN_FD",
        "TERCET_LIFELINE_FD",
        "TERCET_ACTIVITY_FD",
        "TERCET_IS_FIRST_START",
        START_DIRECTORY,
    }
)
# Settings of earlier versions, and what does their work now.
REMOVED = {
    "TERCET_REDIS": (
        "is no longer a setting, because gateways share nothing but jobs: let the load balancer keep a session at its"
        " gateway, as deploy/nginx.conf does (docs/DISTRIBUTED.md, Several gateways), and put jobs into"
        " TERCET_JOBS=redis://host:port/db"
    ),
}
# Read by the command line as a client of a running server.
CLIENT = frozenset({"TERCET_API_KEY", "TERCET_API_KEY_FILE"})
DEFAULT_JOB_STORE = "sqlite:~/.local/state/tercet/jobs-<port>.sqlite3"

Dtype = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Placement = Literal["auto", "spread", "pack"]
Compute = Literal["auto", "cpu"]
LogLevel = Literal["debug", "info", "warning", "error"]

_MODEL_ENTRY = re.compile(r"""(?:="[^"]*"|='[^']*'|[^,])+""")
_COUNTED = re.compile(r"(.*)\*(\d{1,3})")
_MODEL_NAME = re.compile(r"(synthetic:)?[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# host:port, with IPv6 in brackets. `\d` would match the digits of every script.
_HOST_PORT = re.compile(r"(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,254}|\[[0-9A-Fa-f:.]{2,45}\])(:(?P<port>[0-9]{1,5}))?")
# As _HOST_PORT, with an optional range of ports and a path.
_POOL_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,254}|\[[0-9A-Fa-f:.]{2,45}\])"
    r":(?P<port>[0-9]{1,5})(-(?P<last_port>[0-9]{1,5}))?(?P<path>(/[A-Za-z0-9._~-]+)*)/?"
)
_PUBLIC_URL = re.compile(r"(?P<scheme>https?)://(?P<host>[^/?#@]+)(?P<path>(/[A-Za-z0-9._~-]+)*)/?", re.IGNORECASE)
_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DEVICE = re.compile(r"cpu|cuda:\d{1,2}")
# An origin of the web, or of an extension or app with a scheme of its own, whose host is any text, or * for every host.
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\*|[a-z0-9._~%+-]+(:[0-9]{1,5})?)")
# What Kubernetes sets for a service whose name begins with "tercet" (its "service links").
_SERVICE_LINK = re.compile(
    r"TERCET(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_WEB_SCHEMES = {"http", "https"}
# No page has an origin of these; the one of files has no host.
_PAGELESS_SCHEMES = {"ws", "wss", "ftp", "file"}
_ORIGIN_RULE = (
    "an origin is http(s)://host[:port], or scheme://host of an extension or app (scheme://* for all of that scheme),"
    " without a path"
)


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
    """One entry of `TERCET_MODELS`: `name`, `name=source`, each with `*count` per device.

    A source may stand in quotation marks, and must if it has a comma or ends like a count.
    """

    name: str
    source: str | None = None
    count: int = 1

    def __str__(self) -> str:
        source = "" if self.source is None else f"={self.source}"
        if "," in source or _COUNTED.fullmatch(source):
            quote = "'" if '"' in source else '"'
            source = f"={quote}{self.source}{quote}"
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
    parts = _MODEL_ENTRY.findall(text)
    for place, entry in enumerate(part.strip() for part in parts):
        if not entry:
            continue
        body, count = entry, 1
        if match := _COUNTED.fullmatch(entry):
            body, count = match[1], int(match[2])
        name, _, source = body.partition("=")
        if quoted := re.fullmatch(r"""(["'])(.+)\1""", source):
            source = quoted[2]
        elif source.startswith(('"', "'")):
            raise ValueError(f"has an entry {entry!r} whose quotation mark is not closed")
        elif source:
            for end in range(place, len(parts)):
                path = ",".join(parts[place : end + 1]).partition("=")[2].strip()
                if path != source and os.path.exists(Path(start_directory(), os.path.expanduser(path))):
                    raise ValueError(
                        f'has {name}={path}, and there is a path of this name: write {name}="{path}" for it, or '
                        f'{name}="{source}" for {source}, with what follows behind the quotation mark'
                    )
        if "/" in body and "=" not in body:
            raise ValueError(f"has {entry!r} without a name: write NAME={entry}, like legal=/models/gpt2")
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


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(filter(None, (part.strip().lower() for part in text.split(","))))
    return tuple(_origin(origin) for origin in origins)


def _origin(text: str) -> str:
    """An origin as browsers send it, in lower case."""
    if text in {"file://", "file:///"}:  # of apps that open their pages from files, in Electron or Android's WebView
        return "file://"
    if text == "*":
        raise ValueError(f"has '*', which would open the server to every page on the web; {_ORIGIN_RULE}")
    if text == "null":
        raise ValueError(
            "has 'null', the origin of any page in a sandboxed frame or from a file; serve the page over HTTP, and list"
            f" that: {_ORIGIN_RULE}"
        )
    origin = text.rstrip("/")
    scheme, _, host_port = origin.partition("://")
    if scheme in _WEB_SCHEMES:
        is_valid = _split_host_port(host_port) is not None
    else:
        is_valid = scheme not in _PAGELESS_SCHEMES and _ORIGIN.fullmatch(origin) is not None
    if not is_valid:
        raise ValueError(f"has {text!r}; {_ORIGIN_RULE}")
    # Browsers leave out the scheme's own port.
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", origin)


def _hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for host in hosts:
        if not _HOST_PATTERN.fullmatch(host):
            raise ValueError(f"has {host!r}; a host is a name without a port, *.name for its subdomains, or * for any")
    return hosts


def _public_url(text: str) -> str:
    match = _PUBLIC_URL.fullmatch(text)
    if match is None or _split_host_port(match["host"]) is None or {".", ".."} & {*match["path"].split("/")}:
        raise ValueError("must be http(s)://host[:port][/path], like https://notes.example/tools/tercet")
    return f"{match['scheme'].lower()}://{match['host'].lower()}{match['path']}"


def _flag(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError("must be 0 or 1")
    return text == "1"


def _job_store(text: str) -> str:
    """The URL of a job store, with an absolute path; "none" for none."""
    scheme, _, rest = text.partition(":")
    if scheme == "sqlite" and rest:
        return f"sqlite:{absolute_path(rest)}"
    if scheme in REDIS_SCHEMES:
        parse_redis_url(text)
        return text
    parts = urlsplit(text)
    # The limits of the service: "Naming rules" in the DynamoDB Developer Guide.
    if scheme == "dynamodb" and re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", parts.netloc) is None:
        raise ValueError(
            f"must name a table by 3 to 255 letters, digits, _, - and . (it has {len(parts.netloc)} characters), like "
            "dynamodb://tercet-jobs?region=eu-central-1"
        )
    is_valid = text == "none" or (
        scheme == "dynamodb" and parse_qs(parts.query, keep_blank_values=True).keys() <= {"region", "endpoint"}
    )
    if not is_valid:
        raise ValueError(
            "must be sqlite:<file>, redis://host:port/db (or rediss://), "
            "redis+sentinel://host:port,host:port/name/db (or rediss+sentinel://), "
            "dynamodb://table?region=…&endpoint=…, or none"
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
    *,
    name: str | None = None,
    shown: str | None = None,
    parse: Callable[[str], Any] | None = None,
    is_secret: bool = False,
) -> Any:
    """A field of a group of settings.

    Args:
        unit: unit of a number, or the kind of text; empty for a choice, which lists itself.
        name: the variable's name after TERCET_, where it is not the field's.
        shown: the default as the reference prints it, where it is not the value.
        parse: text to value, or ValueError that completes "NAME='text' …"; by default from the field's type.
        is_secret: it may hold a password: `<variable>_FILE` may name a file that has the value.
    """
    if shown is None:
        shown = f"{default:g}" if isinstance(default, float) else "(none)" if default in (None, ()) else str(default)
    metadata = {"parse": parse, "shown": shown, "unit": unit, "name": name, "is_secret": is_secret}
    return field(default=default, metadata=metadata)


def _switch() -> Any:
    """A setting that is off by default."""
    return _setting(False, "0 or 1", shown="0", parse=_flag)


def _file() -> Any:
    """A file that is not used by default."""
    return _setting(None, "file", parse=absolute_path)


# In each group, the section `Attributes` is the reference: `tercet settings` and docs/SETTINGS.md print it.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Server: the address and the files of the instance, how it stops and what it logs.

    Attributes:
        bind: address of the gateway; loopback by default, because any client that can connect may use the server
        run_dir: directory of sockets, slot plan and locks; each running instance needs its own. Without
            XDG_RUNTIME_DIR the default is below /run/user, ~/.local/state/tercet or the directory for temporary files
        cache_dir: models converted from GGUF, which need it; results of the int8 check, and int8 weights, which workers
            of a model share: where it cannot be written to, each start makes them anew
        grace_s: time that a stopping or outgoing worker has to finish accepted requests
        drain_s: time from readiness turning 503 to the gateway closing its listener; set it above the load balancer's
            probe interval
        idle_stop_s: `tercet serve` ends by itself when no completion was requested for this time; for a service manager
            that starts it again with the next connection (deploy/systemd); 0 disables it
        log: lowest level that is logged, as JSON lines on stderr; prompts are never logged
        traces: 1 exports OpenTelemetry traces of requests (extra otel); the standard OTEL_*
            variables say where to
        sagemaker: 1 makes `tercet serve` the server of a SageMaker container, as `--sagemaker` does
    """

    bind: Address = _setting(Address("127.0.0.1", 8000), "host:port", parse=_address)
    run_dir: Path | None = _setting(None, "directory", shown="$XDG_RUNTIME_DIR/tercet-<port>", parse=absolute_path)
    cache_dir: Path | None = _setting(None, "directory", shown="~/.cache/tercet", parse=absolute_path)
    grace_s: Annotated[float, Meta(ge=1, le=600)] = _setting(30.0, "seconds")
    drain_s: Annotated[float, Meta(ge=0, le=120)] = _setting(0.5, "seconds")
    idle_stop_s: Annotated[float, Meta(ge=0, le=604_800)] = _setting(0.0, "seconds")
    log: LogLevel = _setting("info", "")
    traces: bool = _switch()
    sagemaker: bool = _switch()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Models: what is served, in which data type, and which completions are shown.

    Attributes:
        models: models on each device, like small*2,medium, legal=/models/legal-gpt2 or x=/models/x.gguf; *2 means two
            workers; a path with a comma or a count at its end stands in quotation marks, like x="/models/a,b"*2
        dtype: data type of the weights; auto takes the fastest that keeps the model's quality on its device
        similarity: sentences at least this similar, character by character, are duplicates: the second is replaced
        predict_temperature: divisor of the logits that calibrates the probabilities of predicted words (strategy
            predict)
        min_usefulness: predictions that should save fewer keys are not shown
        min_familiarity: mean log-probability of a character at the end of the context; below it, requests with
            familiar_only get no suggestion
    """

    models: tuple[ModelSpec, ...] = _setting(
        (), "list", shown="small if available, else smollm2, else embedded", parse=_models
    )
    dtype: Dtype = _setting("auto", "")
    similarity: Annotated[float, Meta(ge=1, le=100)] = _setting(80.0, "percent")
    predict_temperature: Annotated[float, Meta(ge=0.1, le=10)] = _setting(1.0, "ratio")
    min_usefulness: Annotated[float, Meta(ge=0, le=100)] = _setting(0.0, "keys")
    min_familiarity: Annotated[float, Meta(ge=-100, le=0)] = _setting(-2.1, "nats")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Workers of this machine: their devices, memory and batches, and when one is replaced.

    Attributes:
        devices: devices that run workers, like cuda:0,cuda:1; indexes into CUDA_VISIBLE_DEVICES if that is set
        compute: cpu runs workers that are planned for GPUs on the CPU, to try a plan without its GPUs
        cpu_threads: compute threads of a CPU worker; 0 divides the cores among the workers
        max_batch: largest batch of a slot; 48 sequences are 16 requests of three branches
        cache_mb: bound of the KV cache of a CPU worker, which takes memory as it is used; 0 divides 30 % of the free
            memory among the workers
        placement: pack puts a request's branches on one slot, which prefills their prompt once; spread puts each on a
            slot of its own; auto packs while a slot has room for all of them
        ack_ms: a branch that its worker does not acknowledge in this time is retried on another slot
        hang_s: an engine that completes no step in this time is killed and replaced; 0 disables this check
        load_s: a worker whose model is not loaded and warmed up in this time is killed and replaced; the default allows
            for a slow disk; 0 disables this check
    """

    devices: tuple[str, ...] = _setting((), "list", shown="all visible GPUs, else cpu", parse=_devices)
    compute: Compute = _setting("auto", "")
    cpu_threads: Annotated[int, Meta(ge=0, le=1024)] = _setting(0, "threads")
    max_batch: Annotated[int, Meta(ge=1, le=512)] = _setting(48, "sequences")
    cache_mb: Annotated[int, Meta(ge=0, le=1_000_000)] = _setting(0, "MB")
    placement: Placement = _setting("auto", "")
    ack_ms: Annotated[int, Meta(ge=10, le=60_000)] = _setting(250, "milliseconds")
    hang_s: Annotated[float, Meta(ge=0, le=600)] = _setting(10.0, "seconds")
    load_s: Annotated[float, Meta(ge=0, le=7200)] = _setting(600.0, "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    """Limits: how many requests wait, how large they are and how long they take.

    Attributes:
        queue: branches that may wait for a slot before requests are refused with 503; 96 are 32 requests
        timeout_s: longest time that a request may take; the default of max_time
        max_body_bytes: largest request body; a chapter of a novel has 30,000, and only its last max_tokens tokens are
            used
        client_timeout_s: longest time that a client may take to send a request, or to accept more of its response
        keepalive_s: how long a connection without a request stays open; keep it above the idle timeout of a load
            balancer in front (AWS 60 s, Azure 240 s, Google 600 s), or it sends requests into closing connections
        key_rate: rate limit of an API key that has none of its own, counted by each gateway; 0 disables it
        key_concurrency: requests of an API key that may run or wait at the same time, counted by each gateway; 0
            disables this limit
    """

    queue: Annotated[int, Meta(ge=0, le=4096)] = _setting(96, "branches")
    timeout_s: Annotated[float, Meta(ge=0.05, le=600)] = _setting(30.0, "seconds")
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = _setting(1 << 20, "bytes")
    client_timeout_s: Annotated[float, Meta(ge=0.1, le=600)] = _setting(10.0, "seconds")
    keepalive_s: Annotated[float, Meta(ge=1, le=86_400)] = _setting(620.0, "seconds")
    key_rate: Annotated[int, Meta(ge=0, le=1_000_000)] = _setting(1200, "requests/minute")
    key_concurrency: Annotated[int, Meta(ge=0, le=4096)] = _setting(32, "requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Access: who may use the server, from which web pages, and by which names.

    Attributes:
        keys: API keys, written by `tercet key new`; with this file, requests need a key
        insecure: 1 permits an address beyond loopback without API keys: any client that can connect may use the server
        tls_cert: certificate chain (PEM); with TERCET_TLS_KEY, the gateway serves HTTPS; SIGHUP reads it again
        tls_key: private key (PEM) of TERCET_TLS_CERT
        origins: other origins whose pages may call this server, like https://notes.example; of extensions and apps
            too, like chrome-extension://<id> or tauri://localhost, and vscode-webview://* for all of one scheme
        hosts: names accepted in the Host header besides localhost, *.localhost and IP addresses; *.notes.example
            accepts its subdomains, * any name
        public_url: URL at which clients reach this server through a proxy, like https://notes.example/tools/tercet, for
            answers that name an address; its host and origin are accepted. No forwarded header is read
    """

    keys: Path | None = _file()
    insecure: bool = _switch()
    tls_cert: Path | None = _file()
    tls_key: Path | None = _file()
    origins: tuple[str, ...] = _setting((), "list", parse=_origins)
    hosts: tuple[str, ...] = _setting((), "list", parse=_hosts)
    public_url: str | None = _setting(None, "URL", parse=_public_url)

    def allows_origin(self, header: str) -> bool:
        """Whether the value of an `Origin` header is listed.

        Safari writes the hosts of its extensions in capitals. `scheme://*` stands for every host of a scheme that is
        not the web's: only what is installed has such an origin, and some get a new host at every start.
        """
        origin = header.lower()
        if origin in self.origins:
            return True
        match = _ORIGIN.fullmatch(origin)
        return match is not None and f"{match['scheme']}://*" in self.origins


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """Jobs: where they are stored, how many and for how long.

    Attributes:
        store: job store: sqlite:<file>, redis://host:port/db, dynamodb://table?region=…&endpoint=…, or none to serve no
            jobs; gateways that share a store share its jobs. With Redis Sentinel:
            redis+sentinel://host:26379,host:26379/mymaster/0. TERCET_JOBS_FILE names a file that has the URL, with its
            password
        ttl_s: how long a job's result is kept; then it is erased
        queue: jobs that may be queued or running; an API key may have a quarter of them
    """

    store: str | None = _setting(None, "URL", name="JOBS", shown=DEFAULT_JOB_STORE, parse=_job_store, is_secret=True)
    ttl_s: Annotated[float, Meta(ge=1, le=31_536_000)] = _setting(86_400.0, "seconds", name="JOB_TTL_S")
    queue: Annotated[int, Meta(ge=1, le=1_000_000)] = _setting(1000, "jobs", name="JOB_QUEUE")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Several machines: workers that listen on TCP, and gateways that use them.

    Attributes:
        pool: workers on other machines, as model=URL, like small=https://gpu-a.example:8100-8103: a slot for each port
            and each address of the name; with it, workers of this machine run only where TERCET_MODELS is set
        pool_key: keys shared by gateways and the workers that listen on TCP, one per line: a gateway sends the first,
            workers accept each
        pool_ca: certificates (PEM) of the authorities that a gateway trusts for the workers of TERCET_POOL
        pool_bind: address at which the worker of slot 0 listens on TCP, slot 1 at the next port, and so on; needs
            TERCET_POOL_KEY. Without it, workers are reached by Unix sockets only
        pool_tls_cert: certificate chain (PEM) of workers that listen on TCP; with TERCET_POOL_TLS_KEY
        pool_tls_key: private key (PEM) of TERCET_POOL_TLS_CERT
    """

    pool: tuple[PoolUrl, ...] = _setting((), "list", parse=_pool)
    pool_key: Path | None = _file()
    pool_ca: Path | None = _setting(None, "file", shown="the system's", parse=absolute_path)
    pool_bind: Address | None = _setting(None, "host:port", parse=_address)
    pool_tls_cert: Path | None = _file()
    pool_tls_key: Path | None = _file()


class SettingRow(NamedTuple):
    """A setting, as the reference shows it."""

    variable: str
    default: str
    unit: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one running instance, in groups."""

    server: ServerSettings = ServerSettings()
    model: ModelSettings = ModelSettings()
    pool: PoolSettings = PoolSettings()
    limits: LimitSettings = LimitSettings()
    access: AccessSettings = AccessSettings()
    jobs: JobSettings = JobSettings()
    remote: RemoteSettings = RemoteSettings()

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Settings:
        """Read and validate every `TERCET_` variable.

        Raises:
            StartError: some variables are unknown or have wrong values; the message names all of them.
        """
        known = {
            _variable(setting): (group_name, setting, kinds[setting.name])
            for group_name, group in _groups()
            for kinds in [get_type_hints(type(group), include_extras=True)]
            for setting in fields(group)
        }
        wrong: list[str] = []
        environ = _with_secrets(environ, wrong)
        values: dict[str, dict[str, Any]] = {group_name: {} for group_name, _ in _groups()}
        for name in sorted(environ):
            if not name.startswith(PREFIX) or name in INTERNAL | CLIENT:
                continue
            if name not in known and _is_service_link(name, environ[name]):
                continue
            if removed := REMOVED.get(name.removesuffix("_FILE")):
                wrong.append(f"{name} {removed}")
            elif name not in known:
                wrong.append(f"{name} is not a setting; `tercet settings` lists them")
            elif text := environ[name].strip():
                group_name, setting, kind = known[name]
                parse = setting.metadata["parse"]
                try:
                    values[group_name][setting.name] = (
                        parse(text) if parse else _convert(text, kind, setting.metadata["shown"])
                    )
                except ValueError as error:
                    wrong.append(f"{name}={without_passwords(text)!r} {error}")
        if wrong:
            raise StartError("; ".join(wrong) + ".")
        if public_url := values["access"].get("public_url"):
            # Pages of it are this server's own, whatever Host the proxy sends.
            parts = urlsplit(public_url)
            own = _origins(f"{parts.scheme}://{parts.netloc}")
            values["access"]["origins"] = (*values["access"].get("origins", ()), *own)
        return cls(**{group_name: replace(group, **values[group_name]) for group_name, group in _groups()})

    @property
    def run_path(self) -> Path:
        """The run directory, absolute; it may not exist yet.

        Raises:
            StartError: it is not set, and there is no directory for the default.
        """
        return self.server.run_dir or default_run_path(self.server.bind.port)

    def located(self) -> Settings:
        """These settings with the run directory set, for all processes of an instance: the default may change.

        Raises:
            StartError: as `run_path`.
        """
        return replace(self, server=replace(self.server, run_dir=self.run_path))

    @property
    def job_store(self) -> str:
        """URL of the job store, or "none".

        Raises:
            StartError: it is not set, and there is no home directory for the default.
        """
        if self.jobs.store is not None:
            return self.jobs.store
        if home_directory() is None:
            raise StartError(
                f"Jobs are stored in the home directory, and user {os.getuid()} has none: set TERCET_JOBS to "
                "sqlite:<file>, or to none to serve no jobs, or set HOME."
            )
        return _job_store(DEFAULT_JOB_STORE.replace("<port>", str(self.server.bind.port)))

    @property
    def url(self) -> str:
        """URL at which a client on this machine reaches the gateway; a wildcard host becomes loopback."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.server.bind.host, self.server.bind.host)
        return f"{'https' if self.uses_tls else 'http'}://{Address(host, self.server.bind.port)}"

    @property
    def public_path(self) -> str:
        """The path of the public URL, "" or like "/tools/tercet"."""
        return urlsplit(self.access.public_url or "").path

    @property
    def requires_keys(self) -> bool:
        """Whether requests need an API key. In a SageMaker container the platform guards the server."""
        return self.access.keys is not None and not self.server.sagemaker

    @property
    def uses_tls(self) -> bool:
        """Whether the gateway serves HTTPS."""
        return self.access.tls_cert is not None

    def allows_host(self, header: str) -> bool:
        """Whether a `Host` header names this server.

        Guards against DNS rebinding: a page whose name was rebound to this address still sends its own name, so names
        must be listed. An IP address cannot be rebound, nor `localhost` and the names below it (RFC 6761, § 6.3). A dot
        at the end only says that the name is complete. `*` in the list allows any host, also none, but nothing that is
        not `host[:port]`.
        """
        if not header:
            return "*" in self.access.hosts
        parts = _split_host_port(header)
        if parts is None:
            return False
        host = parts[0].removesuffix(".")
        return (
            host in {"localhost", self.server.bind.host, urlsplit(self.access.public_url or "").hostname}
            or host.endswith(".localhost")
            or _is_ip(host)
            or any(
                pattern in {"*", host} or (pattern.startswith("*.") and host.endswith(pattern[1:]))
                for pattern in self.access.hosts
            )
        )

    @classmethod
    def reference(cls) -> list[tuple[str, list[SettingRow]]]:
        """What each group is about, and its settings."""
        found = []
        for _, group in _groups():
            kinds = get_type_hints(type(group), include_extras=True)
            title, reasons = _described(group)
            rows = [
                SettingRow(
                    _variable(setting),
                    setting.metadata["shown"],
                    setting.metadata["unit"] or ", ".join(get_args(kinds[setting.name])),
                    reasons[setting.name],
                )
                for setting in fields(group)
            ]
            found.append((title, rows))
        return found


def without_passwords(text: str) -> str:
    """The value of a setting, to be shown: a URL may hold passwords."""
    return re.sub(r"password=[^&]*", "password=…", re.sub(r"(/+).*@", r"\1…@", text))


def service_links(environ: Mapping[str, str]) -> list[str]:
    """Variables that Kubernetes sets in each pod of a namespace that has a service `tercet` or `tercet-…`: they are no
    settings, and `Settings.load` ignores them."""
    known = {_variable(setting) for _, group in _groups() for setting in fields(group)}
    found = (name for name, value in environ.items() if name not in known and _is_service_link(name, value))
    return sorted(found)


def _is_service_link(name: str, value: str) -> bool:
    """`TERCET_PORT` and `TERCET_X_PORT` are one if they hold an address: somebody may take them for settings."""
    has_address = name.startswith(PREFIX) and name.endswith("_PORT") and "://" in value
    return has_address or _SERVICE_LINK.fullmatch(name) is not None


def _with_secrets(environ: Mapping[str, str], wrong: list[str]) -> dict[str, str]:
    """The variables, with the contents of the files that `…_FILE` name for settings that may hold a password.

    Args:
        wrong: gets what is wrong with them.
    """
    found = dict(environ)
    for _, group in _groups():
        for setting in fields(group):
            name = _variable(setting)
            path = found.pop(f"{name}_FILE", "") if setting.metadata["is_secret"] else ""
            if not path:
                continue
            if environ.get(name, "").strip():
                wrong.append(f"{name} and {name}_FILE are both set")
                continue
            try:
                found[name] = absolute_path(path).read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                is_text = not isinstance(error, UnicodeDecodeError)
                reason = error.strerror if isinstance(error, OSError) else f"it {error if is_text else 'is not UTF-8'}"
                wrong.append(f"{name}_FILE={path!r} cannot be read: {reason}")
    return found


def _groups() -> list[tuple[str, Any]]:
    """The groups' names, and each with its defaults."""
    return [(group.name, group.default) for group in fields(Settings)]


def _variable(setting: Field[Any]) -> str:
    return PREFIX + (setting.metadata["name"] or setting.name.upper())


def _described(group: object) -> tuple[str, dict[str, str]]:
    """The first line of a group's docstring, and its entries under `Attributes` by field."""
    title, _, attributes = inspect.cleandoc(group.__doc__ or "").partition("\n\nAttributes:\n")
    # A line that continues an entry is indented once more than the entry.
    entries = [entry.partition(": ") for entry in re.split(r"(?:^|\n) {4}(?=\S)", attributes) if entry]
    return title, {name: " ".join(text.split()) for name, _, text in entries}
