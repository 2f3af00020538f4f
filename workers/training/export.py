"""A trained model as the checkpoint that Tercet serves: weights in bf16, configuration, tokenizer.

Knows files. Refuses checkpoints that are too large to ship.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

from shared.errors import StartError
from workers.training.corpus import TOKENIZER_FILES

MAX_BYTES = 40_000_000  # of all files: what a source repository and a package may carry
TOKENIZER_BYTES = 600_000


def check_size(model: Any) -> None:
    """
    Raises:
        StartError: the checkpoint would be too large.
    """
    num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters()) + TOKENIZER_BYTES
    if num_bytes > MAX_BYTES:
        raise StartError(
            f"This model's checkpoint would have {num_bytes / 1e6:.1f} MB, and at most {MAX_BYTES / 1e6:.0f} MB are "
            "shipped: take fewer layers, a smaller width or a smaller vocabulary."
        )


def export(model: Any, tokenizer: Path, directory: Path, shard_mb: int = MAX_BYTES // 1_000_000) -> None:
    """Writes `directory` anew, whole or not at all. `tokenizer` holds the tokenizer's files.

    `shard_mb` bounds each file of weights (MB are 10^6 bytes), for a way out that takes only small files.

    Raises:
        StartError: the checkpoint would be too large.
    """
    check_size(model)
    aside = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    served = copy.deepcopy(model).to("cpu", torch.bfloat16)
    served.save_pretrained(aside, max_shard_size=f"{shard_mb}MB")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, aside / name)
    shutil.rmtree(directory, ignore_errors=True)
    aside.rename(directory)
