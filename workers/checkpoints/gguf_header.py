"""The header of a GGUF file: its metadata and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file is not trusted: each length is compared with
what is left of the header before anything is allocated for it, and a list stays in the bytes that were read, so that a
header takes at most twice its bytes. (The reader of the package `gguf` makes several numpy
arrays of each of the vocabulary's hundred thousand entries, and believes the lengths.) Does not know what keys and
tensors mean.
"""

from __future__ import annotations

import math
import os
import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from workers.checkpoints.files import CheckpointError

VERSIONS = (2, 3)
# A vocabulary of 152,000 tokens and its merges take 7 MB.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
# Above those of every model: Qwen's vocabulary has 152,000 tokens, and its largest model some 1,000 tensors.
MAX_KEYS, MAX_TENSORS, MAX_ELEMENTS = 10_000, 10_000, 4_000_000
_STRING, _ARRAY = 8, 9
# By the numbers of the format: uint8, int8, uint16, int16, uint32, int32, float32, bool, uint64, int64, float64.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor. `shape` is the order of numpy and torch: the dimension that is contiguous in the file comes last."""

    shape: list[int]
    kind: GGMLQuantizationType
    offset: int  # from the start of the file
    num_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class GgufStrings:
    """A list of strings, each decoded when it is iterated over."""

    data: memoryview
    starts: array[int]  # of each string's length in `data`

    def __len__(self) -> int:
        return len(self.starts)

    def __repr__(self) -> str:
        return repr(list(islice(self, 3)))

    def __iter__(self) -> Iterator[str]:
        for start in self.starts:
            begin = start + 8
            yield str(self.data[begin : begin + int.from_bytes(self.data[start:begin], "little")], "utf-8", "replace")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says about itself; a list of numbers is a memoryview, one of strings a `GgufStrings`."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> GgufHeader:
    """The header of the GGUF file at `path`.

    Raises:
        CheckpointError: it is no GGUF file, of a version or byte order that is not served, or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        reader = _Reader(path, file.read(min(num_bytes, MAX_HEADER_BYTES)))
    if bytes(reader.take(4)) != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: name one, or a directory with model.safetensors.")
    if (version := reader.number("I")) not in VERSIONS:
        kind = "a big-endian file" if version > 0xFFFF else f"version {version} of the format"
        raise CheckpointError(
            f"{path} is {kind}, and Tercet reads little-endian GGUF of version 2 or 3: convert the model again with a "
            "current llama.cpp."
        )
    num_tensors, num_keys = reader.number("Q"), reader.number("Q")
    if num_keys > MAX_KEYS or num_tensors > MAX_TENSORS:
        raise reader.damaged(f"it announces {num_keys} keys and {num_tensors} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        if key in metadata:
            raise reader.damaged(f"it gives {key!r} twice")
        metadata[key] = reader.value(reader.number("I"))
    entries = {}
    for _ in range(num_tensors):
        name = reader.string()
        if name in entries:
            raise reader.damaged(f"it has {name!r} twice")
        entries[name] = _read_entry(reader, name)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.damaged("its alignment is no power of two")
    start = -(-reader.position // alignment) * alignment
    tensors = {}
    for name, (shape, quantization, offset) in entries.items():
        num_tensor_bytes = _num_tensor_bytes(reader, name, shape, quantization)
        tensor = GgufTensor(shape, quantization, start + offset, num_tensor_bytes)
        if offset % alignment or tensor.offset + tensor.num_bytes > num_bytes:
            raise reader.damaged(f"the tensor {name!r} lies past the end of its {num_bytes} bytes")
        tensors[name] = tensor
    return GgufHeader(metadata, tensors)


def _read_entry(reader: _Reader, name: str) -> tuple[list[int], GGMLQuantizationType, int]:
    """Shape, kind and offset of a tensor."""
    num_dimensions = reader.number("I")
    if not 0 < num_dimensions <= MAX_DIMENSIONS:
        raise reader.damaged(f"the tensor {name!r} has {num_dimensions} dimensions")
    shape = [reader.number("Q") for _ in range(num_dimensions)][::-1]
    number, offset = reader.number("I"), reader.number("Q")
    try:
        return shape, GGMLQuantizationType(number), offset
    except ValueError as error:
        raise CheckpointError(
            f"In {reader.path}, the tensor {name!r} is of type {number}, which the package gguf does not know: convert "
            "the model to F16, Q8_0, Q4_K_M or another common type."
        ) from error


def _num_tensor_bytes(reader: _Reader, name: str, shape: list[int], kind: GGMLQuantizationType) -> int:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise reader.damaged(f"the tensor {name!r} has rows of {shape[-1]} numbers in blocks of {block}")
    return math.prod(shape) // block * block_bytes


class _Reader:
    """Reads the header's bytes in order, and never past their end."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path = path
        self.position = 0
        self._data = memoryview(data)

    def damaged(self, how: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged, {how}: copy or download it again.")

    def take(self, num_bytes: int) -> memoryview:
        end = self.position + num_bytes
        if end > len(self._data):
            raise self.damaged("its header is cut short or longer than any model's")
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def string(self) -> str:
        return str(self.take(self.number("Q")), "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.damaged(f"its metadata has a value of type {kind}")
        element, length = self.number("I"), self.number("Q")
        if length > MAX_ELEMENTS:
            raise self.damaged(f"its metadata has a list of {length} values")
        if element in _NUMBERS:
            size = struct.calcsize(f"<{_NUMBERS[element]}")
            return self.take(length * size).cast(_NUMBERS[element])  # type: ignore[call-overload]
        if element != _STRING:
            raise self.damaged(f"its metadata has a list of values of type {element}")
        starts = array("Q")
        for _ in range(length):
            starts.append(self.position)
            self.take(self.number("Q"))
        return GgufStrings(self._data, starts)
