"""The weights of a checkpoint: which of a directory's files they are, and their identity. Knows no tensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection
from pathlib import Path

from shared.plain_files import open_plain, read_plain

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What transformers takes in the place of safetensors where it finds neither WHOLE nor INDEX.
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER = "adapter_model"
_SHARD = re.compile(r"(.*)-\d+-of-0*(\d+)\.safetensors")


def weight_files(directory: Path) -> list[Path]:
    """The files that transformers would load: WHOLE, else those that INDEX names. Where there is neither, the only file
    or the only set of shards.

    Raises:
        OSError: the directory or the index cannot be read.
        ValueError: it is not clear which files they are. The text is a clause about the directory.
    """
    if (directory / WHOLE).exists():
        return [directory / WHOLE]
    if not (directory / INDEX).exists():
        return [directory / name for name in unindexed([path.name for path in directory.iterdir()])]
    try:
        named = json.loads(read_plain(directory / INDEX))["weight_map"].values()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        named = ()
    if not named or not all(isinstance(name, str) and _is_plain_name(name) for name in named):
        raise ValueError(f"{INDEX} does not name weight files in its own directory")
    return [directory / name for name in sorted(set(named))]


def unindexed(names: Collection[str]) -> list[str]:
    """The weight files among the files of a directory that has neither WHOLE nor INDEX.

    Raises:
        ValueError: there are several, and they are no set of shards.
    """
    found = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith(ADAPTER))
    if len(found) > 1:
        sets = {shard.groups() if (shard := _SHARD.fullmatch(name)) else None for name in found}
        if sets != {(found[0].rpartition("-of-")[0].rpartition("-")[0], str(len(found)))}:
            raise ValueError(f"it holds {', '.join(found)} and neither {WHOLE} nor {INDEX}, which says what to load")
    return found


def _is_plain_name(file: str) -> bool:
    """Whether it can name a file, of the directory itself."""
    return Path(file).name == file and file not in {".", ".."} and "\0" not in file and file.isprintable()


def weights_digest(directory: Path) -> str:
    """SHA-256 of a directory's weight files, in the order of their names, as one stream of bytes.

    Raises:
        OSError: a file cannot be read.
        ValueError: as `weight_files`.
    """
    digest = hashlib.sha256()
    for path in weight_files(directory):
        with open_plain(path) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
