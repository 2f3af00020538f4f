"""Which kernels a GPU's worker uses, and what is stored of that choice.

The device is the stand-in for `torch.cuda`, and the check a function of the test: what a check finds on a GPU can only
be seen there. Files, locks and processes are real.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from structlog.testing import capture_logs

from tests.workers.engine.cuda.fake_cuda import FakeCuda, fake_cuda
from tests.workers.engine.helpers import TINY, peaked_weights, running_engine
from workers.engine.cuda import kernel_choice, kernel_store
from workers.engine.cuda.kernel_choice import KernelChoice, choose_kernels
from workers.engine.cuda.kernel_store import Gpu, KernelStore, StoredChoice, driver_version, kernel_key, source_digest
from workers.engine.failures import LoadFailure
from workers.engine.loader import LoadedModel, build
from workers.engine.model.config import SHAPES

SMALL, MEDIUM = SHAPES["small"], SHAPES["medium"]
CUDA = torch.device("cuda")
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), "580.65.06")
DIFFERS = "attend differs from plain torch by 0.5"


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(name=H100.name) as fake:
        yield fake


class Checks:
    """A check of the kernels that counts its calls."""

    def __init__(self, found: str | None = None, error: Exception | None = None) -> None:
        self.num_calls, self._found, self._error = 0, found, error

    def __call__(self, *_: object) -> str | None:
        self.num_calls += 1
        if self._error is not None:
            raise self._error
        return self._found


def choose(
    directory: Path | None, check: Callable[..., str | None], dtype: torch.dtype = torch.bfloat16
) -> KernelChoice:
    return choose_kernels(SMALL, dtype, 48, CUDA, KernelStore(directory), check)


def stored(directory: Path) -> dict[str, Any]:
    choices: dict[str, Any] = json.loads((directory / "kernels.json").read_bytes())["choices"]
    return choices


def in_process(directory: Path, check: Callable[..., str | None], results: Any = None) -> None:
    """`choose`, with the stand-in of a process of its own."""
    with fake_cuda(name=H100.name):
        choice = choose(directory, check)
        if results is not None:
            results.put(choice)


def start(*args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=in_process, args=args)
    process.start()
    return process


@pytest.mark.parametrize(("found", "kernels"), [(None, "triton"), (DIFFERS, "torch")])
def test_a_checked_choice_is_used_by_the_next_process(
    tmp_path: Path, fake: FakeCuda, found: str | None, kernels: str
) -> None:
    process = start(tmp_path / "cache", Checks(found))
    process.join()
    assert process.exitcode == 0
    second = Checks(error=AssertionError())
    assert choose(tmp_path / "cache", second) == KernelChoice(kernels, found or "")  # type: ignore[arg-type]
    assert second.num_calls == 0


def test_the_key_changes_with_everything_that_kernels_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = (Gpu("NVIDIA A10", (9, 0), H100.driver), Gpu(H100.name, (8, 6), H100.driver), Gpu(H100.name, (9, 0)))
    keys = [kernel_key(gpu, SMALL, "bf16") for gpu in (H100, *others)]
    keys += [kernel_key(H100, MEDIUM, "bf16"), kernel_key(H100, SMALL, "fp16")]
    real = kernel_store.installed_version
    for package in ("torch", "triton"):
        with monkeypatch.context() as patch:
            versions = {"torch": real("torch"), "triton": real("triton"), package: "9.9"}
            patch.setattr(kernel_store, "installed_version", versions.get)
            keys.append(kernel_key(H100, SMALL, "bf16"))
    with monkeypatch.context() as patch:
        patch.setattr(kernel_store, "source_digest", lambda: "changed")
        keys.append(kernel_key(H100, SMALL, "bf16"))
    assert len(set(keys)) == len(keys)
    assert kernel_key(H100, SMALL, "bf16") == keys[0]
    assert all(part in keys[0] for part in (H100.name, "sm_90", "580.65.06", torch.__version__, "bf16"))


def test_the_digest_changes_with_any_source(tmp_path: Path) -> None:
    (tmp_path / "kernels" / "deep").mkdir(parents=True)
    digests = []
    for name in ("step_kernels.py", "kernels/a.py", "kernels/deep/b.py"):
        for content in ("1", "2"):
            (tmp_path / name).write_text(content)
            digests.append(source_digest(tmp_path))
    assert len(set(digests)) == 6


def test_the_driver_version(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@a)\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    assert driver_version(path) == "580.65.06"
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024\n")
    assert driver_version(path) == "470.256.02"
    assert driver_version(tmp_path / "missing") == ""


def _die(*_: object) -> str | None:
    os.kill(os.getpid(), signal.SIGKILL)
    return None


def test_a_check_that_ends_its_process_costs_one_restart(tmp_path: Path, fake: FakeCuda) -> None:
    process = start(tmp_path, _die)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [one["status"] for one in stored(tmp_path).values()] == ["checking"]
    check = Checks()
    with capture_logs() as logs:
        choice = choose(tmp_path, check)
    assert (choice.kernels, check.num_calls) == ("torch", 0)
    assert "the check of the kernels ended its process" in choice.reason
    assert [(line["event"], line["log_level"]) for line in logs] == [("kernels_chosen", "warning")]
    assert choose(tmp_path, check) == choice  # and it stays


@pytest.mark.parametrize("shows_in_check", [True, False])
def test_a_device_error_of_the_check_is_raised_and_leaves_the_mark(
    tmp_path: Path, fake: FakeCuda, shows_in_check: bool
) -> None:
    """After it no call of CUDA succeeds, so the load must fail; it is not the compiler's fault either."""

    def fault(*_: object) -> str | None:
        fake.fail("synchronize", "device_error")
        if shows_in_check:
            torch.cuda.synchronize()
        return None

    with pytest.raises(RuntimeError, match="device-side assert"):
        choose(tmp_path, fault)
    with fake_cuda(name=H100.name):  # the next process
        assert choose(tmp_path, Checks()).kernels == "torch"


def test_kernels_that_do_not_compile_are_rejected(tmp_path: Path, fake: FakeCuda) -> None:
    with capture_logs() as logs:
        choice = choose(tmp_path, Checks(error=RuntimeError("ptxas fatal: /home/user/x")))
    assert choice == KernelChoice("torch", kernel_choice.CHECK_FAILED)
    assert "ptxas" not in str(choice)  # it is shown to clients
    assert "kernel_check_failed" in [line["event"] for line in logs]
    assert choose(tmp_path, Checks()) == choice


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_too_little_memory_says_nothing_about_the_kernels(tmp_path: Path, fake: FakeCuda, error: Exception) -> None:
    with pytest.raises(type(error)):
        choose(tmp_path, Checks(error=error))
    assert choose(tmp_path, Checks()) == KernelChoice("triton")


def test_a_compiler_that_cannot_write_says_nothing_about_the_kernels(tmp_path: Path, fake: FakeCuda) -> None:
    choice = choose(tmp_path, Checks(error=PermissionError(13, "Permission denied", "/root/.triton")))
    assert choice.kernels == "torch"
    assert "TERCET_CACHE_DIR" in choice.reason
    assert choose(tmp_path, Checks()) == KernelChoice("triton")


def test_two_workers_that_start_together_check_once(tmp_path: Path, fake: FakeCuda) -> None:
    context = multiprocessing.get_context("fork")
    results, is_checking, num_checks = context.Queue(), context.Event(), context.Value("i", 0)

    def check(*_: object) -> str | None:
        with num_checks.get_lock():
            num_checks.value += 1
        is_checking.set()
        second_waits.wait(0.5)  # in vain: the second worker has to wait for this one
        return DIFFERS

    second_waits = context.Event()
    processes = [start(tmp_path, check, results)]
    assert is_checking.wait(30)
    processes += [start(tmp_path, check, results) for _ in range(2)]
    choices = [results.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert num_checks.value == 1
    assert choices == [KernelChoice("torch", DIFFERS)] * 3


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"choices": {"a": {"status": 1}}}', b"\xff\x00"])
def test_a_damaged_file_is_replaced(tmp_path: Path, fake: FakeCuda, content: bytes) -> None:
    (tmp_path / "kernels.json").write_bytes(content)
    check = Checks()
    with capture_logs() as logs:
        assert choose(tmp_path, check) == KernelChoice("triton")
    assert check.num_calls == 1
    assert "kernel_choices_ignored" in [line["event"] for line in logs]
    assert [one["status"] for one in stored(tmp_path).values()] == ["triton"]


def test_kernels_that_this_version_does_not_have_are_ignored(tmp_path: Path, fake: FakeCuda) -> None:
    """Versions up to 5f94f10 could store `fused`, with the durations of decode steps."""
    key = kernel_key(kernel_choice.gpu_of(CUDA), SMALL, "bf16")
    old = {"status": "fused", "at": "2026-11-01T00:00:00+00:00", "step_us": {"torch": {"1": 200.0}, "fused": {"1": 90}}}
    other = {"status": "torch", "reason": DIFFERS}
    (tmp_path / "kernels.json").write_text(json.dumps({"format": 1, "choices": {key: old, "another GPU": other}}))
    check = Checks()
    with capture_logs() as logs:
        assert choose(tmp_path, check) == KernelChoice("triton")
    assert check.num_calls == 1
    (line,) = [line for line in logs if line["log_level"] == "warning"]
    assert (line["event"], line["kernels"], line["key"]) == ("kernel_choice_ignored", "fused", key)
    assert {key: one["status"] for key, one in stored(tmp_path).items()} == {key: "triton", "another GPU": "torch"}


def test_another_formats_file_is_replaced(tmp_path: Path, fake: FakeCuda) -> None:
    choose(tmp_path, Checks(DIFFERS))
    path = tmp_path / "kernels.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    assert choose(tmp_path, Checks()) == KernelChoice("triton")


def test_without_a_directory_that_can_be_written_to_each_process_checks(tmp_path: Path, fake: FakeCuda) -> None:
    assert choose(None, Checks()) == KernelChoice("triton")
    (tmp_path / "file").write_text("")
    check = Checks()
    with capture_logs() as logs:
        assert choose(tmp_path / "file" / "cache", check) == KernelChoice("triton")
    assert "kernel_choice_discarded" in [line["event"] for line in logs]
    assert choose(tmp_path / "file" / "cache", check) == KernelChoice("triton")
    assert check.num_calls == 2


@pytest.mark.parametrize("capability", [(7, 0), (10, 0), (12, 0)])
def test_a_gpu_that_the_kernels_are_not_compiled_for(tmp_path: Path, capability: tuple[int, int]) -> None:
    with fake_cuda(capability=capability):
        check = Checks()
        choice = choose(tmp_path, check)
    assert (choice.kernels, check.num_calls) == ("torch", 0)
    assert f"this GPU has {capability[0]}.{capability[1]}" in choice.reason


@pytest.mark.parametrize("module", ["triton", "cuda.bindings"])
def test_a_missing_package_is_named(
    tmp_path: Path, fake: FakeCuda, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> object:
        if name == module and "." in name:
            raise ModuleNotFoundError(name=name.partition(".")[0])
        return None if name == module else object()

    monkeypatch.setattr(kernel_choice, "find_spec", find)
    with pytest.raises(LoadFailure, match=f"pip install {module.replace('.', '-')}"):
        choose(tmp_path, Checks())


def test_writers_of_different_keys_keep_each_others_choices(tmp_path: Path) -> None:
    store = KernelStore(tmp_path)

    def write(number: int) -> None:
        for _ in range(10):
            with store.locked():
                store.write(str(number), StoredChoice("triton"))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert set(stored(tmp_path)) == {"0", "1", "2", "3"}
    assert msgspec.json.decode((tmp_path / "kernels.json").read_bytes())["format"] == 1


def test_the_engine_says_which_kernels_it_uses(tmp_path: Path, fake: FakeCuda) -> None:
    store = KernelStore(tmp_path)
    key = kernel_key(kernel_choice.gpu_of(CUDA), TINY, "fp32")
    store.write(key, StoredChoice("torch", DIFFERS))
    loaded = LoadedModel(build(TINY, peaked_weights(TINY), "fp32", device="cuda"), "cuda", "fp32")
    with running_engine(loaded, max_batch=1, kernel_directory=tmp_path) as engine:
        assert engine.status().kernels == f"torch: {DIFFERS}; graphs: on"
