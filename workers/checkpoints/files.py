"""Which files make a GPT-2 checkpoint, and whether the files in a directory are whole and fit together.

Reads names and sizes, never weights; unpickles nothing and runs no code that comes with a checkpoint. Does not know the
hub or the slot plan.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shared.errors import StartError
from shared.weights import Shape, weight_shapes, weights_digest

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = ("F64", "F32", "F16", "BF16")
# As in the safetensors library.
MAX_HEADER_BYTES = 100_000_000
# Largest values of config.json. GPT-2 XL, the largest GPT-2 that OpenAI published, has 1600, 48, 25, 6400, 1024 and
# 50,257; descendants have longer contexts and larger vocabularies. A shape list or an allocation by an unbounded value
# would take this machine's memory before any weight is compared with it.
MAX_SIZES = {
    "n_embd": 16_384,
    "n_layer": 512,
    "n_head": 512,
    "n_inner": 131_072,
    "n_positions": 131_072,
    "vocab_size": 2_000_000,
}


class CheckpointError(StartError):
    """A checkpoint cannot be served. The message is one sentence that says why and what to do."""


class Incomplete(CheckpointError):
    """Files are missing or damaged, so fetching them again may help. `damaged` holds the names of the latter."""

    def __init__(self, message: str, damaged: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.damaged = damaged


def inspect(directory: Path) -> tuple[int, int]:
    """Check the checkpoint in `directory`.

    Returns:
        (context size in tokens, vocabulary size).

    Raises:
        Incomplete: files are missing or damaged.
        CheckpointError: the files do not fit together, or this kind of model is not served.
    """
    try:
        files = [path.name for path in directory.iterdir()]
        # First, so that another architecture is refused as such and not for its missing files.
        config = read_config(directory) if "config.json" in files else {}
        check_files(str(directory), files)
        _check_weights(directory, config)
        _check_tokenizer(directory, config["vocab_size"])
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read ({error.strerror or error}): let the user that Tercet runs as read it."
        ) from error
    return config["n_positions"], config["vocab_size"]


def check_files(source: str, files: Collection[str]) -> None:
    """Check that no file is missing.

    Args:
        source: what holds the files, as transformers would load it: a directory, or a repository of the hub.

    Raises:
        Incomplete: files are missing, or the weights are there only as pickles.
    """
    pickles = sorted(file for file in files if file.endswith(PICKLES))
    has_weights = any(file.endswith(".safetensors") and "/" not in file for file in files)
    if pickles and not has_weights:
        converted = f"{Path(source).name}-safetensors"
        code = (
            "from transformers import AutoModelForCausalLM as Model, AutoTokenizer as Tokenizer; "
            f"[each.from_pretrained({source!r}).save_pretrained({converted!r}) "
            "for each in (Model, Tokenizer)]"
        )
        raise Incomplete(
            f"{source} has its weights only as a pickle ({pickles[0]}), which can run code when it "
            "is read, so Tercet reads safetensors only: if you trust it, convert it with "
            f"{shlex.join([sys.executable, '-c', code])} and serve the directory ./{converted}."
        )
    missing = [] if "config.json" in files else ["config.json"]
    if not has_weights:
        missing.append(WHOLE)
    if "tokenizer.json" not in files and not {"vocab.json", "merges.txt"} <= set(files):
        missing.append("tokenizer.json (or vocab.json and merges.txt)")
    if missing:
        raise Incomplete(f"{source} lacks {', '.join(missing)}: name a checkpoint that has all of them.")


def needed_files(listed: Collection[str]) -> list[str]:
    """The files that Tercet reads, of those in a repository: tokenizer and weights, no code. The weights are last."""
    tokenizer = ["tokenizer.json"] if "tokenizer.json" in listed else ["vocab.json", "merges.txt"]
    shards = sorted(file for file in listed if file.endswith(".safetensors") and "/" not in file)
    weights = [WHOLE] if WHOLE in listed else [INDEX, *shards]
    return [file for file in ("generation_config.json", *tokenizer, *weights) if file in listed]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Incomplete(f"{path} is damaged, it is not JSON: copy or download it again.", (path.name,)) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not hold a JSON object: copy the right file there.")
    return values


def read_config(directory: Path) -> dict[str, int]:
    """The sizes in config.json: n_positions, n_embd, n_layer, n_head, n_inner and vocab_size.

    Raises:
        Incomplete: it is not JSON.
        CheckpointError: it is not a GPT-2's, a value is missing or no GPT-2 can have it, or it asks to run code.
    """
    path = directory / "config.json"
    config = _read_json(path)
    if "auto_map" in config:
        raise CheckpointError(
            f"{path} asks to run code that comes with the checkpoint (auto_map), and Tercet never "
            "does: serve a checkpoint of the plain GPT-2 architecture."
        )
    if (architecture := config.get("model_type")) != "gpt2":
        raise CheckpointError(
            f"{path} describes the architecture {architecture!r}, and Tercet serves GPT-2 only: "
            'name a checkpoint whose model_type is "gpt2".'
        )
    width = config.get("n_embd")
    sizes = {
        "vocab_size": config.get("vocab_size"),
        "n_positions": config.get("n_positions", config.get("n_ctx")),
        "n_embd": width,
        "n_layer": config.get("n_layer"),
        "n_head": config.get("n_head"),
        "n_inner": config.get("n_inner") or (4 * width if isinstance(width, int) else None),
    }
    checked = {key: value for key, value in sizes.items() if type(value) is int and 0 < value <= MAX_SIZES[key]}
    if wrong := sorted(sizes.keys() - checked.keys()):
        ranges = ", ".join(f"{key} (a whole number from 1 to {MAX_SIZES[key]})" for key in wrong)
        raise CheckpointError(f"{path} gives no usable {ranges}: use the config.json that was saved with the weights.")
    _check_details(path, config, checked)
    return checked


def _check_details(path: Path, config: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Check the values of config.json that are no sizes. Those that it does not give have defaults."""
    epsilon, eos_id = config.get("layer_norm_epsilon", 1e-5), config.get("eos_token_id")
    rules = {
        "n_embd is no multiple of n_head": sizes["n_embd"] % sizes["n_head"] == 0,
        "layer_norm_epsilon is no number above 0 and below 1": type(epsilon) in (int, float) and 0 < epsilon < 1,
        "eos_token_id is no token id": eos_id is None or (type(eos_id) is int and eos_id >= 0),
        "activation_function is no name": isinstance(config.get("activation_function", ""), str),
        "scale_attn_weights is neither true nor false": isinstance(config.get("scale_attn_weights", True), bool),
        "scale_attn_by_inverse_layer_idx is neither true nor false": isinstance(
            config.get("scale_attn_by_inverse_layer_idx", False), bool
        ),
    }
    for problem, is_met in rules.items():
        if not is_met:
            raise CheckpointError(f"In {path}, {problem}: use the config.json that was saved with the weights.")


def _weight_files(directory: Path) -> list[Path]:
    """The files that the engine reads weights from: those that the index names, else `model.safetensors`, else all."""
    if (index := directory / INDEX).is_file():
        named = _read_json(index).get("weight_map")
        files = set(named.values()) if isinstance(named, dict) else set()
        if not files or any(Path(str(file)).name != file for file in files):
            raise CheckpointError(
                f"{index} does not name weight files in its own directory: save the checkpoint again."
            )
        return [directory / file for file in sorted(files)]
    whole = directory / WHOLE
    return [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))


def _check_weights(directory: Path, config: Mapping[str, int]) -> None:
    held: dict[str, tuple[str, Shape]] = {}
    for path in _weight_files(directory):
        if not path.is_file():
            raise Incomplete(f"{path}, which {INDEX} names, is missing: copy all files there.")
        held |= _read_header(path)
    expected = weight_shapes(config)
    if absent := [name for name in expected if name not in held]:
        more = f" and {len(absent) - 1} more weights" if len(absent) > 1 else ""
        raise CheckpointError(
            f"The weights in {directory} lack {absent[0]}{more} that config.json asks for: "
            "save the model again together with its own config.json."
        )
    for name, shape in expected.items():
        dtype, found = held[name]
        if found != shape or dtype not in DTYPES:
            raise CheckpointError(
                f"In {directory}, {name} is {dtype} {found} where config.json asks for {shape} in "
                f"{' or '.join(DTYPES)}: save the model again together with its own config.json."
            )


def _read_header(path: Path) -> dict[str, tuple[str, Shape]]:
    """Dtype and shape of every tensor in a safetensors file, by name without `transformer.`.

    Format (https://github.com/huggingface/safetensors#format): 8 bytes with the header's length n, little-endian; n
    bytes of JSON; then the data, whose last tensor ends at the end of the file. A file that was cut short is therefore
    recognised by its size.

    safetensors' own reader, `safe_open`, imports numpy at least (0.8.0, `framework="np"`), and the processes that
    resolve checkpoints load no such library: a supervisor stays small and can fork.

    Raises:
        Incomplete: the file is damaged.
    """

    def damaged(how: str) -> Incomplete:
        return Incomplete(f"{path} is damaged, {how}: copy or download it again.", (path.name,))

    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or num_header_bytes > min(MAX_HEADER_BYTES, num_bytes - 8):
            raise damaged("it has no safetensors header")
        try:
            header = json.loads(file.read(num_header_bytes))
            header.pop("__metadata__", None)
            num_data_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            tensors = {
                name.removeprefix("transformer."): (entry["dtype"], entry["shape"]) for name, entry in header.items()
            }
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise damaged("its safetensors header cannot be read") from error
    if num_bytes != (announced := 8 + num_header_bytes + num_data_bytes):
        raise damaged(f"it has {num_bytes} bytes and its header announces {announced}")
    return tensors


def _check_tokenizer(directory: Path, vocab_size: int) -> None:
    """Check that no token id is past the end of the embedding: encoding it would be an out-of-range lookup."""
    path = directory / "tokenizer.json"
    if path.is_file():
        values = _read_json(path)
        try:
            ids = [*values["model"]["vocab"].values()]
            ids += [token["id"] for token in values.get("added_tokens", ())]
            largest = max(ids)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a byte-level BPE tokenizer with a vocabulary: "
                "use the tokenizer.json that belongs to the model."
            ) from error
    else:
        path = directory / "vocab.json"
        largest = max(_read_json(path).values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{path} has token ids up to {largest}, and the model has {vocab_size} tokens: "
            "use the tokenizer that belongs to the model."
        )


def check_revision(directory: Path, revision: str) -> None:
    """Check that the weights in `directory` are those that the plan was made for.

    Args:
        revision: their digest (`shared.weights.weights_digest`); empty, nothing is checked.

    Raises:
        CheckpointError: they are others, or cannot be read.
    """
    if not revision:
        return
    try:
        digest = weights_digest(directory)
    except OSError as error:
        raise CheckpointError(f"The weights in {directory} cannot be read ({error.strerror}).") from error
    if digest != revision:
        raise CheckpointError(
            f"The weights in {directory} have changed since the slot plan was made (SHA-256 {digest[:12]}… instead of "
            f"{revision[:12]}…): restore them, or make a new plan with `tercet reload` or a restart."
        )
