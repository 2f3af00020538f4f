"""S3, S5, S15: limits of what a client may send, private sockets, and requests whose framing is in doubt."""

from __future__ import annotations

import json
import random
import secrets
import socket
import stat
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import httptools
import psutil

from tests.chaos.http_client import PROBLEM_JSON, Answer, Endpoint, ResponseReader, exchange, request_bytes
from tests.chaos.measure import Context, Findings
from tests.e2e.harness import Tercet

MAX_BODY_BYTES = 1 << 20  # TERCET_MAX_BODY_BYTES
# gunicorn's limits: of a request line without its end, and of one header field and their number.
MAX_REQUEST_LINE_BYTES, MAX_FIELD_BYTES, MAX_FIELDS = 4094, 8190, 100
UPLOAD_BYTES = 1 << 30
MAX_READ_BYTES = 64 << 10


def refuse_above_limits(context: Context, findings: Findings) -> None:
    """S3. Each limit at its value and one above; then an upload of 1 GB."""
    tercet, endpoint = context.shared()
    cases = _limit_cases()
    wrong = Counter[str]()
    for name, data, expected in cases:
        answer = exchange(endpoint, data, timeout_s=10.0)
        if answer.status != expected:
            wrong[f"{name}: {answer.status or answer.body.decode()} instead of {expected}"] += 1
        elif expected >= 400 and not _is_problem(answer):
            wrong[f"{name}: {expected} that is not problem+json"] += 1
    findings.figures["cases"] = len(cases)
    findings.none_of("wrong answers", dict(wrong))
    num_sent, answer = _upload(endpoint, tercet)
    findings.require(answer.status == 413 and _is_problem(answer), f"the upload of 1 GB was answered {answer.status}")
    findings.at_most("bytes of a 1 GB upload that the gateway read", num_sent, MAX_READ_BYTES)


def _limit_cases() -> list[tuple[str, bytes, int]]:
    """(name, request, status) of each limit."""
    post = b"POST /autocomplete HTTP/1.1\r\nHost: localhost\r\n"
    live = "/health/live"
    at_line = MAX_REQUEST_LINE_BYTES - len(f"GET {live}? HTTP/1.1")
    tail = "," + '"context": "a", "length": 1}'

    def body_of(size: int) -> bytes:
        return b'{"n_samples": 1' + b" " * (size - 15 - len(tail)) + tail.encode()

    def fields(number: int) -> dict[str, str]:  # besides Host
        return {f"X-{index}": "y" for index in range(number)}

    def completion(**more: object) -> bytes:
        return request_bytes("POST", "/autocomplete", json.dumps({"context": "a", "length": 1, **more}).encode())

    return [
        ("no length", post + b"\r\n", 411),
        ("chunked", post + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        ("body at its limit", request_bytes("POST", "/autocomplete", body_of(MAX_BODY_BYTES)), 200),
        ("body above its limit", request_bytes("POST", "/autocomplete", body_of(MAX_BODY_BYTES + 1)), 413),
        ("request line at its limit", request_bytes("GET", f"{live}?{'x' * at_line}"), 200),
        ("request line above its limit", request_bytes("GET", f"{live}?{'x' * (at_line + 1)}"), 414),
        ("fields at their limit", request_bytes("GET", live, headers=fields(MAX_FIELDS - 1)), 200),
        ("fields above their limit", request_bytes("GET", live, headers=fields(MAX_FIELDS)), 431),
        ("a field far above its limit", request_bytes("GET", live, headers={"X": "y" * (MAX_FIELD_BYTES + 1)}), 431),
        ("n_samples at its limit", completion(n_samples=8), 200),
        ("n_samples above its limit", completion(n_samples=9), 422),
        ("length above its limit", completion(length=257), 422),
        ("temperature at its limit", completion(temperature=5), 200),
        ("temperature above its limit", completion(temperature=5.001), 422),
        ("max_time above its limit", completion(max_time=31), 422),
        ("session at its limit", completion(session="s" * 128), 200),
        ("session above its limit", completion(session="s" * 129), 422),
        ("stop at its limit", completion(stop=["§"] * 8), 200),
        ("stop above its limit", completion(stop=["§"] * 9), 422),
        ("seed above its limit", completion(seed=2**63), 422),
    ]  # fmt: skip


def _upload(endpoint: Endpoint, tercet: Tercet) -> tuple[int, Answer]:
    """Send 1 GB until the connection is closed; how much of it the gateway read, and its answer.

    What is sent and not read waits in the kernel: in this process's socket (SIOCOUTQ) or in the gateway's. Both are in
    /proc/net/tcp, and they are subtracted while the connection is open.
    """
    reader, started_at, num_sent, num_read = ResponseReader(), time.monotonic(), 0, 0
    with endpoint.connect_tcp(5.0) as client:
        client.sendall(request_bytes("POST", "/autocomplete", b"x")[:-1].replace(
            b"Content-Length: 1\r\n", f"Content-Length: {UPLOAD_BYTES}\r\n".encode()
        ))  # fmt: skip
        client.setblocking(False)
        while time.monotonic() - started_at < 10:
            with suppress(BlockingIOError):
                num_sent += client.send(b"x" * min(16384, UPLOAD_BYTES - num_sent))
            waiting = _waiting_bytes(client, endpoint.port)
            if waiting is not None:
                num_read = max(num_read, num_sent - waiting)
            try:
                data = client.recv(65536)
                if not data:
                    break
                reader.feed(data)
            except BlockingIOError:
                time.sleep(0.01)
            except (OSError, httptools.HttpParserError):
                break
    return num_read, Answer(reader.status, reader.headers, reader.body, started_at, time.monotonic())


def _waiting_bytes(client: socket.socket, port: int) -> int | None:
    """Bytes that were sent and that the server has not read; None unless both ends are established."""
    own = client.getsockname()[1]
    found = []
    with open("/proc/net/tcp") as table:
        for line in table:
            fields = line.split()
            if fields[0] == "sl" or fields[3] not in {
                "01",
                "04",
                "05",
                "08",
            }:  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT
                continue
            ends = int(fields[1].partition(":")[2], 16), int(fields[2].partition(":")[2], 16)
            sending, _, receiving = fields[4].partition(":")
            if ends == (own, port):
                found.append(int(sending, 16))
            elif ends == (port, own):
                found.append(int(receiving, 16))
    return sum(found) if len(found) == 2 else None


def _is_problem(answer: Answer) -> bool:
    return answer.headers.get("content-type", "").partition(";")[0] == PROBLEM_JSON


def listen_privately(context: Context, findings: Findings) -> None:
    """S5. The kernel's own list of listeners, and the sockets' modes."""
    tercet, _ = context.shared()
    processes = tercet.processes()
    workers = {process.pid for process in processes["workers"]}
    everything = {process.pid for group in processes.values() for process in group}
    listed = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    ports = Counter[str]()
    for line in listed:
        owners = {int(part.partition(",")[0]) for part in line.split("pid=")[1:]}
        if owners & workers:
            findings.shortfalls.append(f"a worker listens on TCP: {line.split()[3]}")
        if owners & everything:
            ports[line.split()[3]] += 1
    findings.figures["TCP listeners"] = ", ".join(ports)
    findings.require(list(ports) == [f"127.0.0.1:{tercet.port}"], f"the instance listens on {list(ports)}")
    sockets = [path for path in tercet.run_dir.iterdir() if stat.S_ISSOCK(path.lstat().st_mode)]
    modes = {oct(stat.S_IMODE(path.lstat().st_mode)) for path in sockets}
    findings.figures |= {"Unix sockets": len(sockets), "their modes": ", ".join(sorted(modes))}
    findings.require(len(sockets) == 2 and modes == {"0o600"}, f"{len(sockets)} sockets have the modes {modes}")
    mode = oct(stat.S_IMODE(tercet.run_dir.lstat().st_mode))
    findings.require(mode == "0o700", f"the run directory has the mode {mode}")


class FramingCase(NamedTuple):
    name: str
    data: bytes
    may_serve: bool  # the first request is valid, and what follows is not


def close_on_ambiguous_framing(context: Context, findings: Findings) -> None:
    """S15. Each case has a canary; afterwards no log at level debug may have it, and no process may dump core."""
    tercet, endpoint = context.shared(is_tls=False, log="debug")
    canary = f"CANARY{secrets.token_hex(8)}"
    cases = _framing_cases(canary)
    rng = random.Random(context.seed)
    cases += [_fuzzed_case(rng, canary) for _ in range(context.amount(50, 1000))]
    wrong = Counter[str]()
    with_open = Counter[str]()
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda case: _responses(endpoint, case.data), cases))
    for case, (answers, is_closed) in zip(cases, found, strict=True):
        for number, answer in enumerate(answers):
            if answer.status >= 500 or (answer.status >= 400 and not _is_problem(answer)):
                wrong[f"{case.name}: {answer.status}"] += 1
            if canary.encode() in answer.body:
                wrong[f"{case.name}: the body is repeated in the answer"] += 1
            if answer.status == 200 and (number > 0 or not case.may_serve):
                wrong[f"{case.name}: response {number} is 200"] += 1
        if not answers:
            wrong[f"{case.name}: no answer"] += 1
        if not is_closed:
            with_open[case.name] += 1
    findings.figures["cases"] = len(cases)
    findings.none_of("wrong answers", dict(wrong))
    findings.none_of("connections left open", dict(with_open))
    log = tercet.log()
    findings.require('"level": "debug"' in log or '"level":"debug"' in log, "the log has no line at level debug")
    findings.at_most("canaries in the log", log.count(canary), 0)
    dumping = [
        process.pid
        for role in ("gateway", "workers")
        for process in tercet.processes()[role][1:]
        if process.rlimit(psutil.RLIMIT_CORE)[0] != 0
    ]
    findings.require(not dumping, f"processes {dumping} may dump core")


def _framing_cases(canary: str) -> list[FramingCase]:
    prompt = json.dumps({"context": canary, "length": 1}).encode()
    size = str(len(prompt)).encode()
    post = b"POST /autocomplete HTTP/1.1\r\nHost: localhost\r\n"
    length = b"Content-Length: "

    def with_fields(name: str, *fields: bytes, may_serve: bool = False) -> FramingCase:
        return FramingCase(name, post + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + prompt, may_serve)

    whole = post + length + size + b"\r\n\r\n" + prompt
    chunked = b"Transfer-Encoding: chunked\r\n"
    smuggled = f"GET /{canary} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    return [
        with_fields("length too short", length + str(len(prompt) - 12).encode()),
        with_fields("length 0 with a body", length + b"0"),
        with_fields("two lengths", length + size, length + b"0"),
        with_fields("two equal lengths", length + size, length + size),
        with_fields("a list of lengths", length + size + b", 0"),
        with_fields("length and chunks", length + size, b"Transfer-Encoding: chunked"),
        with_fields("chunks and length", b"Transfer-Encoding: chunked", length + size),
        with_fields("chunks and identity", b"Transfer-Encoding: identity, chunked", length + size),
        with_fields("an unknown coding", b"Transfer-Encoding: x" + canary.encode(), length + size),
        with_fields("a signed length", length + b"+" + size),
        with_fields("a negative length", length + b"-1"),
        with_fields("a length in hexadecimal", length + hex(len(prompt)).encode()),
        with_fields("a length with an underscore", length + b"1_0"),
        with_fields("a space before the colon", b"Content-Length : " + size),
        with_fields("a folded length", length.strip() + b"\r\n " + size),
        with_fields("a length after a bare line feed", b"X: y\nContent-Length: " + size),
        with_fields("NUL in a field", b"X: " + b"\0" + canary.encode(), length + size),
        FramingCase("text after the body", whole + canary.encode() + b"\r\n\r\n", True),
        FramingCase("a request line of the body", canary.encode() + b" / HTTP/1.1\r\n\r\n", False),
        FramingCase("smuggled after length 0", post + length + b"0\r\n" + chunked + b"\r\n0\r\n\r\n" + smuggled, False),
        FramingCase("bare line feeds", whole.replace(b"\r\n", b"\n") + b"\r\n\r\n", False),
    ]  # fmt: skip


def _fuzzed_case(rng: random.Random, canary: str) -> FramingCase:
    """A request whose declared length is wrong, whose body ends in something else than a request."""
    prompt = json.dumps({"context": canary + "x" * rng.randrange(200), "length": 1}).encode()
    declared = rng.randrange(len(prompt))
    rest = rng.choice((b"", b"\r\n", b"\r\n\r\n", canary.encode() + b"\r\n\r\n", b" HTTP/1.1\r\n\r\n"))
    fields = [b"Host: localhost", b"Content-Length: %d" % declared]
    if rng.random() < 0.3:
        fields.append(rng.choice((b"Transfer-Encoding: chunked", b"Content-Length: 3", b"Connection: keep-alive")))
    rng.shuffle(fields)
    head = b"POST /autocomplete HTTP/1.1\r\n" + b"\r\n".join(fields) + b"\r\n\r\n"
    return FramingCase("fuzz", head + prompt + rest, False)


def _responses(endpoint: Endpoint, data: bytes) -> tuple[list[Answer], bool]:
    """All responses to these bytes, and whether the server then closed the connection."""
    answers: list[Answer] = []
    started_at = time.monotonic()
    received = b""
    with endpoint.connect_tcp(4.0) as client:
        client.sendall(data)
        client.settimeout(1.0)
        is_closed = False
        try:
            while chunk := client.recv(65536):
                received += chunk
            is_closed = True
        except TimeoutError:
            # The rest may look like the start of another request: its end must not be waited for without limit, and
            # once this side ends it, the server must close.
            client.shutdown(socket.SHUT_WR)
            with suppress(OSError):
                while chunk := client.recv(65536):
                    received += chunk
                is_closed = True
        except OSError:
            is_closed = True
    while received:
        reader = ResponseReader()
        end = received.find(b"\r\n\r\n")
        # A response at a time: the parser would refuse bytes after a response that closes the connection.
        size = _response_bytes(received, end)
        with suppress(httptools.HttpParserError):
            reader.feed(received[:size])
        answers.append(Answer(reader.status, reader.headers, reader.body, started_at, time.monotonic()))
        received = received[size:]
    return answers, is_closed


def _response_bytes(received: bytes, head_end: int) -> int:
    """Length of the first response; every response here has a Content-Length."""
    for line in received[:head_end].split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return head_end + 4 + int(value)
    return len(received)
