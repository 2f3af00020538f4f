"""Serves a GGUF file: finds its conversion to safetensors in the cache, or has it made once.

`workers.checkpoints.gguf_child` converts, in a process of its own. Does not know what is in the file.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from workers.checkpoints.child_process import Progress, run_child
from workers.checkpoints.files import CheckpointError, inspect

# To be raised with each change of what a conversion writes.
CONVERTER_VERSION = 2


def from_gguf(path: Path, cache: Path, on_progress: Progress) -> Path:
    """The directory of safetensors that the GGUF file at `path` was converted to, made first where the cache lacks it.

    Args:
        cache: Tercet's cache directory.

    Raises:
        CheckpointError: the file is damaged, of a kind that is not served, or cannot be read, or the cache cannot be
            written to.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): name a file that Tercet may read.") from error
    identity = f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
    target = converted_directory(cache, path.stem, identity)
    if is_whole(target):
        return target
    return run_child("gguf_child", str(path), str(target), title=f"converting {path}", on_progress=on_progress)


def converted_directory(cache: Path, title: str, identity: str) -> Path:
    """The directory of a conversion.

    Args:
        title: what the directory's name begins with.
        identity: what was converted.
    """
    digest = hashlib.sha256(f"{CONVERTER_VERSION} {identity}".encode()).hexdigest()
    return cache / "converted" / f"{title}-{digest[:12]}"


def is_whole(directory: Path) -> bool:
    """Whether `directory` holds a whole checkpoint."""
    try:
        inspect(directory)
    except CheckpointError:
        return False
    return True


def gguf_file(directory: Path) -> Path | None:
    """The GGUF file in a directory that holds no safetensors; None if there is none.

    Raises:
        CheckpointError: there are several.
    """
    try:
        names = sorted(path.name for path in directory.iterdir())
    except OSError:  # `inspect` says so
        return None
    files = [name for name in names if name.lower().endswith(".gguf")]
    if not files or any(name.endswith(".safetensors") for name in names):
        return None
    if len(files) > 1:
        raise CheckpointError(
            f"{directory} holds {len(files)} GGUF files: name one of them, as in NAME={directory / files[0]}."
        )
    return directory / files[0]
