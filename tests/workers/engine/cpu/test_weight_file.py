"""Workers of one model map one file of weights: same bits as private memory, less memory, and no surprises."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.workers.engine.helpers import TINY, generate, peaked_weights, running_engine
from workers.engine.cpu import weight_file
from workers.engine.cpu.linear import CpuLinear, PackedInt8Linear
from workers.engine.cpu.weight_file import read, shared_model
from workers.engine.cpu_kernels import load_kernels
from workers.engine.loader import LoadedModel, build
from workers.engine.request import SamplingParams

CONFIG = replace(TINY, n_embd=128, n_head=2, n_inner=512)


def load() -> LoadedModel:
    return LoadedModel(build(CONFIG, peaked_weights(CONFIG), "int8"), "cpu", "int8")


def never() -> LoadedModel:
    raise AssertionError("the file is there")


def texts(model: LoadedModel) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    with running_engine(model) as engine:
        ends = [generate(engine, [1, 2, 3] * length, SamplingParams(20), seed=length) for length in (1, 3, 30)]
    return [(end.token_ids, end.logprobs) for end in ends]


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def test_a_mapped_model_gives_the_bits_of_a_private_one(tmp_path: Path) -> None:
    made = shared_model(tmp_path, "small", "1", load)
    mapped = shared_model(tmp_path, "small", "1", never)
    assert texts(made) == texts(mapped) == texts(load())
    [name] = files(tmp_path)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path / name) in line]
    assert len(maps) == 2
    assert all(line.split()[1] == "r--s" for line in maps)


def test_a_cpu_with_other_kernels_has_a_file_of_its_own_and_the_same_texts(tmp_path: Path) -> None:
    """The directory may be in a home that machines with other CPUs share, whose weights are packed otherwise."""
    made = texts(shared_model(tmp_path, "small", "1", load))
    scalar = load_kernels("scalar")

    def load_for_scalar() -> LoadedModel:
        model = build(CONFIG, peaked_weights(CONFIG), "int8", kernels=scalar)
        return LoadedModel(model, "cpu", "int8", kernels=scalar)

    other = shared_model(tmp_path, "small", "1", load_for_scalar, scalar)
    assert other.kernels is scalar
    assert texts(other) == made
    assert len(files(tmp_path)) == len({(k.block, k.zero_point, k.inverts) for k in (load_kernels(), scalar)})


def test_an_only_worker_copies_the_products_and_maps_the_rest(tmp_path: Path) -> None:
    made = shared_model(tmp_path, "small", "1", load, is_only_worker=True)
    mapped = shared_model(tmp_path, "small", "1", never, is_only_worker=True)
    assert texts(made) == texts(mapped) == texts(load())
    for model, is_copied in ((mapped, True), (shared_model(tmp_path, "small", "1", never), False)):
        assert isinstance(model.model.head, CpuLinear)
        assert isinstance(model.model.head.product, PackedInt8Linear)
        assert model.model.head.product.packed.flags.writeable == is_copied  # the mapping is read-only


def test_a_changed_checkpoint_gets_a_file_of_its_own_and_a_mapping_in_use_stays(tmp_path: Path) -> None:
    old = shared_model(tmp_path, "small", "1", load)
    other = shared_model(tmp_path, "medium", "1", load)
    before = texts(old)
    names = files(tmp_path)

    def changed() -> LoadedModel:
        weights = peaked_weights(CONFIG)
        weights["wte.weight"] = weights["wte.weight"].flip(0)
        return LoadedModel(build(CONFIG, weights, "int8"), "cpu", "int8")

    new = shared_model(tmp_path, "small", "2", changed)
    assert texts(new) != before
    assert texts(old) == before
    assert texts(other) == before
    assert len({*files(tmp_path)} - {*names}) == 1
    shared_model(tmp_path, "small", "3", load)
    # The new file has taken the oldest one's place; the other model's stays.
    assert len(files(tmp_path)) == 3
    assert len({*files(tmp_path)} & {*names}) == 1
    assert texts(old) == before


NO_INDEX = b"\xc1" * 20 + (0).to_bytes(8, "little")
# What is left of a file's content in its place.
DAMAGES: dict[str, Callable[[Path, bytes], object]] = {
    "cut": lambda path, content: path.write_bytes(content[:-9]),
    "empty": lambda path, _: path.touch(),
    "changed": lambda path, content: path.write_bytes(content[:99] + b"\7" + content[100:]),
    "no index": lambda path, _: path.write_bytes(NO_INDEX + zlib.crc32(NO_INDEX).to_bytes(4, "little")),
    "a pipe": lambda path, _: os.mkfifo(path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    expected = texts(shared_model(tmp_path, "small", "1", load))
    path = tmp_path / files(tmp_path)[0]
    content = path.read_bytes()
    path.unlink()  # not changed in place: it is mapped
    DAMAGES[damage](path, content)
    assert read(path) is None
    assert texts(shared_model(tmp_path, "small", "1", load)) == expected
    assert path.read_bytes() == content


def test_a_lock_that_is_never_released_leaves_private_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_file, "LOCK_S", 0.1)
    shared_model(tmp_path, "small", "1", load)
    [lock] = tmp_path.glob("*.lock")
    with lock.open() as held, capture_logs() as logs:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert texts(shared_model(tmp_path, "small", "1", load)) == texts(load())
    assert [line["event"] for line in logs] == ["weights_not_shared"]


def test_a_full_disk_leaves_private_memory_a_log_line_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.NamedTemporaryFile

    def fail(_content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def on_full_disk(**options: Any) -> Any:
        file = make(**options)
        file.write = fail  # type: ignore[method-assign, assignment]
        return file

    monkeypatch.setattr("workers.engine.cpu.weight_file.tempfile.NamedTemporaryFile", on_full_disk)
    with capture_logs() as logs:
        model = shared_model(tmp_path, "small", "1", load)
    assert texts(model) == texts(load())
    assert [(line["event"], line["reason"]) for line in logs] == [("weights_not_shared", "No space left on device")]
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_written_to_leaves_private_memory() -> None:
    with capture_logs() as logs:
        model = shared_model(Path("/proc/nowhere"), "small", "1", load)
    assert texts(model) == texts(load())
    assert [line["event"] for line in logs] == ["weights_not_shared"]


def test_weights_in_a_layout_of_torchs_are_not_shared(tmp_path: Path) -> None:
    def in_fp32() -> LoadedModel:
        return LoadedModel(build(CONFIG, peaked_weights(CONFIG), "fp32"), "cpu", "fp32")

    model = shared_model(tmp_path, "small", "1", in_fp32)
    assert model.dtype == "fp32"
    assert files(tmp_path) == []


def test_a_load_that_fails_leaves_no_file_and_no_lock(tmp_path: Path) -> None:
    def fail() -> LoadedModel:
        raise OSError("the checkpoint is gone")

    with pytest.raises(OSError, match=re.escape("the checkpoint is gone")):
        shared_model(tmp_path, "small", "1", fail)
    assert files(tmp_path) == []
    assert shared_model(tmp_path, "small", "1", load).dtype == "int8"
