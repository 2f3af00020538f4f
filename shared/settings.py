"""Every setting Tercet reads: typed, frozen, validated together when loaded, and then passed down.

A setting is an environment variable `TERCET_<NAME>`. This module knows names, defaults, units, reasons and ranges, and
not how a value is used. Only `build()` functions, `gunicorn.conf.py` and the command line call `Settings.load`; nothing
below them reads the environment.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from shared import setting_values as values
from shared.errors import StartError
from shared.home import START_DIRECTORY, absolute_path, home_directory
from shared.run_paths import default_run_path
from shared.setting_values import Address, Dtype, ModelSpec, Placement, PoolUrl, without_passwords

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
        " gateway, as deploy/supervision/nginx.conf does (docs/DISTRIBUTED.md, Several gateways), and put jobs into"
        " TERCET_JOBS=redis://host:port/db"
    ),
}
# Read by the command line as a client of a running server.
CLIENT = frozenset({"TERCET_API_KEY", "TERCET_API_KEY_FILE"})
# The setting that may hold a password, and the variable of a file that has its value.
SECRET, SECRET_FILE = "TERCET_JOBS", "TERCET_JOBS_FILE"
DEFAULT_JOB_STORE = "sqlite:~/.local/state/tercet/jobs-<port>.sqlite3"

Compute = Literal["auto", "cpu"]
LogLevel = Literal["debug", "info", "warning", "error"]

# What Kubernetes sets for a service whose name begins with "tercet" (its "service links").
_SERVICE_LINK = re.compile(
    r"TERCET(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)


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
) -> Any:
    """A field of a group of settings.

    Args:
        unit: unit of a number, or the kind of text; empty for a choice, which lists itself.
        name: the variable's name after TERCET_, where it is not the field's.
        shown: the default as the reference prints it, where it is not the value.
        parse: text to value, or ValueError that completes "NAME='text' …"; by default from the field's type.
    """
    if shown is None:
        shown = f"{default:g}" if isinstance(default, float) else "(none)" if default in (None, ()) else str(default)
    metadata = {"parse": parse, "shown": shown, "unit": unit, "name": name}
    return field(default=default, metadata=metadata)


def _switch() -> Any:
    """A setting that is off by default."""
    return _setting(False, "0 or 1", shown="0", parse=values.parse_flag)


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
            that starts it again with the next connection (deploy/supervision/systemd); 0 disables it
        log: lowest level that is logged, as JSON lines on stderr; prompts are never logged
        traces: 1 exports OpenTelemetry traces of requests (extra otel); the standard OTEL_*
            variables say where to
        sagemaker: 1 makes `tercet serve` the server of a SageMaker container, as `--sagemaker` does
    """

    bind: Address = _setting(Address("127.0.0.1", 8000), "host:port", parse=values.parse_address)
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
        (), "list", shown="small if available, else smollm2, else embedded", parse=values.parse_models
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

    devices: tuple[str, ...] = _setting((), "list", shown="all visible GPUs, else cpu", parse=values.parse_devices)
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
        bytes_per_s: bytes that an API key, or without keys an address, may send a second, counted by each gateway; 64
            writers with contexts of 8,192 characters send 2.7 MB at five keys a second. 0 disables it, for a gateway
            without keys whose clients all have the address of a proxy, which limits them
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
    bytes_per_s: Annotated[int, Meta(ge=0, le=1_000_000_000_000)] = _setting(8_000_000, "bytes/second")
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
    origins: tuple[str, ...] = _setting((), "list", parse=values.parse_origins)
    hosts: tuple[str, ...] = _setting((), "list", parse=values.parse_hosts)
    public_url: str | None = _setting(None, "URL", parse=values.parse_public_url)

    def allows_origin(self, header: str) -> bool:
        """Whether the value of an `Origin` header is listed."""
        return values.lists_origin(self.origins, header)


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

    store: str | None = _setting(None, "URL", name="JOBS", shown=DEFAULT_JOB_STORE, parse=values.parse_job_store)
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

    pool: tuple[PoolUrl, ...] = _setting((), "list", parse=values.parse_pool)
    pool_key: Path | None = _file()
    pool_ca: Path | None = _setting(None, "file", shown="the system's", parse=absolute_path)
    pool_bind: Address | None = _setting(None, "host:port", parse=values.parse_address)
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
        environ = _with_secret(environ, wrong)
        found: dict[str, dict[str, Any]] = {group_name: {} for group_name, _ in _groups()}
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
                    found[group_name][setting.name] = (
                        parse(text) if parse else _convert(text, kind, setting.metadata["shown"])
                    )
                except ValueError as error:
                    wrong.append(f"{name}={without_passwords(text)!r} {error}")
        if wrong:
            raise StartError("; ".join(wrong) + ".")
        if public_url := found["access"].get("public_url"):
            # Pages of it are this server's own, whatever Host the proxy sends.
            parts = urlsplit(public_url)
            own = values.parse_origins(f"{parts.scheme}://{parts.netloc}")
            found["access"]["origins"] = (*found["access"].get("origins", ()), *own)
        return cls(**{group_name: replace(group, **found[group_name]) for group_name, group in _groups()})

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
        return values.parse_job_store(DEFAULT_JOB_STORE.replace("<port>", str(self.server.bind.port)))

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
        """Whether a `Host` header names this server."""
        own = {"localhost", self.server.bind.host, urlsplit(self.access.public_url or "").hostname or ""}
        return values.lists_host(self.access.hosts, own, header)

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


def _with_secret(environ: Mapping[str, str], wrong: list[str]) -> dict[str, str]:
    """The variables, with the content of the file that `TERCET_JOBS_FILE` names.

    Args:
        wrong: gets what is wrong with it.
    """
    found = dict(environ)
    if not (path := found.pop(SECRET_FILE, "")):
        return found
    if environ.get(SECRET, "").strip():
        wrong.append(f"{SECRET} and {SECRET_FILE} are both set")
        return found
    try:
        found[SECRET] = absolute_path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        reason = error.strerror if isinstance(error, OSError) else f"it {error if is_text else 'is not UTF-8'}"
        wrong.append(f"{SECRET_FILE}={path!r} cannot be read: {reason}")
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
