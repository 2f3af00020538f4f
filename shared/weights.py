"""Identity of a checkpoint's weights, from its files. Knows no tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

_CHUNK_BYTES = 1 << 20


def weights_digest(directory: Path) -> str:
    """SHA-256 of all `*.safetensors` files of a directory, in the order of their names, as one stream of bytes.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
