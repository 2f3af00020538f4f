"""Checkpoints of a few kilobytes, whole or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from workers.checkpoints.resolve import EMBEDDED
from workers.engine.loader import random_weights
from workers.engine.model.config import ModelConfig

CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 8192,
    "n_positions": 32,
    "n_embd": 4,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": None,
}


def weights() -> dict[str, Any]:
    """All weights of a GPT-2 of CONFIG's sizes, as zeros."""
    tensors = random_weights(ModelConfig.from_json(CONFIG))
    return {name: np.zeros(tensor.shape, np.float32) for name, tensor in tensors.items()}


def write(
    directory: Path, config: Mapping[str, Any] = CONFIG, changed: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """A checkpoint in `directory`: whole, unless its `config` or the `changed` weights are not."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(EMBEDDED / "tokenizer.json", directory)
    save_file({**weights(), **changed}, directory / "model.safetensors")
    return directory


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
