"""The identity of a checkpoint's weights. Knows no tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path


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
