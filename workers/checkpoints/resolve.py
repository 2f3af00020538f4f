"""Resolves what a plan calls a model to a directory that holds a whole GPT-2 checkpoint.

Knows the model names. `workers.checkpoints.hub` fetches, `workers.checkpoints.files` checks. None of the three knows
tensors, devices or servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.checkpoints.files import CheckpointError, inspect
from workers.checkpoints.hub import NotDelivered, Progress, from_hub

__all__ = ["EMBEDDED", "Checkpoint", "CheckpointError", "resolve", "resolve_default"]

EMBEDDED = Path(__file__).parent / "embedded"
# Digest of its weights; a test compares them.
EMBEDDED_SHA256 = "abcab1711f0ee0619e69d1471280f15a1b0e33101c99defcc7360ffc68530be6"
HUB_NAMES = {"small": "openai-community/gpt2", "medium": "openai-community/gpt2-medium"}
SYNTHETIC_NAMES = ("synthetic:small", "synthetic:medium")
# Context size and vocabulary of every GPT-2 that OpenAI published.
GPT2_N_CTX, GPT2_VOCAB_SIZE = 1024, 50257


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on this machine.

    Attributes:
        name: what the plan calls it.
        directory: absolute path of config.json, tokenizer and weights; of a synthetic model, only of the tokenizer.
        source: "directory", "embedded", "synthetic", or "hub:" with the repository, "@" and the commit.
        warning: a sentence for the people who start or use this instance.
        n_ctx: context size in tokens.
    """

    name: str
    directory: str
    source: str
    warning: str | None
    n_ctx: int
    vocab_size: int


def _ignore_progress(stage: str, fraction: float) -> None:
    pass


def resolve(
    name: str,
    source: str | None = None,
    *,
    hub_timeout_s: float = 5.0,
    on_progress: Progress = _ignore_progress,
) -> Checkpoint:
    """The checkpoint that the plan calls `name`, fetched from the hub where it is not on this machine.

    Args:
        name: without a source "small", "medium", "embedded", "synthetic:small" or "synthetic:medium".
        source: a directory (it starts with ".", "/" or "~", or contains a "/" and exists), else a repository of the
            hub, which "@" and a commit, tag or branch may follow.
        hub_timeout_s: how long the hub may take to list the repository; the download has no limit.
        on_progress: called with the current file or stage and the fraction of it that is done.

    Raises:
        CheckpointError: the checkpoint cannot be fetched, is not whole, or is of a kind that is not served.
    """
    if source is None and name in SYNTHETIC_NAMES:
        return Checkpoint(name, str(EMBEDDED), "synthetic", None, n_ctx=GPT2_N_CTX, vocab_size=GPT2_VOCAB_SIZE)
    if source is None and name == "embedded":
        return _check(name, EMBEDDED, "embedded")
    if source is None and name not in HUB_NAMES:
        raise CheckpointError(
            f"There is no model called {name}: give it a source, as in {name}=/path/to/checkpoint "
            f"or {name}=organisation/repository, or name one of "
            f"{', '.join((*HUB_NAMES, 'embedded', *SYNTHETIC_NAMES))}."
        )
    location = HUB_NAMES[name] if source is None else source
    if location.startswith((".", "/", "~")) or ("/" in location and Path(location).exists()):
        directory = Path(location).expanduser().absolute()
        if not directory.is_dir():
            raise CheckpointError(
                f"The model {name} is configured to be read from {directory}, which is not a directory: "
                "name one that holds config.json, model.safetensors and tokenizer.json."
            )
        return _check(name, directory, "directory")
    repository, at, revision = location.partition("@")
    if at and not revision:
        raise CheckpointError(f"{location} names no revision after the @: write a commit, tag or branch, or no @.")
    title = f"GPT-2 {name}" if source is None else location
    directory = from_hub(name, repository, revision or None, title, hub_timeout_s, on_progress)
    return _check(name, directory, f"hub:{repository}@{directory.name}")


def resolve_default(*, hub_timeout_s: float = 5.0, on_progress: Progress = _ignore_progress) -> Checkpoint:
    """GPT-2 small if it is on this machine or can be fetched, else the embedded checkpoint with a warning.

    Raises:
        CheckpointError: the embedded checkpoint itself is not whole.
    """
    try:
        return resolve("small", hub_timeout_s=hub_timeout_s, on_progress=on_progress)
    except CheckpointError as error:
        reason = error.reason if isinstance(error, NotDelivered) else str(error).rstrip(".")
        warning = f"{reason}, so the embedded checkpoint is served instead of GPT-2 small"
    return _check("embedded", EMBEDDED, "embedded", warning)


def _check(name: str, directory: Path, source: str, warning: str | None = None) -> Checkpoint:
    n_ctx, vocab_size = inspect(directory)
    return Checkpoint(name, str(directory), source, warning, n_ctx, vocab_size)
