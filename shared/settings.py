"""Every setting Tercet reads: typed, frozen, validated together when loaded, and then passed down.

A setting is an environment variable `TERCET_<NAME>`. This module knows names, defaults, units, reasons
and ranges; it knows nothing of what is done with a value. Only `build()` functions, `gunicorn.conf.py`
and the command line call `Settings.load`; nothing below them reads the environment.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from shared.errors import StartError

PREFIX = "TERCET_"
# Set by Tercet for its own processes, never by a person: which pool a gunicorn is, which slot a worker has.
INTERNAL = frozenset({"TERCET_ROLE", "TERCET_SLOT"})
# A Unix socket's address holds 107 bytes and a null; 100 leaves room for "/slot-NN.s" and its like.
MAX_SOCKET_PATH_BYTES = 100

Dtype = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Placement = Literal["auto", "spread", "pack"]
Compute = Literal["auto", "cpu"]
LogLevel = Literal["debug", "info", "warning", "error"]

_MODEL_NAME = re.compile(r"(synthetic:)?[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DEVICE = re.compile(r"cpu|cuda:\d{1,2}")


@dataclass(frozen=True, slots=True)
class Address:
    """Where the gateway listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """An address that a client on this machine can use."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{Address(host, self.port)}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One entry of `TERCET_MODELS`: `name`, `name=source`, each with `*count` per device."""

    name: str
    source: str | None = None
    count: int = 1

    def __str__(self) -> str:
        source = "" if self.source is None else f"={self.source}"
        return f"{self.name}{source}" + (f"*{self.count}" if self.count != 1 else "")


def _address(text: str) -> Address:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("must be host:port with a port from 1 to 65535, like 127.0.0.1:8000")
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
        raise ValueError("names a device twice; use a count in TERCET_MODELS for more workers on one device")
    return devices


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(filter(None, (part.strip().rstrip("/") for part in text.split(","))))
    for origin in origins:
        if not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise ValueError(f"has {origin!r}; an origin is http(s)://host[:port], without a path or a *")
    return origins


def _hosts(text: str) -> tuple[str, ...]:
    return tuple(part.strip().lower() for part in text.split(",") if part.strip())


def _delays(text: str) -> dict[int, float]:
    try:
        pairs = (entry.split("=") for entry in text.split(",") if entry)
        return {int(slot): float(delay_ms) for slot, delay_ms in pairs}
    except ValueError:
        raise ValueError("must be slot=milliseconds, like 0=0,1=10") from None


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,12}", text) or not low <= int(text) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(text)

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ValueError(f"must be a number from {low:g} to {high:g}")
        return value

    return parse


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


def _setting(default: Any, parse: Callable[[str], Any], shown: str, unit: str, why: str) -> Any:
    metadata = {"parse": parse, "shown": shown, "unit": unit, "why": why}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of one running instance."""

    bind: Address = _setting(
        Address("127.0.0.1", 8000), _address, "127.0.0.1:8000", "host:port",
        "where the gateway listens; loopback, because anyone who reaches it may use it",
    )  # fmt: skip
    run_dir: Path | None = _setting(
        None, _path, "<temporary dir>/tercet-<uid>-<port>", "directory",
        "sockets, plan, locks; one per running instance, so that two live side by side",
    )  # fmt: skip
    devices: tuple[str, ...] = _setting(
        (), _devices, "the GPUs seen, else cpu", "list",
        "devices that hold workers, like cuda:0,cuda:1; indexes into CUDA_VISIBLE_DEVICES if that is set",
    )  # fmt: skip
    models: tuple[ModelSpec, ...] = _setting(
        (), _models, "small if it can be had, else embedded", "list",
        "models on each device: small*2,medium or legal=/models/legal-gpt2; the count is workers per device",
    )  # fmt: skip
    compute: Compute = _setting(
        "auto", _choice("auto", "cpu"), "auto", "auto, cpu",
        "cpu: workers planned for GPUs compute on the CPU, all else as planned; to try a plan without its GPUs",
    )  # fmt: skip
    dtype: Dtype = _setting(
        "auto", _choice("auto", "fp32", "bf16", "fp16", "int8"), "auto", "auto, fp32, bf16, fp16, int8",
        "arithmetic of the weights; auto takes the fastest that keeps the model's quality on its device",
    )  # fmt: skip
    cpu_threads: int = _setting(
        0, _integer(0, 1024), "0", "threads",
        "compute threads of a CPU worker; 0: the cores are shared out among the workers",
    )  # fmt: skip
    max_batch: int = _setting(
        48, _integer(1, 512), "48", "sequences",
        "sequences a slot computes at once: 16 editors' three branches; one batched step serves all of them",
    )  # fmt: skip
    placement: Placement = _setting(
        "auto", _choice("auto", "spread", "pack"), "auto", "auto, spread, pack",
        "auto: the branches share a slot (one prompt computed once) while one has room for all, else spread",
    )  # fmt: skip
    queue: int = _setting(
        96, _integer(0, 4096), "96", "branches",
        "branches that may wait for room before requests are refused with 503: 32 editors' worth",
    )  # fmt: skip
    similarity: float = _setting(
        80.0, _number(1, 100), "80", "percent",
        "sentences that are so much alike, letter by letter, count as one: the second is replaced",
    )  # fmt: skip
    timeout_s: float = _setting(
        30.0, _number(0.05, 600), "30", "seconds",
        "longest that a request may take, and the default of max_time",
    )  # fmt: skip
    ack_ms: int = _setting(
        250, _integer(10, 60_000), "250", "milliseconds",
        "a branch that its worker has not acknowledged by then is placed elsewhere",
    )  # fmt: skip
    hang_s: float = _setting(
        10.0, _number(0, 600), "10", "seconds",
        "an engine that makes no step for so long is killed and replaced; 0: never",
    )  # fmt: skip
    grace_s: float = _setting(
        30.0, _number(1, 600), "30", "seconds",
        "how long a stopping or outgoing worker may finish what it accepted",
    )  # fmt: skip
    drain_s: float = _setting(
        0.5, _number(0, 120), "0.5", "seconds",
        "how long readiness says 503 before the gateway closes its listener; more than a balancer's probe period",
    )  # fmt: skip
    origins: tuple[str, ...] = _setting(
        (), _origins, "(none)", "list",
        "web origins besides our own whose pages may call this server, like https://notes.example",
    )  # fmt: skip
    hosts: tuple[str, ...] = _setting(
        (), _hosts, "(none)", "list",
        "names besides localhost and IP addresses that a Host header may carry; * for any",
    )  # fmt: skip
    max_body_bytes: int = _setting(
        1 << 20, _integer(1024, 1 << 30), "1048576", "bytes",
        "largest request body; a novel's chapter is 30,000, and only max_tokens of its end are used",
    )  # fmt: skip
    log: LogLevel = _setting(
        "info", _choice("debug", "info", "warning", "error"), "info", "debug, info, warning, error",
        "least level that is logged, as JSON lines to stderr; prompts are never logged",
    )  # fmt: skip
    test_step_delay_ms: dict[int, float] = _setting(
        {}, _delays, "(none)", "slot=milliseconds",
        "for tests: makes each decode step of a slot slower, like 1=10",
    )  # fmt: skip

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Settings:
        """Read and validate every `TERCET_` variable.

        Raises:
            StartError: naming each unknown variable and each wrong value.
        """
        known = {PREFIX + f.name.upper(): f for f in fields(cls)}
        wrong: list[str] = []
        values: dict[str, Any] = {}
        for name in sorted(environ):
            if not name.startswith(PREFIX) or name in INTERNAL:
                continue
            if name not in known:
                wrong.append(f"{name} is not a setting; `tercet settings` lists them")
            elif text := environ[name].strip():
                try:
                    values[known[name].name] = known[name].metadata["parse"](text)
                except ValueError as error:
                    wrong.append(f"{name}={text!r} {error}")
        if wrong:
            raise StartError("; ".join(wrong) + ".")
        return cls(**values)

    @property
    def run_path(self) -> Path:
        """The run directory, absolute; not made yet."""
        if self.run_dir is not None:
            return self.run_dir
        return Path(tempfile.gettempdir()) / f"tercet-{os.getuid()}-{self.bind.port}"

    def allows_host(self, host: str) -> bool:
        """Whether a `Host` header names this server.

        A page that rebinds its DNS name to this address still sends its own name, so names must be listed;
        an IP address cannot be rebound.
        """
        name = host.lower()
        name = name.partition("]")[0].removeprefix("[") if name.startswith("[") else name.partition(":")[0]
        if name == "localhost" or "*" in self.hosts or name in self.hosts or name == self.bind.host.lower():
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    @classmethod
    def table(cls) -> list[tuple[str, str, str, str]]:
        """Rows of (variable, default, unit, reason), in the order of declaration."""
        return [
            (PREFIX + f.name.upper(), f.metadata["shown"], f.metadata["unit"], f.metadata["why"]) for f in fields(cls)
        ]
