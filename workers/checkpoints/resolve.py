"""What a plan calls a model, turned into a directory that holds a whole GPT-2 checkpoint.

It knows the names; `workers.hub` knows where to get one, `workers.checkpoint_files` what makes one whole. All
three refuse to know tensors, devices and servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from workers.checkpoints.files import CheckpointError, inspect
from workers.checkpoints.hub import NotDelivered, Progress, from_hub

__all__ = ["EMBEDDED", "Checkpoint", "CheckpointError", "resolve", "resolve_default"]

EMBEDDED = Path(__file__).parent / "embedded"
HUB_NAMES = {"small": "openai-community/gpt2", "medium": "openai-community/gpt2-medium"}
SYNTHETIC_NAMES = ("synthetic:small", "synthetic:medium")
# Positions and vocabulary of every GPT-2 that OpenAI published.
GPT2_N_CTX, GPT2_VOCAB_SIZE = 1024, 50257


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is on this machine and whole.

    `name` is what the plan calls it; `directory` (absolute) holds config.json, the tokenizer and
    the weights, for a synthetic model only the tokenizer it borrows; `source` is "hub",
    "directory", "embedded" or "synthetic"; `warning` is a sentence that whoever starts or uses
    this must see.
    """

    name: str
    directory: str
    source: str
    warning: str | None
    n_ctx: int
    vocab_size: int


def _quiet(stage: str, fraction: float) -> None:
    """Progress that nobody watches."""


def resolve(
    name: str,
    source: str | None = None,
    *,
    hub_timeout_s: float = 5.0,
    on_progress: Progress = _quiet,
) -> Checkpoint:
    """The checkpoint that the plan calls `name`, fetched from the hub if it is not on this machine.

    `source` is a directory (it starts with ".", "/" or "~", or holds a "/" and exists), else a
    repository of the hub. Without one, `name` is "small", "medium", "embedded", "synthetic:small"
    or "synthetic:medium". `on_progress` is told a file, or what is being done, and the fraction
    that is done. `hub_timeout_s` bounds how long it takes to find out that no hub answers, not the fetching.

    Raises:
        CheckpointError: it is not to be had, not whole, or not of a kind that is served.
    """
    if source is None and name in SYNTHETIC_NAMES:
        return Checkpoint(name, str(EMBEDDED), "synthetic", None, n_ctx=GPT2_N_CTX, vocab_size=GPT2_VOCAB_SIZE)
    if source is None and name == "embedded":
        return _checked(name, EMBEDDED, "embedded")
    if source is None and name not in HUB_NAMES:
        raise CheckpointError(
            f"There is no model called {name}: give it a source, as in {name}=/path/to/checkpoint "
            f"or {name}=organisation/repository, or name one of "
            f"{', '.join((*HUB_NAMES, 'embedded', *SYNTHETIC_NAMES))}."
        )
    where = HUB_NAMES[name] if source is None else source
    if where.startswith((".", "/", "~")) or ("/" in where and Path(where).exists()):
        directory = Path(where).expanduser().absolute()
        if not directory.is_dir():
            raise CheckpointError(
                f"The model {name} is to be read from {directory}, which is not a directory: "
                "name one that holds config.json, model.safetensors and tokenizer.json."
            )
        return _checked(name, directory, "directory")
    return _checked(
        name, from_hub(name, where, f"GPT-2 {name}" if source is None else where, hub_timeout_s, on_progress), "hub"
    )


def resolve_default(*, hub_timeout_s: float = 5.0, on_progress: Progress = _quiet) -> Checkpoint:
    """GPT-2 small if it is on this machine or can be fetched, else the embedded checkpoint and why.

    Raises:
        CheckpointError: the embedded checkpoint itself is not whole.
    """
    try:
        return resolve("small", hub_timeout_s=hub_timeout_s, on_progress=on_progress)
    except CheckpointError as error:
        reason = error.reason if isinstance(error, NotDelivered) else str(error).rstrip(".")
        warning = f"{reason}, so the embedded checkpoint is served instead of GPT-2 small"
    return _checked("embedded", EMBEDDED, "embedded", warning)


def _checked(name: str, directory: Path, source: str, warning: str | None = None) -> Checkpoint:
    n_ctx, vocab_size = inspect(directory)
    return Checkpoint(name, str(directory), source, warning, n_ctx, vocab_size)
