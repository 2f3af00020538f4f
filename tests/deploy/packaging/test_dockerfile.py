"""Parts of the Dockerfile that the build of the CPU image does not reach."""

from __future__ import annotations

import re

import pytest

from tests.deploy.packaging.dockerfile import DOCKERFILE
from tests.e2e.harness import ROOT
from tests.programs import run_program

INDEX = "https://download.pytorch.org/whl"


def constraints_of(torch_index: str) -> list[str]:
    """The files of constraints with which the Dockerfile installs torch."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    command = re.search(r"case \"\$TORCH_INDEX\".*? esac\s+&& pip -r requirements/torch\.txt [^&]*", text)
    assert command is not None
    done = run_program(
        ["bash", "-euc", f'pip() {{ printf "%s\\n" "$@"; }}; {command[0]}'],
        env={"TORCH_INDEX": torch_index},
        check=True,
    )
    words = done.stdout.split()
    assert words[:2] == ["-r", "requirements/torch.txt"]
    assert ("--index-url" in words) == bool(torch_index)
    return [words[number + 1] for number, word in enumerate(words) if word == "-c"]


@pytest.mark.parametrize(
    ("torch_index", "is_pinned"),
    [("", True), (f"{INDEX}/cu130", True), (f"{INDEX}/cu126", False), (f"{INDEX}/cu132", False)],
)
def test_the_pins_of_cuda_are_used_for_their_version_alone(torch_index: str, is_pinned: bool) -> None:
    """torch for CUDA 12.6 requires cuda-toolkit 12.6 and cuda-bindings below 13: with these pins, pip refuses it.

    Source: PYTORCH_EXTRA_INSTALL_REQUIREMENTS of PyTorch's .github/scripts/generate_binary_build_matrix.py.
    """
    assert constraints_of(torch_index) == ["requirements/cuda.txt"] * is_pinned
    pins = (ROOT / "requirements/cuda.txt").read_text()
    assert re.search(r"^cuda-toolkit==13\.0\.", pins, re.MULTILINE)
    assert re.search(r"^cuda-bindings==13\.", pins, re.MULTILINE)
