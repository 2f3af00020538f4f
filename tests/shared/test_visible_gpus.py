"""`CUDA_VISIBLE_DEVICES`, read as CUDA reads it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.visible_gpus import visible_gpus

KNOWN = [("0", "GPU-4a4a-11"), ("1", "GPU-9b9b-22"), ("2", "GPU-9b9b-33")]


def test_a_variable_that_is_not_set_says_nothing() -> None:
    assert visible_gpus({}) is None


# With the GPUs above: what is taken of the list, which ends at the first entry that names no GPU, or one that is not
# there. A list that names a GPU twice is empty.
WITH_KNOWN = {
    "2,0": ["2", "0"],
    "0,3,1": ["0"],
    "GPU-9b9b-2,GPU-4a": ["GPU-9b9b-2", "GPU-4a"],
    "GPU-4a,GPU-ffff,GPU-9b9b-2": ["GPU-4a"],
    "GPU-9b9b": [],  # of two GPUs
    "GPU-4a,GPU-4a4a": [],  # the same GPU
    "MIG-a1b2": ["MIG-a1b2"],
}
# Where it is not known which there are.
WITHOUT = {
    **{text: [] for text in ("", " ", ",", "-1", "-1,0", "NoDevFiles", "void", "none", "None", "all", "cuda:0")},
    "0,0": [],
    "0,1, 0": [],
    "3,1": ["3", "1"],
    " 0 , 1 ": ["0", "1"],
    "0,-1,1": ["0"],
    "1,NoDevFiles,0": ["1"],
    "1,,0": ["1"],
    "0,": ["0"],
    "00,1x": ["0", "1"],  # as strtol
    "GPU-a,MIG-b": ["GPU-a", "MIG-b"],
    "GPU-a, GPU-b,void": ["GPU-a", "GPU-b"],
    "GPU-a,1": ["GPU-a"],
    "1,GPU-a": ["1"],
}


@pytest.mark.parametrize(("known", "lists"), [(KNOWN, WITH_KNOWN), ((), WITHOUT)])
def test_a_list_is_read_as_cuda_reads_it(known: Sequence[tuple[str, str]], lists: dict[str, list[str]]) -> None:
    assert {text: visible_gpus({"CUDA_VISIBLE_DEVICES": text}, known) for text in lists} == lists
