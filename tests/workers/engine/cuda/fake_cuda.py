"""A stand-in for `torch.cuda` on machines without a GPU, for tests only. No product code knows it.

`fake_cuda()` replaces the parts of torch that Tercet's CUDA path calls. Tensors "on cuda" are CPU tensors. It is a
fake because a GPU cannot be had; it imitates what decides whether code written for CUDA graphs is right:

- A capture records the aten operations that the code calls. As on a GPU it executes none that writes, Python does not
  run again at a replay, and an operation that waits for the device fails and invalidates the capture. Leaving a capture
  that was invalidated raises before the stream is restored, as torch 2.13 does.
- A replay executes what was recorded on the same memory. All graphs share a memory pool: a replay overwrites (poisons)
  the results of every other graph.
- A copy to pinned memory is done only when an event recorded after it, or the device, is synchronized; until then the
  memory is poisoned.
- `FakeCuda.fail` injects failures: of captures, replays, allocations and synchronizations. After a device error every
  call fails, for the rest of the process.

It cannot show: that a kernel is right or fast, an illegal memory access, two streams that run at the same time, a
host buffer that changes while it is copied to the device, tensors on two devices in one operation, rounding on a GPU,
the memory that a model takes, or what libraries do on their first use.

Other processes: `process_environment` gives the environment in which each Python process installs the stand-in when it
imports torch, by way of `fake_site/sitecustomize.py`.
"""

from __future__ import annotations

import functools
import os
import time
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAME, FREE_BYTES, TOTAL_BYTES = "NVIDIA Stand-in", 1 << 30, 2 << 30
_FACTORIES = (
    *("arange", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "rand", "randint", "randn", "tensor"),
    *("zeros", "zeros_like"),
)
# Each waits until the device has computed a value.
_SYNCHRONIZING = {"aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select", "aten::lift_fresh"}
# As torch raises them. After a device error the process can never use the device again.
_ERRORS: dict[str, Callable[[], Exception]] = {
    "out_of_memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "device_error": lambda: torch.AcceleratorError("CUDA error: device-side assert triggered"),
    "capture_error": lambda: torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
}


class FakeCuda:
    """The state of the device, and the failures to come.

    Attributes:
        num_captures: graphs captured.
        num_replays: graphs replayed.
        current: the current stream.
    """

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.capability = capability
        self.num_captures = self.num_replays = 0
        self.current = _bound(FakeStream, self)()
        self.recording: _Recording | None = None
        self._failures: dict[str, tuple[int, str]] = {}  # point → calls that succeed before, error
        self._broken_by: Exception | None = None
        self._pending: list[tuple[Tensor, Tensor]] = []  # copies to pinned memory: target, what it will hold
        self._num_done = 0  # copies that are done, of all there ever were
        self._pinned: set[int] = set()  # storages
        self.last_replayed: FakeGraph | None = None  # the only graph whose results are not poisoned

    def fail(self, point: str, error: str, after: int = 0) -> None:
        """Lets a call fail.

        Args:
            point: allocate, capture, replay or synchronize.
            error: a key of _ERRORS.
            after: calls of the point that succeed before.
        """
        self._failures[point] = after, error

    def reach(self, point: str) -> None:
        """Raises if the device is broken, or a failure was injected at this point."""
        if self._broken_by is not None:
            raise self._broken_by
        after, error = self._failures.pop(point, (0, ""))
        if after:
            self._failures[point] = after - 1, error
        elif error:
            raised = _ERRORS[error]()
            if error == "device_error":
                self._broken_by = raised
            raise raised

    def copy_later(self, target: Tensor, source: Tensor) -> None:
        """A copy to pinned memory, which is done when the device is synchronized."""
        self._pending.append((target, source.clone()))
        _poison(target)

    def is_pinned(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._pinned

    def pin(self, tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        self._pinned.add(storage)
        weakref.finalize(tensor, self._pinned.discard, storage)  # its address may be used again
        return tensor

    def num_copies(self) -> int:
        """Copies to pinned memory so far."""
        return self._num_done + len(self._pending)

    def finish_copies(self, number: int | None = None) -> None:
        """Does the copies up to the `number`th of all; None for all."""
        self.reach("synchronize")
        while self._pending and (number is None or self._num_done < number):
            target, value = self._pending.pop(0)
            _copy(target, value.to(target.dtype))
            self._num_done += 1


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of a capture.

    Attributes:
        calls: what a replay does.
        results: tensors in the pool of the graphs, which a replay writes.
        error: what invalidated the capture.
        injected: what the next operation raises.
    """

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self.calls: list[Callable[[], Any]] = []
        self.results: list[Tensor] = []
        self.error: Exception | None = None
        self.injected: Exception | None = None
        self._own: set[int] = set()  # storages of the results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.injected is not None:
            if not isinstance(self.injected, torch.OutOfMemoryError):  # the allocator's own error invalidates nothing
                self.error = self.injected
            raise self.injected
        if func._schema.name in _SYNCHRONIZING:
            self.error = _ERRORS["capture_error"]()
            raise self.error
        inputs = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **kwargs))
            written = kwargs.get("out", args[0])
            if _storage(written) in self._own:  # later operations may read indices from it
                func(*args, **kwargs)
            return written
        out = func(*args, **kwargs)
        known = {_storage(one) for one in inputs}
        new = [one for one in _tensors(out) if _storage(one) not in known]
        if new:
            self.results += new
            self._own |= {_storage(one) for one in new}
            if not func._schema.name.startswith("aten::empty"):
                self.calls.append(lambda: _assign(out, func(*args, **kwargs)))
        return out


class FakeGraph:
    """`torch.cuda.CUDAGraph`."""

    _fake: FakeCuda
    _recording: _Recording | None = None

    def begin(self) -> None:
        recording = self._recording = self._fake.recording = _Recording(self._fake)
        try:
            self._fake.reach("capture")
        except Exception as error:  # noqa: BLE001 - raised by the first operation of the capture
            recording.injected = error
        recording.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        recording = self._recording
        assert recording is not None
        recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._fake.recording = None
        if recording.error is not None:
            self._recording = None
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        self._fake.num_captures += 1
        self.poison()

    def poison(self) -> None:
        assert self._recording is not None
        for tensor in self._recording.results:
            _poison(tensor)

    def replay(self) -> None:
        assert self._recording is not None, "replayed before it was captured"
        self._fake.reach("replay")
        self._fake.num_replays += 1
        with torch.inference_mode():
            if (last := self._fake.last_replayed) not in (None, self):
                last.poison()
            self._fake.last_replayed = self
            for call in self._recording.calls:
                call()


@contextmanager
def _graph(fake: FakeCuda, cuda_graph: FakeGraph, stream: FakeStream, **_: object) -> Iterator[None]:
    """`torch.cuda.graph`."""
    fake.finish_copies()
    before, fake.current = fake.current, stream
    cuda_graph.begin()
    try:
        yield
    finally:
        cuda_graph.end()
        fake.current = before


class FakeStream:
    """`torch.cuda.Stream`. There is one order of execution, that of the calls."""

    _fake: FakeCuda
    cuda_stream = 0

    def wait_stream(self, _stream: FakeStream) -> None:
        self._fake.reach("wait_stream")


@contextmanager
def _stream(fake: FakeCuda, stream: FakeStream) -> Iterator[None]:
    """`torch.cuda.stream`."""
    before, fake.current = fake.current, stream
    try:
        yield
    finally:
        fake.current = before


class FakeGenerator(torch.Generator):
    """`torch.Generator`, of the CPU whatever the device. A type, as torch's annotations name it."""

    def __new__(cls, _device: object = "cpu") -> FakeGenerator:
        return super().__new__(cls)


class FakeEvent:
    """`torch.cuda.Event`."""

    _fake: FakeCuda
    _at: float | None = None
    _num_copies = 0

    def __init__(self, **_: object) -> None: ...

    def record(self, _stream: FakeStream | None = None) -> None:
        self._fake.reach("record")
        self._at = time.perf_counter()
        self._num_copies = self._fake.num_copies()

    def synchronize(self) -> None:
        assert self._at is not None, "synchronized before it was recorded"
        self._fake.finish_copies(self._num_copies)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self._at is not None
        assert other._at is not None
        return 1e3 * (other._at - self._at)


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0)) -> Iterator[FakeCuda]:
    """Replaces torch's CUDA for the duration of a test."""
    import pytest  # not where whole processes have the stand-in

    with pytest.MonkeyPatch.context() as patch:
        yield install(FakeCuda(capability), patch.setattr)


def install(fake: FakeCuda, replace: Callable[[Any, str, Any], None] = setattr) -> FakeCuda:
    """Replaces torch's CUDA, in all threads of this process, by `replace(object, name, value)`."""
    replacements: dict[str, Any] = {
        "Stream": _bound(FakeStream, fake),
        "Event": _bound(FakeEvent, fake),
        "CUDAGraph": _bound(FakeGraph, fake),
        "graph": functools.partial(_graph, fake),
        "graph_pool_handle": lambda: (0, 1),
        "stream": functools.partial(_stream, fake),
        "set_stream": lambda stream: setattr(fake, "current", stream),
        "current_stream": lambda _device=None: fake.current,
        "synchronize": lambda _device=None: fake.finish_copies(),
        "mem_get_info": lambda _device=None: (FREE_BYTES, TOTAL_BYTES),
        "memory_reserved": lambda _device=None: 0,
        "empty_cache": lambda: None,
        "set_device": lambda _device: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_device_capability": lambda _device=None: fake.capability,
        "get_device_name": lambda _device=None: NAME,
        "get_device_properties": lambda _device=None: types.SimpleNamespace(name=NAME, total_memory=TOTAL_BYTES),
        "get_arch_list": lambda: ["sm_75", "sm_80", "sm_86", "sm_90"],
    }
    for name, value in replacements.items():
        replace(torch.cuda, name, value)
    for name in _FACTORIES:
        replace(torch, name, _on_cpu(fake, getattr(torch, name)))
    replace(torch, "Generator", FakeGenerator)
    for name in ("to", "new_tensor"):
        replace(Tensor, name, _on_cpu(fake, getattr(Tensor, name)))
    replace(Tensor, "pin_memory", lambda self, *_: fake.pin(self.clone()))
    copy = Tensor.copy_

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not (non_blocking and fake.is_pinned(self)):
            return copy(self, source, non_blocking)
        if fake.recording is not None:
            fake.recording.calls.append(lambda: fake.copy_later(self, source))
        else:
            fake.reach("copy")
            fake.copy_later(self, source)
        return self

    replace(Tensor, "copy_", copy_)
    return fake


def process_environment() -> dict[str, str]:
    """What to add to the environment of processes that shall have the stand-in instead of CUDA."""
    root = Path(__file__).parents[4]
    path = [str(Path(__file__).with_name("fake_site")), str(root), os.environ.get("PYTHONPATH", "")]
    return {"FAKE_CUDA": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}


def _bound(kind: type, fake: FakeCuda) -> Any:
    """A class of which no argument is the device: libraries name torch's classes in their type hints."""
    return type(kind.__name__, (kind,), {"_fake": fake})


def _on_cpu(fake: FakeCuda, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with "cpu" in place of any CUDA device among its arguments."""

    @functools.wraps(function)
    def call(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        if is_on_device := any(map(_is_cuda, (*args, *kwargs.values()))):
            fake.reach("allocate")
        cpu = torch.device("cpu")
        if is_on_device:
            args = tuple(cpu if _is_cuda(one) else one for one in args)
            kwargs = {name: cpu if _is_cuda(one) else one for name, one in kwargs.items()}
        out = function(*args, **kwargs)
        return fake.pin(out) if pin_memory else out

    return call


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.split(":")[0] == "cuda"


def _tensors(out: Any) -> list[Tensor]:
    return [one for one in (out if isinstance(out, tuple | list) else [out]) if isinstance(one, Tensor)]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _assign(targets: Any, values: Any) -> None:
    for target, value in zip(_tensors(targets), _tensors(values), strict=True):
        _copy(target, value)


def _copy(target: Tensor, value: Tensor) -> None:
    torch.ops.aten.copy_(target, value)


def _poison(tensor: Tensor) -> None:
    with torch.inference_mode():
        torch.ops.aten.fill_(tensor, float("nan") if tensor.is_floating_point() else 1)
