"""`tercet bench remote`: what the way to the workers costs: Unix socket, TCP, TLS, or a pool that already runs.

Each way has a gateway of its own. The answers are those of `tercet bench cost`, as small as they get, at a load of many
clients, and the workload W from one client. All ways take turns in each round, on one machine.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
from rich.console import Console
from rich.table import Table

from deploy.bench.harness.load import Load
from deploy.bench.speed.cost import BODY, NOTES, PATH, PREPARED_PER_S, PROMPT_TOKENS, QUICK_SECONDS, SECONDS
from deploy.load.clients import LOOPBACK, Reply, raise_for_status
from deploy.load.contender_process import ContenderProcess
from deploy.load.options import Options
from deploy.load.report import Document, format_number
from deploy.load.rounds import Contender, interleave
from deploy.load.run import progress
from deploy.load.server import Server, free_port
from shared.errors import StartError

NUM_CLIENTS = 16
NUM_W = 8  # requests of W per turn
# Two gateways share each worker's batch here: each may use half of it.
MAX_BATCH = 2 * 3 * NUM_CLIENTS


class RemoteCost(msgspec.Struct, frozen=True):
    """Medians over the rounds, of one way to the workers. `workers_ms` is None where they are not this run's."""

    way: str
    gateway_ms: float  # CPU time per answer
    workers_ms: float | None
    w_ms: float  # latency of W
    answers_per_s: float


@dataclass(frozen=True, slots=True)
class _Way:
    name: str
    gateway: Server
    workers: Server | None


class RemoteBench:
    """One run. `run` fills the document."""

    def __init__(self, options: Options, ray: tuple[str, Path | None] | None, console: Console) -> None:
        """
        Args:
            ray: the URL of a pool that already runs, and the file of its key.
        """
        self._options = options
        self._ray = ray
        self._console = console

    def run(self, document: Document) -> None:
        """
        Raises:
            StartError: a server does not get warm, or a request failed.
        """
        options = self._options
        with ExitStack() as stack:
            turns = [
                turn
                for way in self._start(stack)
                for turn in (self._cost(stack, way), self._latency(stack, way))
            ]  # fmt: skip
            with progress(self._console, "Rounds", (options.num_rounds + 1) * len(turns)) as on_turn:
                results = interleave(turns, options.num_rounds, on_turn)
        document.not_measured |= results.failures
        names = [turn.name.partition(".")[0] for turn in turns if turn.name.endswith(".gateway")]
        document.rows = [_row(name, results.samples) for name in names if f"{name}.gateway" in results.samples]
        document.notes += [
            *NOTES,
            f"Answers per second and CPU time: {NUM_CLIENTS} clients. W: one client. A batch of {MAX_BATCH}.",
        ]

    def _start(self, stack: ExitStack) -> list[_Way]:
        """Two workers with a gateway each, one port with TLS and one without, and a gateway for each further way."""
        directory = Path(tempfile.mkdtemp(prefix="tercet-bench-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        key = directory / "key"
        key.touch(0o600)
        key.write_text(f"{secrets.token_hex(32)}\n")
        tls = _make_certificate(directory)
        settings = {**self._options.server_settings, "max_batch": str(MAX_BATCH)}
        model = self._options.models
        ways: list[_Way] = []
        for name, scheme, worker_files, gateway_files in (
            ("TCP", "http", {}, {}),
            ("TLS", "https", tls, {"pool_ca": tls["pool_tls_cert"]}),
        ):
            bind = f"{LOOPBACK}:{free_port()}"
            listening = {"pool_bind": bind, "pool_key": str(key), **worker_files}
            workers = stack.enter_context(Server(model, {**settings, **listening}))
            if not ways:
                ways.append(_Way("Unix socket", workers, workers))
            remote = {"pool": f"{model}={scheme}://{bind}", "pool_key": str(key), **gateway_files}
            ways.append(_Way(name, stack.enter_context(Server("", {**settings, **remote}, role="gateway")), workers))
        if self._ray is not None:
            url, key_file = self._ray
            remote = {"pool": f"{model}={url}", **({"pool_key": str(key_file)} if key_file else {"insecure": "1"})}
            ways.append(
                _Way("Ray Serve", stack.enter_context(Server("", {**settings, **remote}, role="gateway")), None)
            )
        return ways

    def _cost(self, stack: ExitStack, way: _Way) -> Contender:
        options = self._options
        seconds = QUICK_SECONDS if options.is_quick else SECONDS
        clients = stack.enter_context(
            ContenderProcess(
                "deploy.bench.harness.load:LoadClients",
                LOOPBACK, way.gateway.port, PATH, BODY, options.subject(), PROMPT_TOKENS, way.gateway.port,
            )
        )  # fmt: skip

        def measure() -> Mapping[str, Sequence[float]]:
            clients.call("prepare", int(PREPARED_PER_S * seconds))
            before = way.gateway.cpu_s()
            workers_before = None if way.workers is None else way.workers.cpu_s()
            load: Load = clients.call("send_for", NUM_CLIENTS, seconds)
            used_s = way.gateway.cpu_s()["gateway"] - before["gateway"]
            samples = {
                f"{way.name}.gateway": [1e3 * used_s / load.num_answers],
                f"{way.name}.answers": [load.num_answers / load.elapsed_s],
            }
            if way.workers is not None and workers_before is not None:
                used_s = way.workers.cpu_s()["workers"] - workers_before["workers"]
                samples[f"{way.name}.workers"] = [1e3 * used_s / load.num_answers]
            return samples

        return Contender(f"{way.name}.gateway", f"{way.name}, {NUM_CLIENTS} clients", measure)

    def _latency(self, stack: ExitStack, way: _Way) -> Contender:
        options = self._options
        clients = stack.enter_context(
            ContenderProcess(
                "deploy.load.clients:Clients",
                LOOPBACK, way.gateway.port, options.subject(), options.workload, way.gateway.port + 1, {},
            )
        )  # fmt: skip

        def measure() -> Mapping[str, Sequence[float]]:
            replies: list[Reply] = clients.call("send_new", 1 if options.is_quick else NUM_W)
            return {f"{way.name}.w": [reply.wall_ms for reply in raise_for_status(replies)]}

        return Contender(f"{way.name}.w", f"{way.name}, W", measure)


def remote_table(rows: Sequence[RemoteCost]) -> Table:
    """One row per way, with ratios to the first."""
    table = Table(title=f"The way to the workers: CPU time per answer, W, answers per second at {NUM_CLIENTS} clients")
    for heading in ("way", "gateway, ms", "", "workers, ms", "", "W, ms", "", "answers/s", ""):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in rows:
        cells = [row.way]
        for name in ("gateway_ms", "workers_ms", "w_ms", "answers_per_s"):
            value, first = getattr(row, name), getattr(rows[0], name)
            cells += ["", ""] if value is None else [format_number(value), f"{value / first:.2f}×"]
        table.add_row(*cells)
    return table


def _row(name: str, samples: Mapping[str, Sequence[float]]) -> RemoteCost:
    middle = {
        series: round(median(samples[f"{name}.{series}"]), 3) if f"{name}.{series}" in samples else None
        for series in ("gateway", "workers", "w", "answers")
    }
    return RemoteCost(
        name, middle["gateway"] or 0.0, middle["workers"], middle["w"] or 0.0, middle["answers"] or 0.0
    )  # fmt: skip


def _make_certificate(directory: Path) -> dict[str, str]:
    """Settings of workers with a certificate for the loopback interface, which is its own authority.

    Raises:
        StartError: openssl is missing, or fails.
    """
    cert, key = directory / "tls.crt", directory / "tls.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=tercet", "-addext", f"subjectAltName=IP:{LOOPBACK}"]
    try:
        subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise StartError(f"The certificate of the TLS workers could not be made with openssl: {error}") from error
    return {"pool_tls_cert": str(cert), "pool_tls_key": str(key)}
