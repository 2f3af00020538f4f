"""Checkpoints as transformers, peft and old scripts write them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.checkpoints.gguf_files import random_model
from tests.workers.checkpoints.small_checkpoints import CONFIG, change_json, weights, write
from tests.workers.helpers import EMBEDDED, write_slow_tokenizer
from workers.checkpoints.resolve import CheckpointError, resolve
from workers.text.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"


def save(directory: Path, architecture: str = "llama", **values: Any) -> Path:
    """A random model as transformers saves it, with the embedded tokenizer."""
    random_model(architecture, **values).save_pretrained(directory)
    shutil.copy(EMBEDDED / "tokenizer.json", directory)
    return directory


def rename(directory: Path, new_name: Callable[[str], str | None]) -> None:
    """Rename the weights; None leaves one out."""
    found = {new_name(name): tensor for name, tensor in load_file(directory / WEIGHTS).items()}
    save_file({name: tensor for name, tensor in found.items() if name}, directory / WEIGHTS)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_head_alone_stands_for_a_tied_embedding(architecture: str, tmp_path: Path) -> None:
    save(tmp_path, architecture, tie_word_embeddings=True)
    embedding = "transformer.wte.weight" if architecture == "gpt2" else "model.embed_tokens.weight"
    rename(tmp_path, lambda name: "lm_head.weight" if name == embedding else name)
    assert resolve("x", str(tmp_path)).vocab_size == 8192
    change_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lack (wte|embed_tokens)\.weight"):
        resolve("x", str(tmp_path))


def test_a_head_that_is_not_tied_must_be_there(tmp_path: Path) -> None:
    save(tmp_path)
    rename(tmp_path, lambda name: None if name == "lm_head.weight" else name)
    with pytest.raises(CheckpointError, match=r"lack lm_head\.weight"):
        resolve("x", str(tmp_path))


# Values of config.json, by what the refusal says.
REFUSED: dict[str, dict[str, Any]] = {
    "the number of heads must be a multiple of the number of key-value heads": {"num_key_value_heads": 3},
    r"no usable hidden_size \(a whole number from 1 to 32768\)": {"hidden_size": 10**9},
    "no usable num_hidden_layers": {"num_hidden_layers": 10**9},
    "no usable num_attention_heads": {"num_attention_heads": 0},
    "no usable intermediate_size": {"intermediate_size": "96"},
    "no usable max_position_embeddings": {"max_position_embeddings": None},
    "no usable vocab_size": {"vocab_size": -1},
    "no usable head_dim": {"head_dim": 10**6},
    "rms_norm_eps is no number": {"rms_norm_eps": True},
    "tie_word_embeddings is neither true nor false": {"tie_word_embeddings": "yes"},
    "attention_bias is neither true nor false": {"attention_bias": 1},
    "scaling 'yarn' are not served": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "scaling 'dynamic'": {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}},
    "cannot be served": {"rope_parameters": ["linear"]},
    "it lacks factor": {"rope_parameters": {"rope_type": "linear"}},
    "sliding window is not served": {"use_sliding_window": True, "sliding_window": 64},
    "unknown activation function 'xielu'": {"hidden_act": "xielu"},
}


@pytest.fixture(scope="module")
def llama_config(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((save(tmp_path_factory.mktemp("llama")) / "config.json").read_text())
    return config


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_not_served_is_refused_before_the_weights_are_fetched(
    sentence: str, llama_config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**llama_config, **REFUSED[sentence]}))
    with pytest.raises(CheckpointError, match=sentence):
        resolve("x", str(tmp_path))


def test_a_llama_needs_its_tokenizer_json(tmp_path: Path) -> None:
    """vocab.json and merges.txt do not say how texts are split into words; only GPT-2's do it all alike."""
    (save(tmp_path) / "tokenizer.json").rename(tmp_path / "vocab.json")
    (tmp_path / "merges.txt").touch()
    with pytest.raises(CheckpointError, match=r"lacks tokenizer\.json:"):
        resolve("x", str(tmp_path))


def test_a_chat_model_says_how_it_is_served(tmp_path: Path) -> None:
    save(tmp_path)
    assert (resolve("x", str(tmp_path)).note, resolve("x", str(tmp_path)).is_chat) == (None, False)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    note = "x is a chat model, served as a plain text model without its chat template."
    assert (resolve("x", str(tmp_path)).note, resolve("x", str(tmp_path)).is_chat) == (note, True)


def test_an_adapter_alone_is_refused_with_the_command_that_merges_it(tmp_path: Path) -> None:
    directory = tmp_path / "my adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}, directory / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"an adapter alone .*\(pip install peft\)") as caught:
        resolve("x", str(directory))
    found = re.search(r"merge it with (.*) and serve the directory \./my adapter-merged\.$", str(caught.value))
    assert found is not None
    program = shlex.split(found[1])[2]
    compile(program, "command", "exec")
    assert "'org/base'" in program
    assert repr(str(directory)) in program
    # Beside a whole model it does no harm: the model is what is served.
    write(directory)
    assert resolve("x", str(directory)).n_ctx == 32


@pytest.mark.parametrize("has_slow_tokenizer", [True, False])
def test_a_checkpoint_of_2019_gets_a_command_that_works(has_slow_tokenizer: bool, tmp_path: Path) -> None:
    """No model_type, the weights as a pickle of the old format with the mask as a weight, a slow tokenizer."""
    directory = tmp_path / "old"
    directory.mkdir()
    config = {key: CONFIG[key] for key in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")}
    (directory / "config.json").write_text(json.dumps({**config, "n_ctx": 32, "layer_norm_epsilon": 1e-5}))
    if has_slow_tokenizer:
        write_slow_tokenizer(directory)
    else:
        shutil.copy(EMBEDDED / "tokenizer.json", directory)
    state = {f"transformer.{name}": torch.from_numpy(value) for name, value in weights().items()}
    state |= {f"transformer.h.{layer}.attn.bias": torch.ones(1, 1, 32, 32) for layer in range(2)}
    state["lm_head.weight"] = state["transformer.wte.weight"]
    torch.save(state, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"only as a pickle \(pytorch_model\.bin\)") as caught:
        resolve("legal", str(directory))
    found = re.search(r"convert it with (.*) and serve the directory \./(\S+)\.$", str(caught.value))
    assert found is not None
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run(shlex.split(found[1]), cwd=tmp_path, env=environ, check=True, capture_output=True)
    served = resolve("legal", str(tmp_path / found[2]))
    assert (served.n_ctx, served.vocab_size) == (32, 8192)
    text = "The old man's  sea,\n and 日本 <|endoftext|> again"
    ids = Tokenizer.from_directory(Path(served.directory), 8192).encode(text)
    assert ids == Tokenizer.from_directory(EMBEDDED, 8192).encode(text)


def test_without_transformers_a_pickle_is_converted_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the container image: the command names no Python of this installation, which could not run it."""
    directory = write(tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = r"where transformers is installed \(pip install .*\), convert it with python3 -c"
    with pytest.raises(CheckpointError, match=words):
        resolve("legal", str(directory))


def test_a_repository_of_gguf_files_says_how_to_serve_one(tmp_path: Path) -> None:
    from workers.checkpoints.files import Incomplete, check_files

    with pytest.raises(Incomplete, match=r"`hf download org/x x\.Q4_K_M\.gguf` and serve it by its path"):
        check_files("org/x", ["README.md", "config.json", "x.Q4_K_M.gguf"])
