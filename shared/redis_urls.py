"""URLs of Redis: one server (`redis://`), or the primary that Sentinels name (`redis+sentinel://`).

Knows what such a URL says, and no client of Redis.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

REDIS_SCHEMES = frozenset({"redis", "rediss", "redis+sentinel", "rediss+sentinel"})
REDIS_FORMS = (
    "redis://user:password@host:port/db (or rediss://), all but the host optional, or "
    "redis+sentinel://user:password@host:port,host:port/name/db (or rediss+sentinel://)"
)
SENTINEL_PORT = 26379
# A host's name or address, IPv6 in brackets. `\d` would match the digits of every script.
HOST = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}|\[[0-9A-Fa-f:.]{2,45}\]"
HOST_PORT = re.compile(rf"(?P<host>{HOST})(:(?P<port>[0-9]{{1,5}}))?")
_DATABASE = re.compile(r"(/[0-9]{0,4})?")
# The name that the Sentinels have for the primary, and the database.
_SERVICE = re.compile(r"/(?P<name>[A-Za-z0-9._-]{1,100})(?P<database>(/[0-9]{0,4})?)")
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """What a URL says.

    Attributes:
        url: as redis-py takes it. With Sentinels, its host is the first of them, and all else is of the primary.
        addresses: host and port of the server, or of each Sentinel.
        service: the name that the Sentinels have for the primary; "" without Sentinels.
        sentinel_login: username and password for the Sentinels, as far as they are given.
    """

    url: str
    addresses: tuple[tuple[str, int], ...]
    service: str = ""
    sentinel_login: tuple[tuple[str, str], ...] = ()


def parse_redis_url(text: str) -> RedisUrl:
    """What a URL with one of the schemes says.

    Raises:
        ValueError: it is no URL of Redis. The message completes "NAME='text' …".
    """
    parts = urlsplit(text)
    scheme, _, kind = parts.scheme.partition("+")
    login, at, hosts = parts.netloc.rpartition("@")
    if not kind:
        if HOST_PORT.fullmatch(hosts) is None or not _DATABASE.fullmatch(parts.path):
            raise ValueError(f"must be {REDIS_FORMS}")
        return RedisUrl(text, (_address(hosts, 6379),))
    service = _SERVICE.fullmatch(parts.path)
    if service is None:
        raise ValueError(
            "must name the primary that the Sentinels watch, and may name a database, after the hosts: "
            f"{parts.scheme}://host:{SENTINEL_PORT},host:{SENTINEL_PORT}/mymaster/0"
        )
    addresses = tuple(_address(host.strip(), SENTINEL_PORT) for host in hosts.split(","))
    options = parse_qsl(parts.query, keep_blank_values=True)
    query = urlencode([option for option in options if option[0] not in _SENTINEL_OPTIONS])
    url = f"{scheme}://{login}{at}{hosts.split(',')[0].strip()}{service['database']}" + (f"?{query}" if query else "")
    sentinel_login = tuple((_SENTINEL_OPTIONS[name], value) for name, value in options if name in _SENTINEL_OPTIONS)
    return RedisUrl(url, addresses, service["name"], sentinel_login)


def _address(text: str, default_port: int) -> tuple[str, int]:
    match = HOST_PORT.fullmatch(text)
    port = default_port if match is None or match["port"] is None else int(match["port"])
    if match is None or not 0 < port < 65536:
        raise ValueError(f"has {text!r} where a host, or host:port with a port from 1 to 65535, must be")
    return match["host"].strip("[]"), port
