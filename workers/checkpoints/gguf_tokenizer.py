"""The tokenizer in a GGUF file's metadata, as the `tokenizer.json` of the tokenizers library.

Byte-level BPE only. A GGUF file names its pre-tokenizer instead of describing it; this module has the descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.checkpoints.files import CheckpointError

# Special tokens after which llama.cpp, too, ends a text, whatever the file says (`special_eog_ids` of llama-vocab.cpp).
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
# The kinds of tokens of the format.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {**_BYTE_LEVEL, "use_regex": False},
    ]


# By `tokenizer.ggml.pre`. Patterns of the published tokenizer.json of each model; llama.cpp's are the same
# (`llm_tokenizer_bpe` of llama-vocab.cpp).
_LLAMA_3, _QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
PRE_TOKENIZERS: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "llama-bpe": _split(_LLAMA_3),
    "qwen2": _split(_QWEN_2),
}
_OTHER_NAMES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def tokenizer_files(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The contents of `tokenizer.json` and `tokenizer_config.json`, by name.

    Raises:
        CheckpointError: the tokenizer is of a kind that is not served, or incomplete. The message completes
            "In FILE, ".
    """
    pre = _pre_tokenizer(metadata, architecture)
    tokens, merges = _strings(metadata, "tokens"), _strings(metadata, "merges")
    kinds = _kinds(metadata) or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise CheckpointError("the tokenizer's lists differ in length: convert the model again.")
    # Unused entries only fill the vocabulary up to the size of the embedding.
    vocab = {token: id_ for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != _UNUSED}
    if len(vocab) != len(tokens) - kinds.count(_UNUSED):
        raise CheckpointError("the tokenizer has a token twice: convert the model again.")
    added = [
        {
            "id": id_,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[id_] == _CONTROL,
        }
        for token, id_ in vocab.items()
        if kinds[id_] in {_CONTROL, _USER_DEFINED}
    ]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre == "llama-bpe",  # as in Llama 3's tokenizer.json
        "vocab": vocab,
        "merges": merges,
    }
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": _post_processor(metadata, pre, tokens),
        "decoder": _BYTE_LEVEL,
        "model": model,
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role in ("bos", "eos"):
        id_ = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if type(id_) is int and 0 <= id_ < len(tokens):
            config[f"{role}_token"] = tokens[id_]
    if isinstance(template := metadata.get("tokenizer.chat_template"), str):
        config["chat_template"] = template
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config}


def _post_processor(metadata: Mapping[str, Any], pre: str, tokens: Sequence[str]) -> dict[str, Any] | None:
    """What llama.cpp adds to a text. Without a flag, only Llama 3's tokenizer adds its start (`llama-vocab.cpp`)."""
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    named = {}
    for role, default in (("bos", pre == "llama-bpe"), ("eos", False)):
        id_ = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{role}_token", default) and type(id_) is int and 0 <= id_ < len(tokens):
            named[tokens[id_]] = {"id": tokens[id_], "ids": [id_], "tokens": [tokens[id_]]}
            template.insert(0 if role == "bos" else len(template), {"SpecialToken": {"id": tokens[id_], "type_id": 0}})
    pair = [*template, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": template, "pair": pair, "special_tokens": named} if named else None


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids of the tokens that end a text."""
    tokens = _strings(metadata, "tokens")
    kinds = _kinds(metadata)
    named = [metadata.get(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom")]
    known = [
        id_
        for id_, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in END_TOKENS
    ]
    return list(dict.fromkeys(id_ for id_ in (*named, *known) if type(id_) is int and 0 <= id_ < len(tokens)))


def _pre_tokenizer(metadata: Mapping[str, Any], architecture: str) -> str:
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        kind = {"llama": "SentencePiece", "bert": "WordPiece", "t5": "Unigram", "rwkv": "RWKV"}.get(
            str(model), "unknown"
        )
        raise CheckpointError(
            f"the tokenizer is {model!r} ({kind}), and Tercet serves byte-level BPE ('gpt2') only: serve a model with "
            "such a tokenizer, like SmolLM2, Llama 3, Qwen2 or GPT-2."
        )
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    pre = _OTHER_NAMES.get(name, name)
    # llama.cpp splits the texts of a file without a name in a way that fits no model; all GPT-2s have the same.
    if pre == "default" and architecture == "gpt2":
        return "gpt-2"
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"the pre-tokenizer is {pre!r}, and Tercet serves {', '.join(PRE_TOKENIZERS)}: serve another conversion of "
            "the model, or its safetensors."
        )
    return pre


def _strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise CheckpointError(f"the tokenizer has no {name}: convert the model again.")
    return found


def _kinds(metadata: Mapping[str, Any]) -> Sequence[int]:
    found = metadata.get("tokenizer.ggml.token_type", ())
    return found if isinstance(found, list) else []
