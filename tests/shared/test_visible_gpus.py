"""`CUDA_VISIBLE_DEVICES`, read as CUDA reads it."""

from __future__ import annotations

import pytest

from shared.visible_gpus import visible_gpus

KNOWN = [("0", "GPU-4a4a-11"), ("1", "GPU-9b9b-22"), ("2", "GPU-9b9b-33")]


def test_a_variable_that_is_not_set_says_nothing() -> None:
    assert visible_gpus({}) is None


@pytest.mark.parametrize(
    "text", ["", " ", ",", "-1", "-1,0", "NoDevFiles", "void", "none", "None", "all", "cuda:0", "0,0", "0,1, 0"]
)
def test_what_names_no_gpu_or_one_twice_hides_all(text: str) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3,1", ["3", "1"]),
        (" 0 , 1 ", ["0", "1"]),
        ("0,-1,1", ["0"]),
        ("1,NoDevFiles,0", ["1"]),
        ("1,,0", ["1"]),
        ("0,", ["0"]),
        ("00,1x", ["0", "1"]),  # as strtol
        ("GPU-a,MIG-b", ["GPU-a", "MIG-b"]),
        ("GPU-a, GPU-b,void", ["GPU-a", "GPU-b"]),
        ("GPU-a,1", ["GPU-a"]),
        ("1,GPU-a", ["1"]),
    ],
)
def test_the_list_ends_at_the_first_entry_that_names_no_gpu(text: str, expected: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2,0", ["2", "0"]),
        ("0,3,1", ["0"]),
        ("GPU-9b9b-2,GPU-4a", ["GPU-9b9b-2", "GPU-4a"]),
        ("GPU-4a,GPU-ffff,GPU-9b9b-2", ["GPU-4a"]),
        ("GPU-9b9b", []),  # of two GPUs
        ("GPU-4a,GPU-4a4a", []),  # the same GPU
        ("MIG-a1b2", ["MIG-a1b2"]),
    ],
)
def test_a_gpu_that_is_not_there_ends_the_list(text: str, expected: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}, KNOWN) == expected
