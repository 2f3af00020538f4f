"""The kernel image is keyed by everything that it is compiled from, and needs no compiler to be loaded."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.workers.helpers import run_python
from workers.engine.cpu import kernel_files, layouts
from workers.engine.cpu.kernel_files import content_key, cpu_type, kernels, remove_others, sources
from workers.engine.cpu.kernel_image import KernelImage, load, read_image, write_image


@pytest.fixture(scope="module")
def image_path() -> Path:
    """The image that this machine's tests use."""
    kernels()
    paths = (Path(kernel_files.__file__).parent / "__pycache__").glob("kernels-*.bin")
    return max(paths, key=lambda path: path.stat().st_mtime)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where `kernels` looks, as in a new process."""
    monkeypatch.setattr(kernel_files, "_directory", tmp_path)
    kernels.cache_clear()
    yield tmp_path
    kernels.cache_clear()


def test_a_changed_source_file_changes_the_key(tmp_path: Path) -> None:
    copies = [Path(shutil.copy(path, tmp_path)) for path in sources()]
    key = content_key(copies, "1.0")
    assert content_key(sources(), "1.0") == key
    for path in copies:
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert content_key(copies, "1.0") != key
        path.write_bytes(content)
    assert content_key(copies, "1.0") == key


def test_another_version_or_cpu_changes_the_key() -> None:
    assert len({content_key([], *names) for names in (("1.0",), ("1.1",), ("1.0", cpu_type()))}) == 3
    assert "model name" in cpu_type() or "CPU part" in cpu_type()


def test_every_module_of_the_kernels_counts() -> None:
    package = Path(kernel_files.__file__).parent
    counted = {*(package / "kernel_source").rglob("*.py"), Path(layouts.__file__), package / "kernel_image.py"}
    assert counted == set(sources())


def test_a_worker_runs_kernels_without_the_compiler(image_path: Path) -> None:
    code = "import sys, workers.app, workers.engine.cpu.kernels; print({'numba', 'llvmlite', 'scipy'} & {*sys.modules})"
    assert run_python(code).stdout == "set()\n"


def test_only_its_owner_may_change_an_image_and_a_damaged_one_counts_as_none(tmp_path: Path, image_path: Path) -> None:
    image = read_image(image_path)
    assert image is not None
    path = tmp_path / "image"
    write_image(image, path)
    assert path.stat().st_mode & 0o777 == 0o644
    assert read_image(path) == image
    for content in (path.read_bytes()[:-1], b"", path.read_bytes()[:40] + b"\0" + path.read_bytes()[41:]):
        path.write_bytes(content)
        assert read_image(path) is None
    path.write_bytes(b"")
    path.unlink()
    assert read_image(path) is None
    assert list(tmp_path.iterdir()) == []


def test_code_cannot_be_changed_once_it_is_loaded(image_path: Path) -> None:
    image = read_image(image_path)
    assert image is not None
    loaded = load(image)
    address = loaded.functions["sample"]
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            assert line.split()[1] == "r-xp"
            return
    raise AssertionError("no mapping has the kernel")


def test_a_function_that_the_c_library_lacks_is_an_error() -> None:
    with pytest.raises(OSError, match="no_such_function"):
        load(KernelImage(bytes(4096), {}, [], {"no_such_function": [0]}, False, False))


def test_an_image_that_is_there_is_used(directory: Path, image_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")  # so nothing can be compiled
    monkeypatch.setitem(sys.modules, "numba", None)
    shutil.copy(image_path, directory)
    assert "sample" in kernels().functions
    kernels.cache_clear()
    (directory / image_path.name).write_bytes(b"damaged")
    with pytest.raises(ImportError):
        kernels()


def test_a_worker_whose_image_cannot_be_made_compiles_by_itself(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setitem(sys.modules, "numba", None)  # it would take half a minute
    with pytest.raises(ImportError):
        kernels()
    assert "could not be compiled (exit code 1)" in caplog.text


def test_without_a_place_that_can_be_written_to_the_log_says_what_to_set(
    image_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_files, "_directory", Path("/proc/nowhere"))
    monkeypatch.setattr(kernel_files, "_read_or_build", lambda _: read_image(image_path))  # compiling takes long
    kernels.cache_clear()
    assert "sample" in kernels().functions
    kernels.cache_clear()
    assert "set TERCET_CACHE_DIR" in caplog.text


def test_images_of_older_kernels_are_removed_but_those_used_last(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for age, key in enumerate(("current", "newest", "new", "old", "oldest")):
        path = tmp_path / f"kernels-{key}.bin"
        path.write_bytes(msgspec.msgpack.encode(key))
        os.utime(path, (time.time() - 100 * age,) * 2)
    remove_others(tmp_path / "kernels-current.bin")
    kept = {f"kernels-{key}.bin" for key in ("current", "newest", "new")}
    assert {path.name for path in tmp_path.iterdir()} == {"other", *kept}
