"""Before a pool starts: the address is free and not open to all, and the slot plan is current."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import StartError
from shared.keys import new_key
from shared.plan import Plan, make_slots, plan_inputs, write_plan
from shared.run_directory import prepare_run_directory
from shared.settings import Address, ModelSpec, Settings
from shared.startup import check_access, check_address_free, read_or_make_plan
from tests.tls import Certificate


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
    settings = Settings(run_dir=tmp_path / "r", devices=("cpu",), models=(ModelSpec("mine", "/nonexistent"),))
    run_path = prepare_run_directory(settings)
    plan = Plan(plan_inputs(settings, {}), [], make_slots(["cpu"], [("mine", 2)], run_path, settings.max_batch))
    write_plan(plan, run_path)
    assert read_or_make_plan(settings, {}) == plan
    with pytest.raises(StartError, match="plan could not be made"):
        read_or_make_plan(
            replace(settings, max_batch=3), {"TERCET_MODELS": "mine=/nonexistent", "TERCET_DEVICES": "cpu"}
        )


@pytest.mark.parametrize(
    ("host", "has_keys", "insecure", "is_refused"),
    [
        ("127.0.0.1", False, False, False),
        ("localhost", False, False, False),
        ("::1", False, False, False),
        ("0.0.0.0", False, False, True),
        ("::", False, False, True),
        ("192.0.2.7", False, False, True),
        ("write.example", False, False, True),
        ("0.0.0.0", True, False, False),
        ("0.0.0.0", False, True, False),
        ("0.0.0.0", True, True, False),
    ],
)
def test_an_address_beyond_loopback_needs_keys_or_a_permission(
    tmp_path: Path, host: str, has_keys: bool, insecure: bool, is_refused: bool
) -> None:
    path = tmp_path / "keys"
    new_key(path, "n")
    settings = Settings(bind=Address(host, 8000), keys=path if has_keys else None, insecure=insecure)
    if not is_refused:
        check_access(settings)
        return
    with pytest.raises(StartError) as caught:
        check_access(settings)
    for part in (str(settings.bind), "TERCET_KEYS", "TERCET_INSECURE=1", "--insecure"):
        assert part in str(caught.value)


def test_a_key_file_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    settings = Settings(keys=tmp_path / "keys")
    with pytest.raises(StartError, match="cannot be read"):
        check_access(settings)
    (tmp_path / "keys").touch(0o600)
    check_access(settings)
    (tmp_path / "keys").write_text("not a key\n")
    with pytest.raises(StartError, match="Line 1"):
        check_access(settings)


def test_tls_files_must_be_a_readable_pair(tmp_path: Path) -> None:
    pair, other, encrypted = (Certificate(tmp_path, name) for name in ("tls", "other", "encrypted"))
    cert, key, other_key, encrypted_key = pair.cert, pair.key, other.key, encrypted.key
    encrypted.encrypt_key("sesame")
    check_access(Settings(tls_cert=cert, tls_key=key))
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
            check_access(Settings(tls_cert=wrong_cert, tls_key=wrong_key))
