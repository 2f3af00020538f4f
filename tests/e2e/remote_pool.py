"""A workers' pool on TCP for tests: `tercet serve --role workers`, and what its clients need."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.harness import START_S, TERCET, Tercet, until
from tests.tls import Certificate


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free now."""
    for port in range(20000 + secrets.randbelow(8000), 32000, count):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", port + offset))
            return port
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free ports")


class Workers(Tercet):
    """A pool of workers on loopback TCP with TLS and a key, without a gateway.

    Attributes:
        pool_port: port of slot 0.
        key: the first key of the file.
    """

    def __init__(self, base: Path, num_slots: int = 2, *, is_alone: bool = True, **settings: str) -> None:
        """
        Args:
            is_alone: start no gateway.
        """
        base.mkdir(exist_ok=True)
        if is_alone:
            self.command = (*TERCET, "serve", "--role", "workers")
        self.num_slots = num_slots
        self.certificate = Certificate(base, "pool")
        self.key = secrets.token_hex(32)
        self.key_file = base / "pool-key"
        self.write_keys(self.key)
        self.pool_port = free_ports(num_slots)
        settings = {"models": f"embedded*{num_slots}", **self.certificate_settings, **settings}
        super().__init__(base, pool_bind=f"127.0.0.1:{self.pool_port}", pool_key=str(self.key_file), **settings)

    @property
    def certificate_settings(self) -> dict[str, str]:
        return {f"pool_{name}": value for name, value in self.certificate.settings.items()}

    @property
    def pool(self) -> str:
        """`TERCET_POOL` of a gateway."""
        ports = f"{self.pool_port}-{self.pool_port + self.num_slots - 1}"
        return f"embedded=https://localhost:{ports}"

    @property
    def gateway_settings(self) -> dict[str, str]:
        """Settings of a gateway that uses this pool."""
        ca = self.key_file.with_name("ca.pem")
        ca.write_bytes(self.certificate.authority_pem)
        return {"pool": self.pool, "pool_key": str(self.key_file), "pool_ca": str(ca), "models": ""}

    def write_keys(self, *keys: str) -> None:
        self.key_file.touch(mode=0o600)
        self.key_file.write_text("".join(f"{key}\n" for key in keys))

    def tcp(self, slot: int = 0, key: str | None = "") -> httpx.Client:
        """A client of a slot's port; without `key`, it sends the pool's, with None, none."""
        sent = self.key if key == "" else key
        headers = {} if sent is None else {"Authorization": f"Bearer {sent}"}
        url = f"https://localhost:{self.pool_port + slot}"
        return httpx.Client(
            base_url=url, headers=headers, verify=self.certificate.client(), trust_env=False, timeout=30
        )

    def wait_until_warm(self) -> list[dict[str, Any]]:
        def is_warm() -> bool:
            assert self.process.poll() is None, self.log()
            return "Every slot is warm" in self.log()

        until(is_warm, START_S, f"every slot warm; {self.log()[-3000:]}")
        return []


class Gateway(Tercet):
    """`tercet serve --role gateway` for a pool of `Workers`."""

    command = (*TERCET, "serve", "--role", "gateway")

    def wait_until_announced(self) -> None:
        until(lambda: (page := self.ready()) and page["status"] == "ready", START_S, f"ready; {self.log()[-3000:]}")
