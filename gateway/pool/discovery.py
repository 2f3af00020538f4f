"""The addresses of a host name, as they come and go: in a container network each worker has one.

Knows no slots. A name is asked for again every `INTERVAL_S`; what the resolver caches meanwhile is its own business.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

import structlog

INTERVAL_S = 2.0
MAX_SHOWN = 64  # addresses in a line of the log

# Addresses of a host name. Raises OSError if they cannot be found out now.
Resolver: TypeAlias = Callable[[str], frozenset[str]]
log = structlog.get_logger()


def resolve(host: str) -> frozenset[str]:
    """The IPv4 addresses of a name; its IPv6 addresses if it has no others. A worker that has both is one slot.

    Raises:
        OSError: no resolver answers, or the name has no address.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    by_family = {
        family: frozenset(str(address[0]) for each, _, _, _, address in found if each == family)
        for family in (socket.AF_INET, socket.AF_INET6)
    }
    return by_family[socket.AF_INET] or by_family[socket.AF_INET6]


class Discovery:
    """Calls a function with a host's addresses: first when they are found, then after each change; again while it
    raises `RuntimeError`.

    A name is looked up in a thread of its own until the process exits; an IP address needs none.
    """

    def __init__(
        self,
        host: str,
        on_change: Callable[[frozenset[str]], None],
        resolver: Resolver = resolve,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._host = host
        self._on_change = on_change
        self._resolver = resolver
        self._interval_s = interval_s
        self._addresses: frozenset[str] = frozenset()
        self._is_failing = False
        try:
            ipaddress.ip_address(host)
        except ValueError:
            threading.Thread(target=self._follow, name=f"discovery-{host}", daemon=True).start()
        else:
            on_change(frozenset({host}))

    def _follow(self) -> None:
        while True:
            self._look_up()
            time.sleep(self._interval_s)

    def _look_up(self) -> None:
        try:
            addresses = self._resolver(self._host)
        # A resolver that fails says nothing of the workers: those that are known stay.
        except (OSError, UnicodeError) as error:
            if not self._is_failing:
                log.warning(
                    "host_not_resolved", host=self._host, reason=str(error), num_addresses_kept=len(self._addresses)
                )
            self._is_failing = True
            return
        self._is_failing = False
        if addresses and addresses != self._addresses:
            shown = sorted(addresses)[:MAX_SHOWN]
            try:
                self._on_change(addresses)
            except RuntimeError as error:  # no thread can be started now
                log.error("addresses_not_used", host=self._host, reason=str(error))
            else:
                self._addresses = addresses
                log.info("addresses_changed", host=self._host, addresses=shown, num_addresses=len(addresses))
