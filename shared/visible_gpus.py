"""Which GPUs `CUDA_VISIBLE_DEVICES` leaves visible, by CUDA's own rules. Calls no CUDA.

Schedulers and people write words into it that name no GPU, `NoDevFiles` (Slurm), `void`, `none`: CUDA then sees no GPU.
It sees none with `all` either.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

VARIABLE = "CUDA_VISIBLE_DEVICES"
# As C's strtol, by which CUDA reads an entry: what follows the number is ignored.
_NUMBER = re.compile(r"\s*\+?([0-9]+)", re.ASCII)
_UUID_PREFIXES = ("GPU-", "MIG-")


def visible_gpus(environ: Mapping[str, str], known: Collection[tuple[str, str]] = ()) -> list[str] | None:
    """The entries of `CUDA_VISIBLE_DEVICES` that CUDA takes, each an index or a UUID; None if it is not set.

    The list ends at the first entry that names no GPU, indexes and UUIDs are not mixed, and a list that names a GPU
    twice is empty (torch/cuda/__init__.py, `_parse_visible_devices`).

    Args:
        known: index and UUID of each GPU of this machine; empty: not known, so every number and UUID counts as a GPU.
            MIG instances are not among them.
    """
    if (text := environ.get(VARIABLE)) is None:
        return None
    found: list[str] = []
    gpus: list[str] = []
    uuids = text.lstrip().startswith(_UUID_PREFIXES)
    for entry in text.split(","):
        name = entry.strip() if uuids else _index(entry)
        gpu = _gpu(name, uuids=uuids, known=known)
        if not gpu:
            break
        found.append(name)
        gpus.append(gpu)
    return found if len(set(gpus)) == len(gpus) else []


def _index(entry: str) -> str:
    match = _NUMBER.match(entry)
    return str(int(match[1])) if match else ""


def _gpu(name: str, *, uuids: bool, known: Collection[tuple[str, str]]) -> str:
    """What identifies the GPU of an entry; "" if there is none. A UUID may be shortened."""
    if uuids and not name.startswith(_UUID_PREFIXES):
        return ""
    if not known or name.startswith("MIG-"):
        return name
    matches = [index for index, uuid in known if (uuid.startswith(name) if uuids else index == name)]
    return matches[0] if len(matches) == 1 else ""
