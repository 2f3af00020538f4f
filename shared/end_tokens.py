"""Which tokens end a text, as the files of a checkpoint say it. Knows no tokenizer and no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def end_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in `eos_token_id` of a config.json or generation_config.json: an id, a list of ids, or nothing.

    Raises:
        ValueError: it is none of these.
    """
    found = values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise ValueError("eos_token_id is no token id and no list of token ids")
    return tuple(dict.fromkeys(ids))


def read_end_ids(directory: Path) -> tuple[int, ...]:
    """The ids in config.json and, after them, those that only generation_config.json has.

    Raises:
        OSError, ValueError: a file cannot be read, or does not hold what `end_ids` expects.
    """
    ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        if (path := directory / name).is_file():
            ids += end_ids(json.loads(path.read_bytes()))
    return tuple(dict.fromkeys(ids))
