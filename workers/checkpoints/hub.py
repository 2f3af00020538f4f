"""Fetches a checkpoint from a model hub into huggingface_hub's cache on this machine.

All that may ask the hub runs in a child process, `workers.checkpoints.hub_child`: a name server or hub that never
answers then costs a bounded time, and a process that will fork loads no HTTP client and keeps no thread.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from workers.checkpoints.files import CheckpointError

Progress = Callable[[str, float], None]  # (stage, fraction done, 0 to 1)
_CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from workers.checkpoints.hub_child import main; main()"


class NotDelivered(CheckpointError):
    """The hub did not deliver. `reason` is the clause that says why, without a full stop."""

    def __init__(self, reason: str, remedy: str = "try again later.") -> None:
        super().__init__(f"{reason[0].upper()}{reason[1:]}: {remedy}")
        self.reason = reason


def from_hub(
    name: str, repository: str, revision: str | None, title: str, timeout_s: float, on_progress: Progress
) -> Path:
    """The directory in the hub's cache that holds `repository`, fetched first where the cache lacks it.

    Args:
        name: what the plan calls the model.
        revision: a commit, tag or branch; None is the main branch.
        title: what a message to a person calls it.
        timeout_s: how long the hub may take to list the repository; the download that follows has no limit.

    Returns:
        A directory whose name is the commit that the revision stands for.

    Raises:
        CheckpointError: the repository cannot be fetched, lacks files, or holds a kind of model that is not served.
    """
    option = f" --revision {revision}" if revision else ""
    remedy = (
        f"to serve {title}, let this machine reach a hub, or run `hf download {repository}{option} "
        "config.json model.safetensors tokenizer.json` where one can be reached and copy its cache "
        f"(HF_HOME) here, or name a directory that holds it, as in TERCET_MODELS={name}=/path, "
        "or serve the checkpoint that comes with Tercet, TERCET_MODELS=embedded."
    )
    deadline = time.monotonic() + timeout_s
    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD, root, repository, revision or "", str(deadline)],
        stdin=subprocess.PIPE,  # closed when this process leaves the block, or dies: the child then ends
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            kind, text, fraction = json.loads(line)
            if kind == "progress":
                on_progress(text, fraction)
            elif kind == "refused":
                raise CheckpointError(text)
            elif kind == "failed":
                raise NotDelivered(text, remedy)
            else:
                return Path(text)
    raise NotDelivered(f"fetching {title} ended with status {child.returncode}", remedy)
