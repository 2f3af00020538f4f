"""Which tokens begin and end a text, as the files of a checkpoint say it. Knows no tokenizer and no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.plain_files import read_plain

_MAX_ID = 2**31 - 1


def end_ids(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids in `eos_token_id` of a config.json or generation_config.json: an id, a list of ids, or nothing.

    Raises:
        ValueError: it is none of these.
    """
    found = values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(id_) is int and 0 <= id_ <= _MAX_ID for id_ in ids):
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
            ids += end_ids(json.loads(read_plain(path)))
    return tuple(dict.fromkeys(ids))


def read_start_id(directory: Path) -> int | None:
    """`bos_token_id` of config.json: what transformers begins an empty prompt with; None if it names no id."""
    path = directory / "config.json"
    found = json.loads(read_plain(path)).get("bos_token_id") if path.is_file() else None
    return found if type(found) is int and 0 <= found <= _MAX_ID else None
