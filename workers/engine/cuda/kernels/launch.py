"""Launches Triton kernels on torch's current stream through the CUDA driver, or in Triton's interpreter on a CPU.

A launch costs the host a few microseconds; in a CUDA graph it costs nothing after capture. Knows the driver's interface
and tensors. Does not know what kernels compute.
"""
# mypy: ignore-errors
# cuda-bindings and Triton have no type hints.

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from workers.engine.cuda.kernels.compile import ALIGNMENT, WARP_SIZE, CompiledKernel, Kernel, compile_kernel

TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
DEPENDENT_CAPABILITY = 90  # the first with programmatic dependent launch
MAX_STATIC_SHARED_BYTES = 48 << 10  # more has to be allowed for each function
FORMATS = {"*": "Q", "i": "i4x", "f": "f4x"}  # each argument in 8 bytes, of `struct`

Grid = tuple[int, int, int]


class Launcher:
    """Kernels of one device. Loads a kernel on its first launch, which must not happen while a graph is captured.

    For one thread at a time, as arguments are packed into memory that each launch uses again.

    Attributes:
        capability: compute capability, 90 for 9.0; None for Triton's interpreter.
    """

    def __init__(self, device: torch.device, driver: ModuleType | None = None) -> None:
        """
        Args:
            driver: `cuda.bindings.driver`, or a module with the same functions; None to import it.

        Raises:
            ModuleNotFoundError: if cuda-bindings is not installed.
            RuntimeError: if the CUDA driver reports an error.
        """
        self._device = device
        self._loaded: dict[tuple[Any, ...], _LoadedKernel] = {}
        self.capability: int | None = None
        if device.type != "cuda":
            return
        if driver is None:
            from cuda.bindings import driver
        self._driver = driver
        major, minor = torch.cuda.get_device_capability(device)
        self.capability = 10 * major + minor
        check("cuInit", driver.cuInit(0))

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Tensor | int | float, **constants: Any) -> None:
        """
        Args:
            grid: number of blocks in each dimension.
            arguments: the kernel's parameters that are not constants, in their order.
            constants: the others but those of `target_constants`.

        Raises:
            RuntimeError: if the CUDA driver reports an error, or the device is a CPU and Triton does not interpret.
        """
        constants |= target_constants(kernel, self.capability)
        if self.capability is None:
            _interpret(kernel, grid, arguments, constants)
            return
        types = argument_types(kernel, arguments, constants)
        key = (kernel, types, *constants.values())
        loaded = self._loaded.get(key)
        if loaded is None:
            compiled = compile_kernel(kernel, types, constants, self.capability)
            is_dependent = constants.get("IS_DEPENDENT", False)
            loaded = self._loaded[key] = _LoadedKernel(self._driver, self._device, compiled, types, is_dependent)
        loaded.launch(grid, arguments, torch.cuda.current_stream(self._device).cuda_stream)


class _LoadedKernel:
    """A function in the device's memory, and its packed arguments."""

    def __init__(
        self,
        driver: ModuleType,
        device: torch.device,
        compiled: CompiledKernel,
        types: tuple[str, ...],
        is_dependent: bool,
    ) -> None:
        self._driver = driver
        _make_context_current(driver, device)
        (self._module,) = check("cuModuleLoadData", driver.cuModuleLoadData(compiled.cubin))
        entry = compiled.entry.encode()
        (self._function,) = check("cuModuleGetFunction", driver.cuModuleGetFunction(self._module, entry))
        if compiled.shared_bytes > MAX_STATIC_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            result = driver.cuFuncSetAttribute(self._function, attribute, compiled.shared_bytes)
            check("cuFuncSetAttribute", result)
        # The parameters behind the arguments stay null.
        self._values = ctypes.create_string_buffer(8 * compiled.num_parameters)
        first = ctypes.addressof(self._values)
        addresses = [first + 8 * index for index in range(compiled.num_parameters)]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._address = ctypes.addressof(self._pointers)
        self._pack = struct.Struct("=" + "".join(FORMATS[name[0]] for name in types)).pack_into
        self._config = driver.CUlaunchConfig()
        self._config.blockDimX = WARP_SIZE * compiled.num_warps
        self._config.blockDimY = self._config.blockDimZ = 1
        self._config.sharedMemBytes = compiled.shared_bytes
        if is_dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._config.attrs, self._config.numAttrs = [attribute], 1

    def launch(self, grid: Grid, arguments: tuple[Tensor | int | float, ...], stream: int) -> None:
        values = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
        self._pack(self._values, 0, *values)
        config = self._config
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.hStream = stream
        check("cuLaunchKernelEx", self._driver.cuLaunchKernelEx(config, self._function, self._address, 0))


def target_constants(kernel: Kernel, capability: int | None) -> dict[str, bool]:
    """The kernel's constants that follow from the device, if it has them.

    IS_DEPENDENT: launched while the kernel before it is running. IS_INTERPRETED: in Triton's interpreter.
    """
    is_interpreted = capability is None
    is_dependent = not is_interpreted and capability >= DEPENDENT_CAPABILITY
    values = {"IS_DEPENDENT": is_dependent, "IS_INTERPRETED": is_interpreted}
    return {name: value for name, value in values.items() if name in kernel.function.arg_names}


def argument_types(
    kernel: Kernel, arguments: Sequence[Tensor | int | float], constants: Mapping[str, Any]
) -> tuple[str, ...]:
    """As `compile_kernel` takes them.

    The divisibility of a number in the kernel's `do_not_specialize` is left out: where it is the number of rows, the
    same machine code computes all batches.
    """
    names = [name for name in kernel.function.arg_names if name not in constants]
    types = zip(names, map(argument_type, arguments), strict=True)
    unspecialized = kernel.function.do_not_specialize
    return tuple(one.partition(":")[0] if name in unspecialized else one for name, one in types)


def argument_type(argument: Tensor | int | float) -> str:
    """As `compile_kernel` takes it."""
    if isinstance(argument, Tensor):
        return TYPES[argument.dtype] + (":16" if argument.data_ptr() % ALIGNMENT == 0 else "")
    # The divisors of integers are left open, so that one kernel serves batches of all sizes.
    return "fp32" if isinstance(argument, float) else "i32"


def check(call: str, result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a driver's call returned behind its error code.

    Raises:
        RuntimeError: if the code is an error; the text names the call and the error.
    """
    error, *values = result
    if error.value != 0:
        raise RuntimeError(f"CUDA error in {call}: {error.name}")
    return tuple(values)


def _make_context_current(driver: ModuleType, device: torch.device) -> None:
    """torch makes a device's primary context current in a thread only with its first call of the runtime there."""
    (context,) = check("cuCtxGetCurrent", driver.cuCtxGetCurrent())
    if int(context) == 0:
        index = torch.cuda.current_device() if device.index is None else device.index
        (handle,) = check("cuDeviceGet", driver.cuDeviceGet(index))
        (context,) = check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(handle))
        check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))


def _interpret(kernel: Kernel, grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(kernel.function, InterpretedFunction):
        raise RuntimeError(
            f"The kernel {kernel.name} runs on a CPU only in Triton's interpreter: "
            "set TRITON_INTERPRET=1 before Triton is imported."
        )
    kernel.function[grid](*arguments, **constants)
