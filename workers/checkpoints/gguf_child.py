"""The child process in which `workers.checkpoints.gguf` converts a GGUF file to a directory of safetensors.

Quantized weights become 16-bit floats, others keep their type. Knows the architectures that are served, by the names of
llama.cpp and of transformers. A file is read and written in parts, so that a model larger than the memory can be
converted; it appears under its final name only when it is whole. The file is not trusted: the package `gguf`, which
reads it, believes the lengths in it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import MODEL_ARCH, GGMLQuantizationType
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from gguf.tensor_mapping import get_tensor_name_map

from shared.plain_files import open_lock
from workers.checkpoints.child_process import Progress, limit, report_progress, report_result, sizes
from workers.checkpoints.files import CheckpointError, inspect, read_config
from workers.checkpoints.gguf import is_whole
from workers.checkpoints.gguf_tokenizer import end_ids, tokenizer_files

# Types that safetensors has, too: their names there, and numpy's.
_FLOATS = {
    GGMLQuantizationType.F32: ("F32", np.float32),
    GGMLQuantizationType.F16: ("F16", np.float16),
    GGMLQuantizationType.BF16: ("BF16", np.uint16),
}
LOCK_S = 1800.0  # for another process that converts the same file
_PART_NUMBERS = 1 << 24  # dequantized at once: 64 MiB
# The package makes an array of 700 bytes for each number of a list, and two for each string. Llama 3's vocabulary of
# 128,256 tokens and 280,147 merges takes a million.
MAX_ARRAYS = 1_500_000
MAX_MEMORY_BYTES = 2 << 30  # twice what those arrays take, for strings without end
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture under the names of transformers and llama.cpp.

    Attributes:
        title: what a message to a person calls it.
        prefix: of the weights' names in a checkpoint, the head's excepted.
        sizes: metadata key → key of config.json, for whole numbers.
        permutes: the rows of query and key are in llama.cpp's order.
        transposes: linear layers are `[in, out]` in a checkpoint.
    """

    title: str
    class_name: str
    prefix: str
    sizes: Mapping[str, str]
    permutes: bool = False
    transposes: bool = False


_LLAMA_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
}
ARCHITECTURES = {
    "llama": Architecture("Llama", "LlamaForCausalLM", "model.", _LLAMA_SIZES, permutes=True),
    "qwen2": Architecture("Qwen2", "Qwen2ForCausalLM", "model.", _LLAMA_SIZES),
    "qwen3": Architecture("Qwen3", "Qwen3ForCausalLM", "model.", _LLAMA_SIZES),
    "gpt2": Architecture(
        "GPT-2",
        "GPT2LMHeadModel",
        "transformer.",
        {
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "context_length": "n_positions",
        },
        transposes=True,
    ),
}


def main() -> None:
    """Convert the file named first on the command line to the directory named second."""
    source, target = Path(sys.argv[3]), Path(sys.argv[4])
    limit(MAX_MEMORY_BYTES)
    report_result(
        lambda: make_once(target, lambda part: convert(source, part, report_progress)), f"converting {source}"
    )


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return the checkpoint directory `target`. Where it is missing or damaged, `make` fills a new one.

    Processes that want the same directory take turns.

    Raises:
        CheckpointError: as `make`, or there is no space or permission to write it.
    """
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_lock(target.parent / f"{target.name}.lock", LOCK_S):
            if is_whole(target):
                return target
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            part = target.parent / f"{target.name}.part"
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            part.mkdir(mode=0o700)
            try:
                make(part)
                part.rename(target)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"The converted model cannot be written to {target.parent} ({error.strerror or error}): set "
            "TERCET_CACHE_DIR to a directory with free space that this user can write."
        ) from error
    return target


def convert(source: Path, directory: Path, on_progress: Progress) -> None:
    """Write the model in a GGUF file to an empty directory: config.json, model.safetensors, tokenizer.json.

    Raises:
        CheckpointError: the file is damaged or holds what is not served.
        OSError: a file cannot be read or written.
    """
    metadata, tensors = read(source)
    try:
        architecture = _architecture(metadata)
        config = _config(metadata, tensors, architecture)
        files = {"config.json": config, **tokenizer_files(metadata, config["model_type"])}
    except CheckpointError as error:
        raise CheckpointError(f"In {source}, {error}") from error
    for name, values in files.items():
        (directory / name).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    try:
        shapes = {
            name if name.startswith("lm_head.") else architecture.prefix + name: shape
            for name, shape in read_config(directory).weight_shapes().items()
        }
        names = _by_gguf_name(shapes, config["model_type"], config[architecture.sizes["block_count"]])
        if missing := names.keys() - tensors.keys():
            raise CheckpointError(f"the tensor {min(missing)} is missing: convert the model again.")
        if unknown := tensors.keys() - names.keys():
            raise CheckpointError(
                f"the tensor {min(unknown)} is none of {architecture.title}'s: the model is of a variant that Tercet "
                "does not serve."
            )
        weights = {name: (shapes[name], tensors[gguf_name]) for gguf_name, name in names.items()}
        _write_weights(source, weights, architecture, config, directory / "model.safetensors", on_progress)
        inspect(directory)
    except CheckpointError as error:
        raise CheckpointError(f"In {source}, {str(error).replace(f'{directory}/', '')}") from error


class _Reader(GGUFReader):
    """Ends where the file ends, or a list has no end. At a process's limit of memory, CPython itself may never end."""

    num_arrays = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Array:
        self.num_arrays += 1
        end = offset + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data) or self.num_arrays > MAX_ARRAYS:
            raise ValueError("it is cut short, or its header is longer than any model's")
        return super()._get(offset, dtype, count, override_order)


def read(path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    """(metadata, tensors by name) of the GGUF file at `path`. Lists of the metadata are lists of Python.

    Raises:
        CheckpointError: it is no GGUF file, of a version or byte order that is not served, or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        magic, version = file.read(4), int.from_bytes(file.read(4), "little")
    if magic not in (b"GGUF", b""):
        raise CheckpointError(f"{path} is not a GGUF file: name one, or a directory with model.safetensors.")
    if magic and version not in READER_SUPPORTED_VERSIONS:
        kind = "a big-endian file" if version > 0xFFFF else f"version {version} of the format"
        raise CheckpointError(
            f"{path} is {kind}, and Tercet reads little-endian GGUF of version 2 or 3: convert the model again with a "
            "current llama.cpp."
        )
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # of many kinds: the package checks little
        raise CheckpointError(
            f"{path} is damaged, or of a type that the package gguf does not know ({str(error) or 'out of memory'}): "
            "copy or download it again, or convert the model to F16, Q8_0, Q4_K_M or another common type."
        ) from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _shape(tensor: ReaderTensor) -> list[int]:
    """The shape in the order of numpy and torch: the dimension that is contiguous in the file comes last."""
    return [int(size) for size in reversed(tensor.shape)]


def _architecture(metadata: Mapping[str, Any]) -> Architecture:
    """
    Raises:
        CheckpointError: it is not served, or only a part of a model is in the file.
    """
    served = ", ".join(ARCHITECTURES)
    if (kind := metadata.get("general.type", "model")) != "model":
        raise CheckpointError(f"there is no model but {kind!r}: name the file of the model itself.")
    if (count := metadata.get("split.count", 1)) not in (0, 1):
        raise CheckpointError(
            f"there is one of {count} parts of a model: merge them with `llama-gguf-split --merge`, "
            "and name the merged file."
        )
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(f"the architecture is {name!r}, and Tercet serves {served}: name a model of these.")
    if metadata.get(f"{name}.expert_count"):
        raise CheckpointError(f"the model is a mixture of experts, and Tercet serves dense models ({served}) only.")
    return ARCHITECTURES[name]


def _config(
    metadata: Mapping[str, Any], tensors: Mapping[str, ReaderTensor], architecture: Architecture
) -> dict[str, Any]:
    """The values of config.json.

    Raises:
        CheckpointError: values are missing, or ask for what is not served.
    """
    name = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError("there is no matrix token_embd.weight: name the file of a whole model.")
    config: dict[str, Any] = {
        "model_type": name,
        "architectures": [architecture.class_name],
        "vocab_size": _shape(embedding)[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        **{target: get(key) for key, target in architecture.sizes.items()},
    }
    if ends := end_ids(metadata):
        config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if type(bos := metadata.get("tokenizer.ggml.bos_token_id")) is int:
        config["bos_token_id"] = bos
    if name == "gpt2":
        config["layer_norm_epsilon"] = _decimal(get("attention.layer_norm_epsilon"), "attention.layer_norm_epsilon")
        return config
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    width, heads = config["hidden_size"], config["num_attention_heads"]
    if type(width) is not int or type(heads) is not int or heads < 1:  # a list: heads differ from layer to layer
        raise CheckpointError("embedding_length and attention.head_count are no whole numbers, the same in each layer.")
    config["head_dim"] = head_dim = get("attention.key_length", width // heads)
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(
            "keys, values and rotary positions have different sizes, and Tercet serves models where they are the same."
        )
    scaling = get("rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        scaling = "llama3"
    if scaling == "linear":
        factor = _decimal(get("rope.scaling.factor"), "rope.scaling.factor")
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif scaling != "none":
        raise CheckpointError(
            f"the rotary positions are scaled ({scaling!r}), and of GGUF files Tercet serves unscaled and linear "
            "ones: serve another model, or the safetensors of this one."
        )
    if get("attention.sliding_window"):
        raise CheckpointError("attention has a sliding window, and Tercet serves full attention only.")
    config["rms_norm_eps"] = _decimal(get("attention.layer_norm_rms_epsilon"), "attention.layer_norm_rms_epsilon")
    config["rope_theta"] = _decimal(get("rope.freq_base", 10_000.0), "rope.freq_base")
    config["hidden_act"] = "silu"
    if name == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    if name == "qwen3":
        config["attention_bias"] = False
    return config


def _decimal(value: Any, key: str) -> float:
    """A 32-bit float as the shortest decimal that stands for it: 1e-05, not 9.999999747378752e-06."""
    if type(value) is not float:
        raise CheckpointError(f"{key} is no number: convert the model again.")
    return float(str(np.float32(value)))


def _by_gguf_name(names: Iterable[str], model_type: str, num_layers: int) -> dict[str, str]:
    """Names of weights in a checkpoint by those in a GGUF file, as the package has them: blk.0.ffn_up.weight →
    model.layers.0.mlp.up_proj.weight."""
    stems = get_tensor_name_map(MODEL_ARCH[model_type.upper()], num_layers)
    return {f"{stems.get_name(stem)}.{kind}": name for name in names for stem, _, kind in [name.rpartition(".")]}


def _write_weights(
    source: Path,
    weights: Mapping[str, tuple[list[int], ReaderTensor]],
    architecture: Architecture,
    config: Mapping[str, Any],
    path: Path,
    on_progress: Progress,
) -> None:
    """Write all weights as one safetensors file (https://github.com/huggingface/safetensors#format).

    Args:
        weights: shape in a checkpoint and tensor in the file, by the name in a checkpoint.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, tensor) in weights.items():
        if _shape(tensor) != (shape[::-1] if _is_transposed(name, shape, architecture) else shape):
            raise CheckpointError(
                f"{tensor.name} has the shape {_shape(tensor)}, where the metadata asks for {shape}: "
                "convert the model again."
            )
        dtype = _FLOATS[tensor.tensor_type][0] if tensor.tensor_type in _FLOATS else "F16"
        end = offset + math.prod(shape) * (4 if dtype == "F32" else 2)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    num_total, num_done, shown = offset, 0, 0.0
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, (shape, tensor) in weights.items():
            is_transposed = _is_transposed(name, shape, architecture)
            for part in _parts(tensor, _row_order(name, shape, architecture, config), is_whole=is_transposed):
                num_done += file.write(np.ascontiguousarray(part.T if is_transposed else part).data.cast("B"))
                if num_done / num_total >= shown + 0.01:
                    shown = num_done / num_total
                    on_progress(f"Converting {source.name}, {sizes(num_done, num_total)}", min(shown, 1.0))
        file.flush()
        os.fsync(file.fileno())  # before the directory gets its final name


def _is_transposed(name: str, shape: list[int], architecture: Architecture) -> bool:
    return architecture.transposes and ".c_" in name and len(shape) == 2


def _row_order(name: str, shape: list[int], architecture: Architecture, config: Mapping[str, Any]) -> Array | None:
    """The row of a GGUF tensor that comes to each row of the checkpoint's; None: the order is the same.

    llama.cpp rotates neighbours, transformers the halves of a head: the first half of a head's rows is at the even
    places of a GGUF file, the second at the odd ones (`LlamaModel.permute` of convert_hf_to_gguf.py).
    """
    if not architecture.permutes or not any(f"{part}_proj." in name for part in "qk"):
        return None
    return np.arange(shape[0]).reshape(-1, config["head_dim"] // 2, 2).swapaxes(1, 2).reshape(-1)


def _parts(tensor: ReaderTensor, order: Array | None, *, is_whole: bool) -> Iterator[Array]:
    """A tensor in parts of some rows: as it is if safetensors has its type, else as 16-bit floats.

    Args:
        order: which row comes next; None: the file's order.
        is_whole: as one part.

    Raises:
        CheckpointError: the type is one that the package gguf cannot dequantize.
    """
    rows = np.atleast_2d(tensor.data)
    is_matrix = rows is tensor.data
    step = len(rows) if is_whole else max(1, _PART_NUMBERS // _shape(tensor)[-1])
    for start in range(0, len(rows), step):
        if order is None or not is_matrix:
            part: Array = rows[start : start + step]
        else:
            part = rows[order[start : start + step]]
        values = _values(part, tensor)
        yield values if order is None or is_matrix else values.reshape(-1)[order]


def _values(part: Array, tensor: ReaderTensor) -> Array:
    """The numbers in the bytes of some rows; bf16 as whole numbers of 16 bits."""
    if tensor.tensor_type in _FLOATS:
        return part.view(_FLOATS[tensor.tensor_type][1])
    try:
        return dequantize(part, tensor.tensor_type).astype(np.float16)
    except NotImplementedError as error:
        raise CheckpointError(
            f"weights are quantized as {tensor.tensor_type.name}, which the package gguf cannot read: convert the "
            "model to F16, Q8_0, Q4_K_M or another common type."
        ) from error
