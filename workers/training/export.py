"""Exports a trained model as a checkpoint that Tercet serves: weights in bf16, configuration, tokenizer.

Rejects models whose checkpoint is too large to ship.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch

from shared.errors import StartError
from workers.training.corpus import TOKENIZER_FILES

MAX_BYTES = 40_000_000  # of all files, so that they fit in the source repository and the package
TOKENIZER_BYTES = 600_000


def check_size(model: Any) -> None:
    """Check that the exported checkpoint has at most `MAX_BYTES`.

    Raises:
        StartError: it would be larger.
    """
    num_bytes = 2 * sum(parameter.numel() for parameter in model.parameters()) + TOKENIZER_BYTES
    if num_bytes > MAX_BYTES:
        raise StartError(
            f"This model's checkpoint would have {num_bytes / 1e6:.1f} MB, and at most {MAX_BYTES / 1e6:.0f} MB are "
            "shipped: take fewer layers, a smaller width or a smaller vocabulary."
        )


def export(model: Any, tokenizer: Path, directory: Path, shard_mb: int = MAX_BYTES // 1_000_000) -> None:
    """Write the checkpoint to `directory`, replacing what is there only once the new one is complete.

    Args:
        tokenizer: the directory that holds the tokenizer's files.
        shard_mb: largest weight file in MB (10^6 bytes), for transports that limit the size of a file.

    Raises:
        StartError: the checkpoint would be too large.
    """
    check_size(model)
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    served = copy.deepcopy(model).to("cpu", torch.bfloat16)
    served.save_pretrained(partial, max_shard_size=f"{shard_mb}MB")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, partial / name)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)
