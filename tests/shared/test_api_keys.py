"""The key file: writing, revoking, reading again, and comparing in constant time."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared import watched_files
from shared.api_keys import SETTLE_S, KeyFile, new_key, read_keys, revoke_key
from shared.errors import StartError

LINE = {"id": "a", "name": "n", "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z"}


def look(key_file: KeyFile, *, is_settled: bool = True) -> None:
    """Look at the file, which was written long ago or just now."""
    written_at = time.time() - (SETTLE_S if is_settled else 0.0)
    with suppress(FileNotFoundError):
        os.utime(key_file._path, (written_at, written_at))
    key_file._files.look()


@pytest.fixture(autouse=True)
def tests_look_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "POLL_S", 3600.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def write(path: Path, *lines: object) -> None:
    text = "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    path.unlink(missing_ok=True)
    path.touch(0o600)
    path.write_text(text)


def test_a_new_key_has_256_random_bits_and_only_its_digest_is_kept(path: Path) -> None:
    key, record = new_key(path, "editor", rate=60, concurrency=2)
    assert re.fullmatch(r"tct_[A-Za-z0-9_-]{43}", key)
    assert key not in path.read_text()
    assert read_keys(path) == [record]
    assert record.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert (record.name, record.rate, record.concurrency, record.revoked) == ("editor", 60, 2, None)
    assert path.stat().st_mode & 0o777 == 0o600
    assert new_key(path, "editor")[0] != key
    assert [path] == list(path.parent.iterdir())


def test_keys_written_at_the_same_time_are_all_kept(path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        keys = [key for key, _ in threads.map(new_key, [path] * 20, ["n"] * 20)]
    key_file = KeyFile(path)
    assert len({key_file.find([key]) for key in keys} - {None}) == 20


def test_a_symbolic_link_to_the_file_stays_and_a_wrong_name_writes_nothing(path: Path, tmp_path: Path) -> None:
    for name in ("", "x" * 101, "a\nb", "a\x00"):
        with pytest.raises(StartError, match="1 to 100 characters"):
            new_key(path, name)
    assert not path.exists()
    link = tmp_path / "link"
    link.symlink_to(path)
    new_key(link, "n")
    assert link.is_symlink()
    assert len(read_keys(path)) == 1


def test_a_revoked_key_stays_in_the_file_and_is_not_found(path: Path) -> None:
    key, record = new_key(path, "old")
    other, _ = new_key(path, "new")
    revoked = revoke_key(path, record.id)
    assert revoked.revoked is not None
    assert revoke_key(path, record.id) == revoked
    key_file = KeyFile(path)
    assert key_file.find([key]) is None
    found = key_file.find([other])
    assert found is not None
    assert found.name == "new"
    with pytest.raises(StartError, match="no key with the id 'nothing'"):
        revoke_key(path, "nothing")


@pytest.mark.parametrize("index", [0, 1, 2, None])
def test_every_key_is_compared_in_constant_time_whichever_matches(
    path: Path, monkeypatch: pytest.MonkeyPatch, index: int | None
) -> None:
    keys = [new_key(path, f"n{number}")[0] for number in range(3)]
    compared: list[tuple[str, str]] = []
    compare = hmac.compare_digest

    def record(first: str, second: str) -> bool:
        compared.append((first, second))
        return compare(first, second)

    key_file = KeyFile(path)
    monkeypatch.setattr("hmac.compare_digest", record)
    sent = "tct_wrong" if index is None else keys[index]
    found = key_file.find([sent])
    assert (found.name if found else None) == (None if index is None else f"n{index}")
    digest = hashlib.sha256(sent.encode()).hexdigest()
    assert compared == [(key.sha256, digest) for key in read_keys(path)]


def test_the_first_valid_candidate_counts(path: Path) -> None:
    first, second = new_key(path, "first")[0], new_key(path, "second")[0]
    key_file = KeyFile(path)
    for candidates, name in (([first, second], "first"), (["x", second, first], "second"), (["x", first], "first")):
        found = key_file.find(candidates)
        assert found is not None
        assert found.name == name
    assert key_file.find([]) is None
    assert key_file.find(["\udcff", "é", ""]) is None


def break_line(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"id": "canary-contents", "rate": "many"}\n')


def open_to_others(path: Path) -> None:
    path.chmod(0o640)


@pytest.mark.parametrize("damage", [Path.unlink, break_line, open_to_others])
def test_a_file_that_breaks_later_keeps_its_keys_and_is_logged_once(path: Path, damage: Callable[[Path], None]) -> None:
    key, _ = new_key(path, "n")
    key_file = KeyFile(path)
    damage(path)
    with capture_logs() as logs:
        for _ in range(3):
            key_file._files.look()
            assert key_file.find([key]) is not None
    [event] = logs
    assert (event["event"], event["log_level"], event["files"]) == ("files_not_read", "error", "TERCET_KEYS")
    assert "canary" not in str(event)
    path.unlink(missing_ok=True)
    mended, _ = new_key(path, "mended")
    look(key_file)
    assert key_file.find([mended]) is not None
    assert key_file.find([key]) is None


@pytest.mark.parametrize("damage", [break_line, open_to_others, lambda path: path.chmod(0o666)])
def test_a_revocation_counts_in_a_file_that_is_wrong_elsewhere_and_a_new_key_does_not(
    path: Path, damage: Callable[[Path], None]
) -> None:
    (key, record), (other, _) = new_key(path, "n"), new_key(path, "other")
    key_file = KeyFile(path)
    revoke_key(path, record.id)
    added, _ = new_key(path, "added")
    damage(path)
    with capture_logs() as logs:
        look(key_file)
        assert [key_file.find([each]) is not None for each in (key, other, added)] == [False, True, False]
    assert [entry["event"] for entry in logs] == ["files_not_read"]


@pytest.mark.parametrize("length", [0, 1, 100, -1, "a line"])
def test_a_line_that_is_gone_counts_when_the_file_is_not_being_written(path: Path, length: int | str) -> None:
    """A look may come in the middle of a rewrite."""
    keys = [new_key(path, f"n{number}")[0] for number in range(3)]
    whole = path.read_bytes()
    part = whole[: whole.index(b"\n") + 1] if isinstance(length, str) else whole[:length]
    key_file = KeyFile(path)
    path.write_bytes(part)
    look(key_file, is_settled=False)
    assert all(key_file.find([key]) for key in keys)
    look(key_file)
    num_whole = len(keys) if part.rpartition(b"\n")[2] else part.count(b"\n")  # with a line in part, nothing counts
    assert [key_file.find([key]) is not None for key in keys] == [number < num_whole for number in range(3)]


def test_a_key_that_is_added_counts_at_the_next_look_also_in_a_file_that_was_no_key_file(
    path: Path, tmp_path: Path
) -> None:
    with capture_logs():
        key_file = KeyFile(path)
        assert key_file.find(["", "tct_"]) is None
    for number in range(2):
        added, _ = new_key(tmp_path / f"{number}", "added")
        with path.open("ab") as file:
            file.write((tmp_path / f"{number}").read_bytes())
        path.chmod(0o600)
        look(key_file)
        assert key_file.find([added]) is not None


def test_ten_thousand_keys_are_read_in_linear_time(path: Path) -> None:
    """Each line is compared with no other: comparisons of ids would be fifty million."""
    write(path, "".join(json.dumps({**LINE, "id": str(number)}) + "\n" for number in range(10_000)))
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        keys = read_keys(path)
    finally:
        sys.setprofile(None)
    assert len(keys) == 10_000
    assert calls < 100_000


@pytest.mark.parametrize(
    "line",
    [
        *("not JSON\n", "[]\n", b"\xff\xfe\n".decode("latin-1")),
        *({**LINE, "sha256": "0" * 63 + end} for end in ("", "G", "0\n")),
        *({**LINE, "id": ""}, {**LINE, "id": "a b"}, {**LINE, "rtae": 60}, {**LINE, "concurrency": 4097}),
        *({**LINE, "rate": -1}, {**LINE, "rate": "60"}),
        {name: value for name, value in LINE.items() if name != "created"},
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_not_quoted(path: Path, line: object) -> None:
    write(path, LINE, "\n", line)
    with pytest.raises(StartError) as caught:
        read_keys(path)
    assert str(caught.value).startswith(f"Line 3 of the key file {path} (TERCET_KEYS) is not a key")
    assert caught.value.__cause__ is None
    write(path, LINE, "\n", {**LINE, "id": "b", "rate": None})
    assert [key.id for key in read_keys(path)] == ["a", "b"]


def test_an_id_may_occur_once(path: Path) -> None:
    write(path, LINE, LINE)
    with pytest.raises(StartError, match=r"Line 2 .* repeats an id"):
        read_keys(path)


def test_a_file_that_others_may_read_or_write_is_refused(path: Path) -> None:
    new_key(path, "n")
    for mode in (0o640, 0o620, 0o604, 0o602, 0o666):
        path.chmod(mode)
        for use in (lambda: read_keys(path), lambda: new_key(path, "n"), lambda: revoke_key(path, "a")):
            with pytest.raises(StartError, match="chmod 600"):
                use()


def test_the_group_may_read_a_file_of_root_that_another_user_serves_with(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes mounts a secret as files of root, which the pod's group (fsGroup) may read."""
    if path.parent.stat().st_uid:
        pytest.skip("needs a file of root")
    new_key(path, "n")
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    path.chmod(0o440)
    assert [key.name for key in read_keys(path)] == ["n"]
    for mode in (0o444, 0o460):
        path.chmod(mode)
        with pytest.raises(StartError, match="chmod 600"):
            read_keys(path)


def test_a_missing_file_or_directory_is_named(path: Path) -> None:
    with pytest.raises(StartError, match=r"cannot be read .* `tercet key new NAME` creates it"):
        read_keys(path)
    with pytest.raises(StartError, match=r"directory .* cannot be opened"):
        new_key(path / "nowhere" / "keys", "n")


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, record = new_key(path, "n")

    def fail(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(StartError, match=r"cannot be written .No space left"):
        new_key(path, "second")
    assert read_keys(path) == [record]
    assert list(path.parent.iterdir()) == [path]
