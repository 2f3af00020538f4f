"""Keeps workers and torch to an instruction set that is lower than this CPU's best, by variables of new processes."""

from __future__ import annotations

from tests import faulty_workers

# torch has four libraries of kernels, each with a variable of its own.
_TORCH = {
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
}
_TORCH["avx_vnni"] = {**_TORCH["avx2"], "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}


def limits(instruction_set: str) -> dict[str, str]:
    """The variables, for a name of `shared.cpu_features.INSTRUCTION_SETS`; torch is limited only to AVX2 sets."""
    return {
        **_TORCH.get(instruction_set, {}),
        **faulty_workers.fault_environment({"test_instruction_set": instruction_set}),
    }
