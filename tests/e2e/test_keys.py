"""API keys on a running instance: the command line, the wire, revoking without a restart, an unreadable file."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import httpx
import pytest

from shared.api_keys import new_key, read_keys, revoke_key
from tests.e2e.harness import PATIENCE_S, Tercet, serving, until
from tests.e2e.shared_servers import SharedServer

pytestmark = pytest.mark.quick
CANARY = "tct_canary-that-is-not-valid"


@pytest.fixture
def tercet(keyed: SharedServer) -> SharedServer:
    return keyed


def status(tercet: Tercet, key: str) -> int:
    body = {"context": "The sea", "length": 2}
    return tercet.client.post("/autocomplete", json=body, headers={"x-api-key": key}).status_code


@pytest.mark.parametrize("framing", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("path", ["/autocomplete", "/v1/completions", "/nothing"])
def test_without_a_valid_key_no_body_is_read(tercet: Tercet, key: str, path: str, framing: str) -> None:
    """400 connections that announced 1 MB each delayed the bodies of a key by seconds."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{framing}\r\nExpect: 100-continue\r\n"
    for field, begins in (
        ("", b"HTTP/1.1 401 "),
        (f"x-api-key: {CANARY}\r\n", b"HTTP/1.1 401 "),
        (f"x-api-key: {key}\r\n", b"HTTP/1.1 100 "),
    ):
        with socket.create_connection(("127.0.0.1", tercet.port), timeout=10) as sock:
            sock.sendall(f"{head}{field}\r\n".encode())
            answer = sock.recv(1 << 16)
            assert answer.startswith(begins)
            if begins.endswith(b"401 "):
                assert b"\r\nConnection: close\r\n" in answer
                assert (b'"error":' in answer) == path.startswith("/v1/")
                assert sock.recv(1) == b""


def test_the_command_line_sends_its_key_and_the_pools_do_not_have_it(tercet: Tercet, key: str) -> None:
    done = tercet.run("complete", "The old man", "--length", "4", "-n", "1", "--json", TERCET_API_KEY=key)
    assert done.returncode == 0, done.stderr
    assert '"sentences"' in done.stdout
    for wrong, reason in (("", "requires an API key"), (CANARY, "unknown or revoked")):
        refused = tercet.run("complete", "The old man", TERCET_API_KEY=wrong)
        assert refused.returncode == 1
        assert reason in refused.stderr
        assert "TERCET_API_KEY" in refused.stderr
        assert CANARY not in refused.stdout + refused.stderr
    processes = tercet.processes()
    assert "TERCET_API_KEY" in processes["serve"][0].environ()
    for role in ("gateway", "workers"):
        assert len(processes[role]) == 2
        for process in processes[role]:
            assert "TERCET_API_KEY" not in process.environ()


def test_keys_are_added_and_revoked_without_a_restart(tercet: Tercet, key_path: Path) -> None:
    done = tercet.run("key", "new", "later", "--rate", "3")
    later = done.stdout.strip()
    until(lambda: status(tercet, later) == 200, PATIENCE_S, "the new key is valid")
    assert [status(tercet, later) for _ in range(4)][2:] == [429, 429]
    second = tercet.run("key", "new", "second").stdout.strip()
    until(lambda: status(tercet, second) == 200, PATIENCE_S, "the second key is valid")
    [record] = [record for record in read_keys(key_path) if record.name == "second"]
    assert tercet.run("key", "revoke", record.id).returncode == 0
    until(lambda: status(tercet, second) == 401, PATIENCE_S, "the revoked key is refused")


def test_a_key_file_that_cannot_be_read_holds_neither_a_request_nor_a_stop(short_tmp_path: Path) -> None:
    """A FIFO in its place: to open it would take without end."""
    path = short_tmp_path / "keys"
    (key, _), (revoked, record) = (new_key(path, name) for name in ("kept", "revoked"))
    tercet = Tercet(short_tmp_path / "t", keys=str(path), api_key=key, grace_s="20")

    def replace_by_fifo() -> bytes:
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path, 0o600)
        until(lambda: len(tercet.events("files_not_read")) > num_logged, 10, "the FIFO noticed")
        return content

    with serving(tercet):
        num_logged = 0
        content = replace_by_fifo()
        tercet.client.timeout = httpx.Timeout(10)
        assert [status(tercet, each) for each in (key, revoked)] == [200, 200]
        tercet.process.send_signal(signal.SIGHUP)
        until(lambda: len(tercet.events("reload_finished")) >= 2, 30, "the reload finished")
        refused = [event for event in tercet.events("reload_finished") if event["role"] == "gateway"]
        assert [event["outcome"] for event in refused] == ["failed"]
        assert "not a regular file" in refused[0]["reason"]
        assert status(tercet, key) == 200
        path.unlink()
        path.touch(0o600)
        path.write_bytes(content)
        revoke_key(path, record.id)
        until(lambda: status(tercet, revoked) == 401, 10, "the revoked key refused")
        num_logged = len(tercet.events("files_not_read"))
        replace_by_fifo()
        assert status(tercet, key) == 200
        began_at = time.monotonic()
        assert tercet.stop() == 0
        assert time.monotonic() - began_at < 15  # the grace is 20 s
    done = tercet.run("serve")
    assert done.returncode == 1
    assert "not a regular file" in done.stderr
