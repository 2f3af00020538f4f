"""The values of settings: addresses, models, pools, origins, made from text. Knows no setting's name.

Each function raises `ValueError` with a text that completes "NAME='text' …".
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from shared.home import absolute_path, start_directory
from shared.redis_urls import HOST, HOST_PORT, REDIS_SCHEMES, parse_redis_url

Dtype = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Placement = Literal["auto", "spread", "pack"]

_MODEL_ENTRY = re.compile(r"""(?:="[^"]*"|='[^']*'|[^,])+""")
_COUNTED = re.compile(r"(.*)\*(\d{1,3})")
_MODEL_NAME = re.compile(r"(synthetic:)?[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# As HOST_PORT, with an optional range of ports and a path.
_POOL_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{HOST}):(?P<port>[0-9]{{1,5}})(-(?P<last_port>[0-9]{{1,5}}))?"
    r"(?P<path>(/[A-Za-z0-9._~-]+)*)/?"
)
_PUBLIC_URL = re.compile(r"(?P<scheme>https?)://(?P<host>[^/?#@]+)(?P<path>(/[A-Za-z0-9._~-]+)*)/?", re.IGNORECASE)
_HOST_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_DEVICE = re.compile(r"cpu|cuda:\d{1,2}")
# An origin of the web, or of an extension or app with a scheme of its own, whose host is any text, or * for every host.
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\*|[a-z0-9._~%+-]+(:[0-9]{1,5})?)")
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
    match = HOST_PORT.fullmatch(text)
    if match is None:
        return None
    host = match["host"].lower()
    if host.startswith("["):
        host = host[1:-1]
        if not _is_ip(host) or ":" not in host:
            return None
    return host, match["port"] or ""


def parse_address(text: str) -> Address:
    host, port = _split_host_port(text) or ("", "")
    if not port or not 0 < int(port) < 65536:
        raise ValueError("must be host:port with a port from 1 to 65535, like 127.0.0.1:8000 or [::1]:8000")
    return Address(host, int(port))


def parse_models(text: str) -> tuple[ModelSpec, ...]:
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


def parse_devices(text: str) -> tuple[str, ...]:
    devices = tuple(filter(None, (part.strip() for part in text.split(","))))
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise ValueError(f"has {device!r}; a device is cpu or cuda:N, like cuda:0,cuda:1")
    if len(set(devices)) != len(devices):
        raise ValueError("names a device twice; for several workers on one device, use a count in TERCET_MODELS")
    return devices


def parse_pool(text: str) -> tuple[PoolUrl, ...]:
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


def parse_origins(text: str) -> tuple[str, ...]:
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


def parse_hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    for host in hosts:
        if not _HOST_PATTERN.fullmatch(host):
            raise ValueError(f"has {host!r}; a host is a name without a port, *.name for its subdomains, or * for any")
    return hosts


def parse_public_url(text: str) -> str:
    match = _PUBLIC_URL.fullmatch(text)
    if match is None or _split_host_port(match["host"]) is None or {".", ".."} & {*match["path"].split("/")}:
        raise ValueError("must be http(s)://host[:port][/path], like https://notes.example/tools/tercet")
    return f"{match['scheme'].lower()}://{match['host'].lower()}{match['path']}"


def parse_flag(text: str) -> bool:
    if text not in {"0", "1"}:
        raise ValueError("must be 0 or 1")
    return text == "1"


def parse_job_store(text: str) -> str:
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


def lists_origin(origins: Collection[str], header: str) -> bool:
    """Whether the value of an `Origin` header is listed.

    Safari writes the hosts of its extensions in capitals. `scheme://*` stands for every host of a scheme that is not
    the web's: only what is installed has such an origin, and some get a new host at every start.
    """
    origin = header.lower()
    if origin in origins:
        return True
    match = _ORIGIN.fullmatch(origin)
    return match is not None and f"{match['scheme']}://*" in origins


def lists_host(patterns: Collection[str], own: Collection[str], header: str) -> bool:
    """Whether a `Host` header names this server.

    Guards against DNS rebinding: a page whose name was rebound to this address still sends its own name, so names must
    be listed. An IP address cannot be rebound, nor `localhost` and the names below it (RFC 6761, § 6.3). A dot at the
    end only says that the name is complete. `*` in the list allows any host, also none, but nothing that is not
    `host[:port]`.

    Args:
        own: names of the server that need not be listed.
    """
    if not header:
        return "*" in patterns
    parts = _split_host_port(header)
    if parts is None:
        return False
    host = parts[0].removesuffix(".")
    return (
        host in own
        or host.endswith(".localhost")
        or _is_ip(host)
        or any(
            pattern in {"*", host} or (pattern.startswith("*.") and host.endswith(pattern[1:])) for pattern in patterns
        )
    )


def without_passwords(text: str) -> str:
    """The value of a setting, to be shown: a URL may hold passwords."""
    return re.sub(r"password=[^&]*", "password=…", re.sub(r"(/+).*@", r"\1…@", text))
