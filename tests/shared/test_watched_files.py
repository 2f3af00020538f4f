"""Files that are read again when they change, and keys compared without an early end."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import StartError
from shared.pool_keys import is_pool_key
from shared.watched_files import POLL_S, WatchedFiles


def test_a_change_is_seen_after_the_poll_period_and_a_mistake_keeps_the_value(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    now = [0.0]

    def read() -> int:
        if not (text := path.read_text()).isdecimal():
            raise StartError("no number")
        return int(text)

    files = WatchedFiles("number", (path,), read, clock=lambda: now[0])
    path.write_text("22")
    assert files.value == 1
    for text, value in (("22", 22), ("none", 22), ("333", 333)):
        path.write_text(text)
        now[0] += POLL_S
        assert files.value == value


@pytest.mark.parametrize(
    ("header", "is_valid"),
    [
        ("Bearer " + "a" * 32, True),
        ("bearer " + "b" * 32, True),
        ("Basic " + "a" * 32, False),
        ("a" * 32, False),
        ("Bearer", False),
        ("Bearer " + "a" * 31, False),
        ("Bearer \udcff", False),
        ("", False),
    ],
)
def test_a_bearer_key_of_the_file_is_valid(header: str, is_valid: bool) -> None:
    assert is_pool_key(header, ("a" * 32, "b" * 32)) is is_valid
