"""The linker of the kernels: objects from LLVM, run in this process, and what it refuses."""

from __future__ import annotations

import pytest
from llvmlite import binding

from workers.engine.cpu.kernel_source.linking import LinkError, link

SOURCE = """
declare double @exp(double)
declare void @never()
define double @kernel(double %x) {
  call void @never()
  %power = call double @exp(double %x)
  ret double %power
}
"""


def compiled(codemodel: str) -> bytes:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(opt=0, codemodel=codemodel, jit=True)
    content: bytes = target.emit_object(binding.parse_assembly(SOURCE))
    return content


def test_an_unknown_symbol_is_refused() -> None:
    with pytest.raises(LinkError, match="uses never"):
        link({"kernel": compiled("large")}, frozenset({"exp", "abort"}), frozenset())


def test_an_unknown_relocation_is_refused() -> None:
    with pytest.raises(LinkError, match="relocation of type"):
        link({"kernel": compiled("small")}, frozenset({"exp", "abort"}), frozenset({"never"}))


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(LinkError, match="no relocatable object"):
        link({"kernel": b"#!/bin/sh\n" * 10}, frozenset(), frozenset())
