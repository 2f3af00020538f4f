"""The weights of a checkpoint: their names and shapes, and their identity. Knows no tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

Shape = list[int]


def weights_digest(directory: Path) -> str:
    """SHA-256 of all `*.safetensors` files of a directory, in the order of their names, as one stream of bytes.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def weight_shapes(config: Mapping[str, int]) -> dict[str, Shape]:
    """The shape of every weight of a GPT-2, by its name in a checkpoint (without `transformer.`).

    Linear layers are `[in, out]`, as transformers' Conv1D stores them.

    Args:
        config: sizes by their names in `config.json`.
    """
    width, inner = config["n_embd"], config["n_inner"]
    shapes: dict[str, Shape] = {
        "wte.weight": [config["vocab_size"], width],
        "wpe.weight": [config["n_positions"], width],
        "ln_f.weight": [width],
        "ln_f.bias": [width],
    }
    linear = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    for layer in range(config["n_layer"]):
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = shapes[f"h.{layer}.{norm}.bias"] = [width]
        for name, (num_in, num_out) in linear.items():
            shapes[f"h.{layer}.{name}.weight"] = [num_in, num_out]
            shapes[f"h.{layer}.{name}.bias"] = [num_out]
    return shapes
