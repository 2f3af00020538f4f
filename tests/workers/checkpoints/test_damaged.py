"""Damaged checkpoints: whatever stands in a place of a file, the answer is one sentence, or the file is whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest

from shared.weights import INDEX, WHOLE, weights_digest
from tests.workers.checkpoints.small_checkpoints import CONFIG, weights, write
from workers.checkpoints.files import CheckpointError, Incomplete, inspect

# JSON texts that may stand where another value belongs.
RUBBISH = (
    *("null", "true", "-1", "0", "0.5", "1e999", "NaN", "1" * 30, "1" * 5000, '"x"', '""', r'"\ud800"', r'"\u0000"'),
    *("[]", "{}", "[null]", '[["x"]]', '{"x": {}}', "[" * 3000 + "]" * 3000, "", "{"),
)
PLACE = "@place@"
SHARD = "model-00001-of-00001.safetensors"
Tree = Any


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """With few tokens: a whole vocabulary takes most of the time of a check."""
    directory = write(tmp_path / "c")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    model = tokenizer["model"]
    tokenizer["model"] = {**model, "vocab": dict([*model["vocab"].items()][:300]), "merges": model["merges"][:3]}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def answer(directory: Path) -> str | None:
    """What `inspect` says: None if it takes the checkpoint. Any other exception than its own fails the test."""
    try:
        inspect(directory)
    except CheckpointError as error:
        text = str(error)
        assert "\n" not in text
        assert text.endswith(".")
        return text
    return None


def places(tree: Tree) -> Iterator[list[Any]]:
    """The keys that lead to each place of a tree, without the many entries of a vocabulary."""
    if isinstance(tree, dict | list):
        keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
        for key in [*keys[:3], *keys[-3:]] if len(keys) > 40 else keys:
            yield [key]
            yield from ([key, *inner] for inner in places(tree[key]))


def spoiled(tree: Tree) -> Iterator[str]:
    """JSON texts of the tree with rubbish in one place."""
    yield from RUBBISH
    for *outer, last in places(tree):
        changed = json.loads(json.dumps(tree))
        reduce(getitem, outer, changed)[last] = PLACE
        text = json.dumps(changed)
        for rubbish in RUBBISH:
            yield text.replace(json.dumps(PLACE), rubbish, 1)


def header_and_data(path: Path) -> tuple[Tree, bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(path: Path, header: str, data: bytes) -> None:
    text = header.encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


FAMILY = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "head_dim": 4,
    "vocab_size": 8192,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "layer_types": ["full_attention"],
}
TREES: list[tuple[str, Tree]] = [
    ("config.json", {**CONFIG, "eos_token_id": [1], "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}),
    *(("config.json", {"model_type": name, **FAMILY}) for name in ("llama", "qwen2", "qwen3")),
    ("generation_config.json", {"eos_token_id": [1, 2]}),
    (INDEX, {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights(), SHARD)}),
]


@pytest.mark.parametrize(("name", "tree"), TREES)
def test_a_file_with_rubbish(checkpoint: Path, name: str, tree: Tree) -> None:
    if name == INDEX:
        (checkpoint / WHOLE).rename(checkpoint / SHARD)
    for text in spoiled(tree):
        (checkpoint / name).write_text(text)
        answer(checkpoint)


def test_a_weight_header_with_rubbish(checkpoint: Path) -> None:
    path = checkpoint / WHOLE
    header, data = header_and_data(path)
    few, others = (dict(each) for each in ([*header.items()][:3], [*header.items()][3:]))
    for text in spoiled({"__metadata__": {"format": "pt"}, **few}):
        whole = f"{text[:-1]}, {json.dumps(others)[1:]}" if text.startswith('{"__metadata__"') else text
        write_header(path, whole, data)
        answer(checkpoint)


@pytest.mark.parametrize(
    "offsets",
    [["0", "16"], [0.0, 16.0], [-16, 0], [16, 0], [0, 8], [8, 24], [0, 1 << 70], [0], [0, 16, 32], None, "0-16"],
)
def test_offsets_that_do_not_fit_the_data_are_damage(checkpoint: Path, offsets: object) -> None:
    """Overlapping, reversed or negative ones, and those of another size: safetensors refuses them only at the load."""
    path = checkpoint / WHOLE
    header, data = header_and_data(path)
    name = min(header, key=lambda each: header[each].get("data_offsets", [1 << 60]))
    assert header[name]["data_offsets"][0] == 0
    header[name]["data_offsets"] = offsets
    write_header(path, json.dumps(header), data)
    with pytest.raises(Incomplete, match="is damaged"):
        inspect(checkpoint)


def test_a_header_of_megabytes_is_refused_unread(checkpoint: Path) -> None:
    path = checkpoint / WHOLE
    header, data = header_and_data(path)
    write_header(path, json.dumps(header) + " " * 10_000_000, data)
    with pytest.raises(Incomplete, match="no safetensors header"):
        inspect(checkpoint)


def test_an_index_that_names_no_file_of_the_directory(checkpoint: Path) -> None:
    (checkpoint / WHOLE).rename(checkpoint / SHARD)
    for name in ("..", ".", "", "a/b", "/etc/passwd", "x" * 300, "a\0b"):
        (checkpoint / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(weights(), name)}))
        assert answer(checkpoint) is not None


def test_a_tokenizer_with_rubbish(checkpoint: Path) -> None:
    path = checkpoint / "tokenizer.json"
    for text in spoiled(json.loads(path.read_text())):
        path.write_text(text)
        answer(checkpoint)


@pytest.mark.parametrize("id_", ["7", None, -1, 0.5, True, [1], {}])
@pytest.mark.parametrize("file", ["tokenizer.json", "added tokens", "vocab.json", "added_tokens.json"])
def test_a_token_id_that_is_none_is_refused(checkpoint: Path, file: str, id_: object) -> None:
    path = checkpoint / "tokenizer.json"
    values = json.loads(path.read_text())
    if file == "tokenizer.json":
        values["model"]["vocab"]["zzz"] = id_
    elif file == "added tokens":
        values["added_tokens"] = [{"id": id_, "content": "zzz"}]
    else:
        path.unlink()
        vocabulary = values["model"]["vocab"]
        (checkpoint / "merges.txt").write_text("")
        (checkpoint / "vocab.json").write_text(json.dumps(vocabulary | ({"z": id_} if file == "vocab.json" else {})))
        (checkpoint / "added_tokens.json").write_text(json.dumps({"<x>": id_} if file == "added_tokens.json" else {}))
    if path.exists():
        path.write_text(json.dumps(values))
    assert "is not a byte-level BPE tokenizer" in (answer(checkpoint) or "")


@pytest.mark.parametrize("name", ["config.json", WHOLE, "tokenizer.json"])
def test_bytes_that_are_cut_or_flipped(checkpoint: Path, name: str) -> None:
    rng = random.Random(1)
    path = checkpoint / name
    whole = path.read_bytes()
    span = min(len(whole), 4000)
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 3, 30))):
            content[rng.randrange(span)] = rng.randrange(256)
        path.write_bytes(content)
        answer(checkpoint)
        path.write_bytes(whole[: rng.randrange(len(whole))])
        assert answer(checkpoint) is not None


def test_files_that_are_no_files(checkpoint: Path) -> None:
    for name in ("config.json", WHOLE, "tokenizer.json"):
        saved = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        (checkpoint / name).mkdir()
        assert answer(checkpoint) is not None
        shutil.rmtree(checkpoint / name)
        (checkpoint / name).symlink_to(name)  # to itself
        assert answer(checkpoint) is not None
        (checkpoint / name).unlink()
        (checkpoint / name).write_bytes(saved)
    assert answer(checkpoint) is None


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json", WHOLE, "x.safetensors"])
def test_only_plain_files_that_are_used_are_read_and_only_to_a_bound(kind: str, name: str, checkpoint: Path) -> None:
    """A pipe would be waited for, and a device or 1 TB of nothing read into memory."""
    path = checkpoint / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    began_at = time.monotonic()
    reason = answer(checkpoint)
    assert time.monotonic() - began_at < 20
    assert (reason is None) is (name == "x.safetensors")
    if name == "x.safetensors":
        assert weights_digest(checkpoint)


def test_many_large_dimensions_are_refused_at_once(checkpoint: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**62] * 60_000, "data_offsets": [0, 0]}}).encode()
    (checkpoint / WHOLE).write_bytes(len(header).to_bytes(8, "little") + header)
    began_at = time.monotonic()
    assert "header cannot be read" in (answer(checkpoint) or "")
    assert time.monotonic() - began_at < 5
