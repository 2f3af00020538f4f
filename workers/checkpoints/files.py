"""Which files make a checkpoint, and whether the files in a directory are whole and fit together.

Reads names and sizes, never weights; unpickles nothing and runs no code that comes with a checkpoint. Does not know the
hub or the slot plan.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shared.end_tokens import end_ids
from shared.errors import StartError
from shared.plain_files import open_plain, read_plain
from shared.weights import ADAPTER, INDEX, PICKLED, WHOLE, unindexed, weight_files, weights_digest
from workers.engine.model.config import HEAD, ModelConfig, own_name
from workers.text.tokenizer import load_bpe

PICKLES = (".bin", ".pt", ".pth", ".ckpt")
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # with the bytes of a number
# The safetensors library takes ten times as much. 512 layers of a dozen weights have a header of a megabyte.
MAX_HEADER_BYTES = 10_000_000
# Of a tokenizer, which may have more tokens than its model.
MAX_TOKEN_ID = 4_000_000
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
# Largest values of config.json. GPT-2 XL, the largest GPT-2 that OpenAI published, has 1600, 48, 25, 6400, 1024 and
# 50,257; descendants have longer contexts and larger vocabularies. A shape list or an allocation by an unbounded value
# would take this machine's memory before any weight is compared with it.
_GPT2_SIZES = {
    "n_embd": 16_384,
    "n_layer": 512,
    "n_head": 512,
    "n_inner": 131_072,
    "n_positions": 131_072,
    "vocab_size": 2_000_000,
}
# Qwen's largest dense model has 8192, 80, 64, 8, 29,568, 131,072, 128 and 152,064.
_LLAMA_SIZES = {
    "hidden_size": 32_768,
    "num_hidden_layers": 512,
    "num_attention_heads": 512,
    "num_key_value_heads": 512,
    "intermediate_size": 262_144,
    "max_position_embeddings": 2_000_000,
    "head_dim": 1024,
    "vocab_size": 2_000_000,
}
# A prompt's token, one that is generated, and one more, with which int8 is checked.
MIN_POSITIONS = 3
MAX_SIZES = {"gpt2": _GPT2_SIZES, "llama": _LLAMA_SIZES, "qwen2": _LLAMA_SIZES, "qwen3": _LLAMA_SIZES}
ADAPTER_CONFIG = "adapter_config.json"


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
        if ADAPTER_CONFIG in files:
            _refuse_adapter(directory, files)
        # First, so that another architecture is refused as such and not for its missing files.
        config = read_config(directory) if "config.json" in files else None
        check_files(str(directory), files, config)
        assert config is not None
        _check_weights(directory, config)
        _check_tokenizer(directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory} cannot be read ({error.strerror or error}): let the user that Tercet runs as read it."
        ) from error
    return config.n_positions, config.vocab_size


def check_files(source: str, files: Collection[str], config: ModelConfig | None = None) -> None:
    """Check that no file is missing.

    Args:
        source: what holds the files, as transformers would load it: a directory, or a repository of the hub.
        config: what `read_config` reads; None without a config.json.

    Raises:
        Incomplete: files are missing, or the weights are there only as pickles.
    """
    pickles = sorted(file for file in files if file.endswith(PICKLES))
    has_weights = WHOLE in files or INDEX in files
    if not has_weights and not any(name in files for name in PICKLED):
        try:
            has_weights = bool(unindexed([file for file in files if "/" not in file]))
        except ValueError as error:
            raise CheckpointError(f"In {source}, {error}: name a checkpoint that transformers can load.") from error
    if pickles and not has_weights:
        converted = f"{Path(source).name}-safetensors"
        # Checkpoints of 2019 do not name their model_type, by which the Auto classes choose.
        is_gpt2 = config is not None and config.architecture == "gpt2"
        model = "GPT2LMHeadModel" if is_gpt2 else "AutoModelForCausalLM"
        tokenizer = (
            "PreTrainedTokenizerFast"
            if "tokenizer.json" in files
            else "GPT2TokenizerFast"
            if is_gpt2
            else "AutoTokenizer"
        )
        code = (
            f"from transformers import {model} as Model, {tokenizer} as Tokenizer; "
            f"[each.from_pretrained({source!r}).save_pretrained({converted!r}) "
            "for each in (Model, Tokenizer)]"
        )
        # Serving does not need transformers, so it may be on another machine only.
        is_here = importlib.util.find_spec("transformers") is not None
        python = sys.executable if is_here else "python3"
        where = "" if is_here else "where transformers is installed (pip install transformers torch), "
        raise Incomplete(
            f"{source} has its weights only as a pickle ({pickles[0]}), which can run code when it "
            f"is read, so Tercet reads safetensors only: if you trust it, {where}convert it with "
            f"{shlex.join([python, '-c', code])} and serve the directory ./{converted}."
        )
    ggufs = sorted(file for file in files if file.lower().endswith(".gguf"))
    if ggufs and not has_weights:
        raise Incomplete(
            f"{source} has its weights only as GGUF: download a file with `hf download {source} {ggufs[0]}` and serve "
            f"it by its path, as in TERCET_MODELS=NAME=/path/{Path(ggufs[0]).name}."
        )
    missing = [] if "config.json" in files else ["config.json"]
    if not has_weights:
        missing.append(WHOLE)
    # Of other architectures, vocab.json and merges.txt do not say how texts are split into words.
    may_be_slow = config is None or config.architecture == "gpt2"
    if "tokenizer.json" not in files and not (may_be_slow and {"vocab.json", "merges.txt"} <= set(files)):
        missing.append("tokenizer.json" + " (or vocab.json and merges.txt)" * may_be_slow)
    if missing:
        raise Incomplete(f"{source} lacks {', '.join(missing)}: name a checkpoint that has all of them.")


def _refuse_adapter(directory: Path, files: Collection[str]) -> None:
    """
    Raises:
        CheckpointError: the directory holds an adapter of peft, and no model that it was merged with.
    """
    if any(file.endswith(".safetensors") and not file.startswith(ADAPTER) for file in files):
        return
    base = _read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path") or "organisation/base-model"
    merged = f"{directory.name}-merged"
    code = (
        "from peft import AutoPeftModelForCausalLM as Model; from transformers import AutoTokenizer as Tokenizer; "
        f"Model.from_pretrained({str(directory)!r}).merge_and_unload().save_pretrained({merged!r}); "
        f"Tokenizer.from_pretrained({str(base)!r}).save_pretrained({merged!r})"
    )
    raise CheckpointError(
        f"{directory} holds an adapter alone ({ADAPTER_CONFIG}), and Tercet serves whole models: where peft is "
        f"installed (pip install peft), merge it with {shlex.join(['python3', '-c', code])} and serve the directory "
        f"./{merged}."
    )


def needed_files(listed: Collection[str]) -> list[str]:
    """The files that Tercet reads, of those in a repository: tokenizer and weights, no code. The weights are last."""
    slow = ["vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"]
    tokenizer = [
        "tokenizer_config.json",
        "chat_template.jinja",
        *(["tokenizer.json"] if "tokenizer.json" in listed else slow),
    ]
    shards = sorted(file for file in listed if file.endswith(".safetensors") and "/" not in file)
    if INDEX in listed and (named := [file for file in shards if file.startswith("model-")]):
        shards = named
    weights = [WHOLE] if WHOLE in listed else [INDEX, *shards]
    return [file for file in ("generation_config.json", *tokenizer, *weights) if file in listed]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(read_plain(path))
    except (ValueError, RecursionError) as error:
        raise Incomplete(f"{path} is damaged, it is not JSON: copy or download it again.", (path.name,)) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} does not hold a JSON object: copy the right file there.")
    return values


def read_config(directory: Path) -> ModelConfig:
    """The hyperparameters in config.json, each of them checked.

    Raises:
        Incomplete: it is not JSON.
        CheckpointError: its architecture is not served, a value is missing or no such model can have it, or it asks to
            run code.
    """
    path = directory / "config.json"
    config = _read_json(path)
    if "auto_map" in config:
        raise CheckpointError(
            f"{path} asks to run code that comes with the checkpoint (auto_map), and Tercet never "
            f"does: serve a checkpoint of a plain architecture ({', '.join(MAX_SIZES)})."
        )
    architecture = config.get("model_type")
    if architecture is None and {"n_embd", "n_layer"} <= config.keys():  # as of 2019
        architecture = "gpt2"
    if not isinstance(architecture, str) or architecture not in MAX_SIZES:
        raise CheckpointError(
            f"{path} describes the architecture {architecture!r}, and Tercet serves {', '.join(MAX_SIZES)}: "
            "name a checkpoint whose model_type is one of these."
        )
    found = _gpt2_sizes(config) if architecture == "gpt2" else _llama_sizes(config)
    most = MAX_SIZES[architecture]
    sizes = {key: value for key, value in found.items() if type(value) is int and 0 < value <= most[key]}
    if wrong := sorted(most.keys() - sizes.keys()):
        ranges = ", ".join(f"{key} (a whole number from 1 to {most[key]})" for key in wrong)
        raise CheckpointError(f"{path} gives no usable {ranges}: use the config.json that was saved with the weights.")
    rules = _rules(config, architecture, sizes)
    try:
        end_ids(config)
        if (generation := directory / "generation_config.json").exists():
            end_ids(_read_json(generation))
    except ValueError as error:
        rules[str(error)] = False
    for problem, is_met in rules.items():
        if not is_met:
            raise CheckpointError(f"In {path}, {problem}: use the config.json that was saved with the weights.")
    try:
        return ModelConfig.from_json({**config, **sizes, "model_type": architecture})
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{path} cannot be served: {error}. Serve a model without this.") from error


def _gpt2_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config.get("n_embd")
    return {
        "vocab_size": config.get("vocab_size"),
        "n_positions": config.get("n_positions", config.get("n_ctx")),
        "n_embd": width,
        "n_layer": config.get("n_layer"),
        "n_head": config.get("n_head"),
        "n_inner": config.get("n_inner") or (4 * width if isinstance(width, int) else None),
    }


def _llama_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    found = {key: config.get(key) for key in _LLAMA_SIZES}
    width, heads = found["hidden_size"], found["num_attention_heads"]
    if found["num_key_value_heads"] is None:
        found["num_key_value_heads"] = heads
    if found["head_dim"] is None and config["model_type"] == "qwen3":
        found["head_dim"] = 128  # transformers' default
    elif found["head_dim"] is None and type(width) is int and type(heads) is int and heads > 0:
        found["head_dim"] = width // heads
    return found


def _rules(config: Mapping[str, Any], architecture: str, sizes: Mapping[str, int]) -> dict[str, bool]:
    """Values of config.json that are no sizes: whether each is as it must be, by the clause that says it is not.
    `ModelConfig` knows what the engine computes."""
    is_gpt2 = architecture == "gpt2"
    epsilon, activation = ("layer_norm_epsilon", "activation_function") if is_gpt2 else ("rms_norm_eps", "hidden_act")
    flags = ("scale_attn_weights", "scale_attn_by_inverse_layer_idx") if is_gpt2 else ("attention_bias", "mlp_bias")
    positions = "n_positions" if is_gpt2 else "max_position_embeddings"
    return {
        f"{epsilon} is no number above 0 and below 1": _is_epsilon(config.get(epsilon, 1e-5)),
        f"{activation} is no name": isinstance(config.get(activation, ""), str),
        **{
            f"{name} is neither true nor false": isinstance(config.get(name, False), bool)
            for name in (*flags, "tie_word_embeddings")
        },
        "head_dim is odd": is_gpt2 or sizes["head_dim"] % 2 == 0,
        f"{positions} is below {MIN_POSITIONS}": sizes[positions] >= MIN_POSITIONS,
    }


def _is_epsilon(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1


def _check_weights(directory: Path, config: ModelConfig) -> None:
    held: dict[str, tuple[str, list[int]]] = {}
    try:
        paths = weight_files(directory)
    except ValueError as error:
        raise CheckpointError(f"In {directory}, {error}: save the checkpoint again.") from error
    for path in paths:
        if not path.exists():
            raise Incomplete(f"{path}, which {INDEX} names, is missing: copy all files there.")
        header = _read_header(path)
        if twice := held.keys() & header.keys():
            raise CheckpointError(f"The weights in {directory} have {min(twice)} in two files: save the model again.")
        held |= header
    expected = config.weight_shapes()
    if not config.has_own_head and config.embedding_name not in held and HEAD in held:
        held[config.embedding_name] = held[HEAD]  # the same matrix, saved under its other name
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


def _read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor in a safetensors file, by name without `_PREFIXES`.

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

    with open_plain(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or num_header_bytes > min(MAX_HEADER_BYTES, num_bytes - 8):
            raise damaged("it has no safetensors header")
        try:
            header = msgspec.json.decode(file.read(num_header_bytes), type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            tensors = {name: _decode_tensor(raw) for name, raw in header.items()}
        except (ValueError, RecursionError) as error:  # msgspec's are ValueErrors
            raise damaged("its safetensors header cannot be read") from error
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, tensor_end = tensor.data_offsets
        size = DTYPES.get(tensor.dtype)
        if start != end or tensor_end < start or (size and tensor_end - start != size * math.prod(tensor.shape)):
            raise damaged(f"the data of {name!r} are not where its safetensors header says")
        end = tensor_end
    if num_bytes != (announced := 8 + num_header_bytes + end):
        raise damaged(f"it has {num_bytes} bytes and its header announces {announced}")
    found = {own_name(name): (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    if len(found) < len(tensors):
        raise CheckpointError(f"{path} has a weight twice, under names with other prefixes: save the model again.")
    return found


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header. `data_offsets`: first byte and the one after the last, in the data."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


_decode_tensor = msgspec.json.Decoder(_Tensor).decode


def _check_tokenizer(directory: Path) -> None:
    """Check that the tokenizer is byte-level BPE, and that the tokenizers library can load it."""
    path = directory / "tokenizer.json"
    try:
        if path.exists():
            values = _read_json(path)
            ids = [*values["model"]["vocab"].values()]
            ids += [token["id"] for token in values.get("added_tokens") or ()]
            if not any(_has_byte_level(values.get(part)) for part in ("pre_tokenizer", "decoder")):
                raise LookupError("ByteLevel")
        else:
            path = directory / "vocab.json"
            ids = [*_read_json(path).values()]
            if (added := directory / "added_tokens.json").exists():
                ids += _read_json(added).values()
            read_plain(directory / "merges.txt")
        if wrong := next((id_ for id_ in ids if type(id_) is not int or id_ < 0), None):
            raise ValueError(wrong)
        largest = max(ids)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a byte-level BPE tokenizer with a vocabulary, and Tercet serves no other "
            "(SentencePiece, WordPiece): use the tokenizer.json that belongs to the model, or another model."
        ) from error
    if largest > MAX_TOKEN_ID:
        raise CheckpointError(f"{path} has token ids up to {largest}: use the tokenizer that belongs to the model.")
    try:
        load_bpe(directory).encode("a")
    except OSError:
        raise
    except BaseException as error:  # a panic of the tokenizers library, which is written in Rust, is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        reason = " ".join(str(error).split())[:200]
        raise Incomplete(
            f"{path} cannot be loaded, the tokenizer is damaged ({reason}): use the one that belongs to the model.",
            (path.name,),
        ) from error


def _has_byte_level(part: Any) -> bool:
    """Whether a part of tokenizer.json is, or is a sequence with, the byte-level alphabet."""
    if not isinstance(part, dict):
        return False
    inner = [*part.get("pretokenizers", ()), *part.get("decoders", ())]
    return part.get("type") == "ByteLevel" or any(
        isinstance(each, dict) and each.get("type") == "ByteLevel" for each in inner
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
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"The weights in {directory} cannot be read ({reason}).") from error
    if digest != revision:
        raise CheckpointError(
            f"The weights in {directory} have changed since the slot plan was made (SHA-256 {digest[:12]}… instead of "
            f"{revision[:12]}…): restore them, or make a new plan with `tercet reload` or a restart."
        )
