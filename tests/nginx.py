"""Runs nginx with `deploy/supervision/nginx.conf` on free ports."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.harness import ROOT, free_port, until


@contextmanager
def nginx(
    base: Path,
    upstream_port: int | Sequence[int],
    changes: Mapping[str, str] | None = None,
    port: int | None = None,
    text: str | None = None,
) -> Iterator[int]:
    """Yields its port.

    Args:
        base: a directory for its files.
        upstream_port: port of the gateway, or ports of several gateways.
        changes: texts of the configuration to replace; each must be there.
        port: None: a free one.
        text: a configuration made of that file, in which only `changes` are replaced.
    """
    port = free_port() if port is None else port
    ports = [upstream_port] if isinstance(upstream_port, int) else upstream_port
    line = "server 127.0.0.1:8000 max_fails=1 fail_timeout=5s;"
    addresses = {
        line: "\n".join(line.replace("8000", str(each)) for each in ports),
        "127.0.0.1:8080": f"127.0.0.1:{port}",
    }
    replaced = {**({} if text else addresses), **(changes or {})}
    text = text or (ROOT / "deploy/supervision/nginx.conf").read_text()
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    config = base / "nginx.conf"
    config.write_text(text)
    command = ["nginx", "-c", str(config), "-p", str(base), "-e", str(base / "error.log"), "-g"]
    options = f"daemon off; pid {base}/nginx.pid;"
    with subprocess.Popen([*command, options]) as process:
        try:
            until(lambda: _answers(port), 10, "nginx")
            yield port
        finally:
            process.terminate()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
