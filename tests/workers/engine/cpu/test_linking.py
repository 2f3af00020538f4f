"""The linker of the kernels: objects from LLVM, run in this process, and what it refuses."""

from __future__ import annotations

import ctypes

import pytest
from llvmlite import binding

from workers.engine.cpu.kernel_image import KernelImage, load
from workers.engine.cpu.kernel_source.linking import LinkError, link

# A constant, a table, a call of its own and one of the C library.
SOURCE = """
@table = internal constant [4 x i64] [i64 1, i64 10, i64 100, i64 1000]
declare double @exp(double)
declare void @never()
define internal i64 @own(i64 %x) noinline {
  %at = getelementptr [4 x i64], ptr @table, i64 0, i64 %x
  %value = load volatile i64, ptr %at
  ret i64 %value
}
define i64 @kernel(i64 %x) {
  %isnt = icmp slt i64 %x, 0
  br i1 %isnt, label %bad, label %good
bad:
  call void @never()
  ret i64 0
good:
  %power = call double @exp(double 0.0)
  %one = fptosi double %power to i64
  %value = call i64 @own(i64 %x)
  %sum = add i64 %value, %one
  ret i64 %sum
}
"""


def compiled(codemodel: str) -> bytes:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(opt=0, codemodel=codemodel, jit=True)
    content: bytes = target.emit_object(binding.parse_assembly(SOURCE))
    return content


def test_linked_code_finds_its_data_itself_and_the_c_library() -> None:
    objects = {"kernel": compiled("large")}
    linked = link(objects, frozenset({"exp", "abort"}), frozenset({"never"}))
    loaded = load(KernelImage(*linked, has_dot_products=False, has_amx=False))
    kernel = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(loaded.functions["kernel"])
    assert [kernel(x) for x in range(4)] == [2, 11, 101, 1001]


def test_an_unknown_symbol_is_refused() -> None:
    with pytest.raises(LinkError, match="uses never"):
        link({"kernel": compiled("large")}, frozenset({"exp", "abort"}), frozenset())


def test_an_unknown_relocation_is_refused() -> None:
    with pytest.raises(LinkError, match="relocation of type"):
        link({"kernel": compiled("small")}, frozenset({"exp", "abort"}), frozenset({"never"}))


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(LinkError, match="no relocatable object"):
        link({"kernel": b"#!/bin/sh\n" * 10}, frozenset(), frozenset())
