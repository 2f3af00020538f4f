"""What a pool has before it starts: who may use it, its socket, a current slot plan, an end with its users."""

from __future__ import annotations

import os
import re
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shared.api_keys import new_key
from shared.errors import StartError
from shared.extras import install_command
from shared.masters.run_directory import prepare_run_directory
from shared.masters.startup import (
    check_access,
    check_address_free,
    check_pool_port,
    listen,
    read_or_make_plan,
    server_tls,
)
from shared.plan import Plan, make_slots, plan_inputs, write_plan
from shared.setting_values import Address, ModelSpec
from shared.settings import Settings
from tests.e2e.harness import ROOT, free_port
from tests.settings import make_settings
from tests.tls import Certificate
from tests.workers.helpers import run_python


def test_an_address_in_use_is_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = Address("127.0.0.1", listener.getsockname()[1])
        with pytest.raises(StartError, match="set TERCET_BIND to another host:port"):
            check_address_free(address)
    check_address_free(address)


def test_a_current_plan_is_read_and_a_stale_one_refused_where_no_other_can_be_made(tmp_path: Path) -> None:
    """Making a plan needs the model; one that does not exist shows that no plan was made."""
    settings = make_settings(run_dir=tmp_path / "r", devices=("cpu",), models=(ModelSpec("mine", "/nonexistent"),))
    run_path = prepare_run_directory(settings)
    plan = Plan(plan_inputs(settings, {}), [], make_slots(["cpu"], [("mine", 2)], run_path, settings.pool.max_batch))
    write_plan(plan, run_path)
    assert read_or_make_plan(settings, {}) == plan
    with pytest.raises(StartError, match="plan could not be made"):
        read_or_make_plan(
            make_settings(settings, max_batch=3), {"TERCET_MODELS": "mine=/nonexistent", "TERCET_DEVICES": "cpu"}
        )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "::", "192.0.2.7", "write.example"])
def test_an_address_beyond_loopback_needs_keys_or_a_permission(tmp_path: Path, host: str) -> None:
    path = tmp_path / "keys"
    new_key(path, "n")
    for keys, insecure in ((path, False), (None, True), (path, True)):
        check_access(make_settings(bind=Address(host, 8000), keys=keys, insecure=insecure))
    settings = make_settings(bind=Address(host, 8000))
    if host in {"127.0.0.1", "localhost", "::1"}:
        check_access(settings)
        return
    with pytest.raises(StartError) as caught:
        check_access(settings)
    for part in (str(settings.server.bind), "TERCET_KEYS", "TERCET_INSECURE=1", "--insecure"):
        assert part in str(caught.value)


def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    settings = make_settings(keys=tmp_path / "keys")
    with pytest.raises(StartError, match="cannot be read"):
        check_access(settings)
    (tmp_path / "keys").touch(0o600)
    check_access(settings)
    (tmp_path / "keys").write_text("not a key\n")
    with pytest.raises(StartError, match="Line 1"):
        check_access(settings)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        *((f"{scheme}://localhost:6379/0", "redis", "redis") for scheme in ("redis", "rediss")),
        ("redis+sentinel://:password@localhost/mymaster", "redis", "redis"),
        ("dynamodb://jobs?region=eu-central-1", "boto3", "dynamodb"),
    ],
)
def test_a_store_without_its_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str
) -> None:
    settings = Settings.load({"TERCET_JOBS": url})
    check_access(settings)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StartError, match=rf"Python package {module}, .*: {re.escape(install_command(extra))}$"):
        check_access(settings)
    check_access(Settings())


def test_tls_files_must_be_a_readable_pair(tmp_path: Path) -> None:
    pair, other, encrypted = (Certificate(tmp_path, name) for name in ("tls", "other", "encrypted"))
    cert, key, other_key, encrypted_key = pair.cert, pair.key, other.key, encrypted.key
    encrypted.encrypt_key("sesame")
    check_access(make_settings(tls_cert=cert, tls_key=key))
    assert server_tls(cert, key).context.minimum_version == ssl.TLSVersion.TLSv1_2
    (tmp_path / "empty").touch()
    for wrong_cert, wrong_key, message in (
        (cert, None, "belong together"),
        (None, key, "belong together"),
        (cert, tmp_path / "missing", "missing cannot be read .No such file"),
        (tmp_path / "missing", key, "missing cannot be read .No such file"),
        (cert, tmp_path, "cannot be read .Is a directory"),
        (cert, other_key, "are not a certificate and its unencrypted private key"),
        (key, cert, "are not a certificate"),
        (cert, tmp_path / "empty", "are not a certificate"),
        (cert, encrypted_key, "are not a certificate"),
    ):
        with pytest.raises(StartError, match=message):
            check_access(make_settings(tls_cert=wrong_cert, tls_key=wrong_key))


LISTEN = """
import os
from shared.errors import StartError
from shared.extras import install_command
from shared.setting_values import Address
from shared.masters.startup import listen
os.dup2(int(os.environ["PASSED"]), 3)
try:
    systemd = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": os.environ["COUNT"]}
    found = listen(Address("127.0.0.1", int(os.environ["PORT"])), systemd)
    print(found.fileno(), found.getsockname()[1])
except StartError as error:
    print(error)
"""


def listen_in_child(passed: int, port: int, count: str) -> str:
    return run_python(LISTEN, pass_fds=[passed], PASSED=str(passed), PORT=str(port), COUNT=count).stdout


def test_a_socket_of_the_service_manager_is_taken_if_it_is_the_gateways() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("0.0.0.0", 0)) as open_to_all:
        port, open_port = listener.getsockname()[1], open_to_all.getsockname()[1]
        cases = [
            (listener, port, "1", f"3 {port}"),
            (listener, port + 1, "1", f"is bound to 127.0.0.1:{port}, TERCET_BIND is"),
            # It would be open to other machines, while the settings say that it is not, so that no key is required.
            (open_to_all, open_port, "1", f"is bound to 0.0.0.0:{open_port}, TERCET_BIND is"),
            (listener, port, "2", "exactly one socket"),
        ]
        for passed, wanted_port, count, printed in cases:
            assert printed in listen_in_child(passed.fileno(), wanted_port, count)
    with socket.socket() as idle, Path(os.devnull).open() as file:
        for number in (idle.fileno(), file.fileno()):
            assert "is no" in listen_in_child(number, 1, "1")


def test_sockets_for_another_process_are_not_taken() -> None:
    with listen(Address("127.0.0.1", free_port()), {"LISTEN_PID": "1", "LISTEN_FDS": "1"}) as bound:
        assert bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        assert bound.fileno() != 3


STOP = """
import os, signal, sys, time
from shared.masters.startup import stop_with_holders
signal.signal(signal.SIGTERM, lambda *_: (print("stopped"), os._exit(0)))
stop_with_holders(int(sys.argv[1]))
print("armed", flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("is_early", [True, False])
def test_a_process_is_stopped_when_the_last_holder_of_its_pipe_ends(is_early: bool) -> None:
    """Also if that was before it looked."""
    read_end, write_end = os.pipe()
    if is_early:
        os.close(write_end)
    child = subprocess.Popen(
        [sys.executable, "-c", STOP, str(read_end)], cwd=ROOT, stdout=subprocess.PIPE, text=True, pass_fds=[read_end]
    )
    os.close(read_end)
    assert child.stdout is not None
    if not is_early:
        assert child.stdout.readline() == "armed\n"
        assert child.poll() is None
        os.close(write_end)
    assert child.communicate(timeout=20)[0].endswith("stopped\n")
    assert child.returncode == 0


KEY = "k" * 64


def pool_settings(tmp_path: Path, text: str = KEY, mode: int = 0o600, **settings: Any) -> Settings:
    path = tmp_path / "pool-key"
    path.write_text(text)
    path.chmod(mode)
    return make_settings(**{"pool_bind": Address("127.0.0.1", free_port()), "pool_key": path, **settings})


def test_workers_listen_on_loopback_with_a_key_and_beyond_it_with_tls(tmp_path: Path) -> None:
    assert check_pool_port(Settings(), 1) is None
    access = check_pool_port(pool_settings(tmp_path, f"{KEY}\n\nm{KEY}\n"), 1)
    assert access is not None
    assert (access.keys.value, access.tls) == ((KEY, f"m{KEY}"), None)
    everywhere = Address("0.0.0.0", free_port())
    tls = Certificate(tmp_path)
    files: dict[str, Any] = {"pool_tls_cert": tls.cert, "pool_tls_key": tls.key}
    assert check_pool_port(pool_settings(tmp_path, pool_bind=everywhere, **files), 1) is not None
    assert check_pool_port(pool_settings(tmp_path, pool_bind=everywhere, insecure=True), 1) is not None
    assert check_pool_port(pool_settings(tmp_path, mode=0o440), 1) is not None  # as Kubernetes mounts secrets


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"pool_key": None}, "set TERCET_POOL_KEY"),
        ({"text": "short"}, "Key 1 .* is not 32 or more"),
        ({"text": f"{KEY}\n{KEY} {KEY}"}, "Key 2 .* without spaces"),
        ({"text": "\n"}, "holds no key"),
        ({"mode": 0o644}, "chmod 600"),
        ({"pool_key": Path("/nonexistent")}, "cannot be read"),
        ({"pool_bind": Address("0.0.0.0", 8100)}, "unencrypted: set TERCET_POOL_TLS_CERT"),
        ({"pool_bind": Address("127.0.0.1", 65535)}, "no port for each of 2 slots"),
        ({"pool_bind": Address("192.0.2.7", 8100), "insecure": True}, "set TERCET_POOL_BIND to another"),
        ({"pool_tls_cert": Path("/nonexistent")}, "belong together"),
        ({"pool_tls_cert": Path("/nonexistent"), "pool_tls_key": Path("/nonexistent")}, "TLS file .* cannot be read"),
    ],
)
def test_a_port_without_protection_or_with_unusable_files_is_refused(
    tmp_path: Path, settings: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(StartError, match=refusal) as caught:
        check_pool_port(pool_settings(tmp_path, **settings), 2)
    assert KEY not in str(caught.value)
