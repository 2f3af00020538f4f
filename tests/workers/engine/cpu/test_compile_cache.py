"""The compile cache is keyed by everything that the kernels are compiled from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest

from workers.engine.cpu import kernels, layouts
from workers.engine.cpu.kernels.compile_cache import cache_directory, content_key, sources
from workers.engine.cpu.kernels.ir import FAST


def test_a_changed_source_file_changes_the_directory(tmp_path: Path) -> None:
    copies = [Path(shutil.copy(path, tmp_path)) for path in sources()]
    key = content_key(copies, "1.0")
    assert content_key(sources(), "1.0") == key
    for path in copies:
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert cache_directory(tmp_path, content_key(copies, "1.0")) != cache_directory(tmp_path, key)
        path.write_bytes(content)
    assert content_key(copies, "1.0") == key


def test_another_version_or_cpu_changes_the_directory() -> None:
    assert len({content_key([], *names) for names in (("1.0",), ("1.1",), ("1.0", "znver4"))}) == 3


def test_every_module_of_the_kernels_counts() -> None:
    package = Path(kernels.__file__).parent
    assert {*package.rglob("*.py"), Path(layouts.__file__)} == set(sources())


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        cache_directory(tmp_path / "file", "key")


def test_directories_of_older_kernels_are_removed_but_those_used_last(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for age, key in enumerate(("newest", "new", "old", "oldest")):
        used_at = time.time() - 100 * (age + 1)
        os.utime(cache_directory(tmp_path, key), (used_at, used_at))
    cache_directory(tmp_path, "current")
    kept = {"numba-current", "numba-newest", "numba-new"}
    assert {path.name for path in tmp_path.iterdir()} == {"other", *kept}
    cache_directory(tmp_path, "new")  # used again, so it is no candidate next time
    for key in ("a", "b"):
        cache_directory(tmp_path, key)
    assert {path.name for path in tmp_path.iterdir()} == {"other", "numba-b", "numba-a", "numba-new"}


@pytest.mark.parametrize("base", ["/proc/nowhere", "/dev/null/nowhere"])
def test_without_a_place_that_can_be_written_to_nothing_is_cached_and_the_log_says_what_to_set(base: str) -> None:
    """In a process of its own, without the package, whose import compiles all kernels."""
    path = Path(kernels.__file__).parent / "compile_cache.py"
    code = f"import runpy; print(runpy.run_path({str(path)!r})['use_content_keyed_cache']())"
    environ = {**os.environ, "NUMBA_CACHE_DIR": base}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "set TERCET_CACHE_DIR" in done.stderr


def test_the_cache_decides_whether_kernels_are_cached() -> None:
    assert FAST["cache"] is True


def test_the_compiled_kernels_lie_in_a_keyed_directory() -> None:
    directory = Path(numba.config.CACHE_DIR)
    assert directory.name.startswith("numba-")
    assert any(path.suffix == ".nbc" for path in directory.rglob("*"))
