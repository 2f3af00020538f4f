"""Fetches a checkpoint from a model hub into huggingface_hub's cache on this machine.

All that may ask the hub runs in a child process, `workers.checkpoints.hub_child`: a name server or hub that never
answers then costs a bounded time, and a process that will fork loads no HTTP client and keeps no thread.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from shared.home import home_directory
from workers.checkpoints.child_process import NotDelivered, Progress, run_child

# Each says where huggingface_hub keeps its cache; else that is in the home directory.
CACHE_VARIABLES: Final = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")


def from_hub(
    name: str, repository: str, revision: str | None, title: str, timeout_s: float | None, on_progress: Progress
) -> Path:
    """The directory in the hub's cache that holds `repository`, fetched first where the cache lacks it.

    Args:
        name: what the plan calls the model.
        revision: a commit, tag or branch; None is the main branch.
        title: what a message to a person calls it.
        timeout_s: how long the hub may take to list the repository. None looks into the cache only.

    Returns:
        A directory whose name is the commit that the revision stands for.

    Raises:
        CheckpointError: the repository cannot be fetched, lacks files, or holds a kind of model that is not served.
    """
    if home_directory() is None and not any(os.environ.get(name) for name in CACHE_VARIABLES):
        # huggingface_hub would make a directory called ~ in the current one.
        raise NotDelivered("the model hub's cache needs a home directory", "set HF_HOME to a directory.")
    option = f" --revision {revision}" if revision else ""
    remedy = (
        f"to serve {title}, let this machine reach a hub, or run `hf download {repository}{option} "
        "config.json model.safetensors tokenizer.json` where one can be reached and copy its cache "
        f"(HF_HOME) here, or name a directory that holds it, as in TERCET_MODELS={name}=/path, "
        "or serve the checkpoint that comes with Tercet, TERCET_MODELS=embedded."
    )
    deadline = "" if timeout_s is None else str(time.monotonic() + timeout_s)
    try:
        return run_child(
            "hub_child",
            *(repository, revision or "", deadline),
            title=f"fetching {title}",
            on_progress=on_progress,
        )
    except NotDelivered as error:
        raise NotDelivered(error.reason, remedy) from error
