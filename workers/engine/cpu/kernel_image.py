"""The compiled kernels in one file, which a worker loads without the compiler.

The code is linked (`kernel_source.linking`) but for absolute addresses, which are filled in here. Knows neither numba
nor LLVM, and no kernel's meaning.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

_DIGEST_BYTES = 32
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
_anchors: list[ctypes.c_char] = []  # keep the pages of loaded images


class KernelImage(msgspec.Struct, frozen=True):
    """Linked machine code.

    `functions` has the offset of each kernel. `pointers` are pairs of offsets: at the first, 8 bytes get the address of
    the second. `imports` are functions of the C library, with the offsets at which 8 bytes get their address.
    """

    code: bytes
    functions: dict[str, int]
    pointers: list[tuple[int, int]]
    imports: dict[str, list[int]]
    has_dot_products: bool
    has_amx: bool


@dataclass(frozen=True, slots=True)
class LoadedKernels:
    """The kernels in memory.

    Attributes:
        functions: their addresses by name.
        has_dot_products: the CPU has AVX-512 VNNI, and `multiply` is there.
        has_amx: the CPU has AMX, and Linux has granted it to this process.
    """

    functions: dict[str, int]
    has_dot_products: bool
    has_amx: bool


def load(image: KernelImage) -> LoadedKernels:
    """Copies an image to memory, which then is executable, no longer writable, and stays for the life of the process.

    Raises:
        OSError: the system forbids executable memory, or the C library lacks a function.
    """
    pages = mmap.mmap(-1, len(image.code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:] = image.code
    anchor = ctypes.c_char.from_buffer(pages)
    base = ctypes.addressof(anchor)
    for offset, target in image.pointers:
        pages[offset : offset + 8] = (base + target).to_bytes(8, "little")
    libc = ctypes.CDLL(None, use_errno=True)
    for name, offsets in image.imports.items():
        try:
            address = ctypes.cast(libc[name], ctypes.c_void_p).value or 0
        except AttributeError as error:
            raise OSError(f"the C library has no {name}") from error
        for offset in offsets:
            pages[offset : offset + 8] = address.to_bytes(8, "little")
    if libc.mprotect(ctypes.c_void_p(base), ctypes.c_size_t(len(image.code)), mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "compiled kernels cannot be made executable")
    _anchors.append(anchor)
    functions = {name: base + offset for name, offset in image.functions.items()}
    return LoadedKernels(functions, image.has_dot_products, image.has_amx and request_amx())


def request_amx() -> bool:
    """Ask Linux for the use of AMX tiles in this process; false if it denies them or the CPU has none.

    Source: "Using dynamically enabled XSTATE features" in Linux's Documentation/arch/x86/xstate.rst.
    """
    if platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def read_image(path: Path) -> KernelImage | None:
    """The image in a file; None if there is none, or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    body = content[_DIGEST_BYTES:]
    return (
        msgspec.msgpack.decode(body, type=KernelImage)
        if hashlib.sha256(body).digest() == content[:_DIGEST_BYTES]
        else None
    )


def write_image(image: KernelImage, path: Path) -> None:
    """Replace the file atomically; only its owner may change it.

    Raises:
        OSError: it cannot be written.
    """
    body = msgspec.msgpack.encode(image)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        written = Path(file.name)
        try:
            file.write(hashlib.sha256(body).digest() + body)
            file.flush()
            written.chmod(0o644)  # one user may set Tercet up, another serve
            written.replace(path)
        except OSError:
            written.unlink(missing_ok=True)
            raise
