"""Launching kernels, with a fake of the CUDA driver: there is no GPU here. The kernels are compiled for real."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytest.importorskip("triton")
real_driver = pytest.importorskip("cuda.bindings.driver")

from workers.engine.cuda.kernels.launch import Launcher  # noqa: E402
from workers.engine.cuda.kernels.norm import ADD_NORM  # noqa: E402

GPU = torch.device("cuda", 0)
STREAM = 4242
FUNCTION, CONTEXT = 77, 99
ANSWERS: dict[str, tuple[int, ...]] = {"cuInit": (), "cuDeviceGet": (0,), "cuDevicePrimaryCtxRetain": (CONTEXT,)}


@dataclass
class FakeDriver:
    """Stands in for `cuda.bindings.driver`: keeps what is launched, and reads its parameters as the driver does."""

    failing_call: str = ""
    context: int = CONTEXT
    calls: list[str] = field(default_factory=list)
    launches: list[SimpleNamespace] = field(default_factory=list)

    CUlaunchConfig = real_driver.CUlaunchConfig
    CUfunction_attribute = real_driver.CUfunction_attribute
    CUlaunchAttribute = real_driver.CUlaunchAttribute
    CUlaunchAttributeID = real_driver.CUlaunchAttributeID

    def _done(self, call: str, *values: object) -> tuple[object, ...]:
        self.calls.append(call)
        codes = real_driver.CUresult
        return codes.CUDA_ERROR_LAUNCH_FAILED if call == self.failing_call else codes.CUDA_SUCCESS, *values

    def __getattr__(self, call: str) -> Any:
        """A call that answers with a constant."""
        return lambda *_: self._done(call, *ANSWERS[call])

    def cuCtxGetCurrent(self) -> tuple[object, ...]:
        return self._done("cuCtxGetCurrent", self.context)

    def cuCtxSetCurrent(self, context: int) -> tuple[object, ...]:
        self.context = context
        return self._done("cuCtxSetCurrent")

    def cuModuleLoadData(self, image: bytes) -> tuple[object, ...]:
        assert image.startswith(b"\x7fELF")
        return self._done("cuModuleLoadData", 1)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[object, ...]:
        assert name == b"_add_norm"
        return self._done("cuModuleGetFunction", FUNCTION)

    def cuLaunchKernelEx(self, config: Any, function: int, parameters: int, extra: int) -> tuple[object, ...]:
        pointers = (ctypes.c_void_p * 8).from_address(parameters)
        values = [ctypes.c_uint64.from_address(cast("int", pointer)).value for pointer in pointers]
        self.launches.append(
            SimpleNamespace(
                function=function,
                values=values,
                grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
                block=(config.blockDimX, config.blockDimY, config.blockDimZ),
                shared_bytes=config.sharedMemBytes,
                attributes=[(int(one.id), one.value.programmaticStreamSerializationAllowed) for one in config.attrs],
                stream=int(config.hStream),
            )
        )
        return self._done("cuLaunchKernelEx")


@pytest.fixture(autouse=True)
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=STREAM))


def launch(launcher: Launcher, rows: int = 3) -> list[torch.Tensor]:
    tensors = [torch.zeros(shape) for shape in ((rows, 64), (rows, 64), (64,), (64,), (rows, 64))]
    launcher.launch(ADD_NORM, (rows, 1, 1), *tensors, 0.5, WIDTH=64, BLOCK=64, ADDS=True, IS_RMS=False)
    return tensors


def test_arguments_are_packed_in_the_order_of_the_parameters() -> None:
    driver = FakeDriver()
    launcher = Launcher(GPU, driver)  # type: ignore[arg-type]
    expected = [[one.data_ptr() for one in launch(launcher, rows)] for rows in (3, 5)]
    for rows, pointers, done in zip((3, 5), expected, driver.launches, strict=True):
        assert done.values[:5] == pointers
        assert done.values[5] == int.from_bytes(bytes(ctypes.c_float(0.5)), sys.byteorder)
        assert done.values[6:] == [0, 0]  # Triton's scratch memory
        # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert done.attributes == [(6, 1)]
        assert (done.grid, done.block, done.stream) == ((rows, 1, 1), (128, 1, 1), STREAM)
        assert done.function == FUNCTION
        assert done.shared_bytes > 0
    assert driver.calls.count("cuModuleLoadData") == 1


def test_a_thread_without_a_context_gets_that_of_torch() -> None:
    driver = FakeDriver(context=0)
    launch(Launcher(GPU, driver))  # type: ignore[arg-type]
    assert driver.context == CONTEXT
    assert driver.calls.index("cuCtxSetCurrent") < driver.calls.index("cuModuleLoadData")


@pytest.mark.parametrize("call", ["cuInit", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernelEx"])
def test_an_error_names_the_call(call: str) -> None:
    with pytest.raises(RuntimeError, match=f"CUDA error in {call}: CUDA_ERROR_LAUNCH_FAILED"):
        launch(Launcher(GPU, FakeDriver(failing_call=call)))  # type: ignore[arg-type]


def test_a_cpu_needs_the_interpreter() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        launch(Launcher(torch.device("cpu")))
