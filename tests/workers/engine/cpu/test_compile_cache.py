"""The compile cache is keyed by everything that the kernels are compiled from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numba
import pytest

from workers.engine.cpu import kernels, layouts
from workers.engine.cpu.kernels.compile_cache import cache_directory, content_key, sources


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


def test_the_compiled_kernels_lie_in_a_keyed_directory() -> None:
    directory = Path(numba.config.CACHE_DIR)
    assert directory.name.startswith("numba-")
    assert any(path.suffix == ".nbc" for path in directory.rglob("*"))
