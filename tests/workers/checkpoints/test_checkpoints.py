"""Checkpoints: which are accepted, which are refused, and how a faulty hub is handled.

The hub is a small server on 127.0.0.1 that implements the part of the hub's API that a download needs. Its client is
huggingface_hub itself, in the child process that `resolve` starts.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from shared.weights import INDEX, weights_digest
from tests.workers.checkpoints.hub_server import COMMIT, Hub
from tests.workers.checkpoints.small_checkpoints import CONFIG, write
from tests.workers.helpers import ROOT, run_python
from workers.checkpoints.child_process import NotDelivered
from workers.checkpoints.resolve import EMBEDDED_SHA256, CheckpointError, resolve

# Named models and directories --------------------------------------------------------------------


def test_embedded() -> None:
    found = resolve("embedded")
    assert (found.name, found.source, found.warning) == ("embedded", "embedded", None)
    assert (found.n_ctx, found.vocab_size) == (1024, 8192)
    assert weights_digest(Path(found.directory)) == EMBEDDED_SHA256
    assert Path(found.directory) == ROOT / "workers/checkpoints/embedded"


@pytest.mark.parametrize("name", ["synthetic:small", "synthetic:medium"])
def test_synthetic_has_gpt2s_vocabulary_and_the_embedded_tokenizer(name: str) -> None:
    found = resolve(name)
    assert (found.name, found.source, found.n_ctx, found.vocab_size) == (name, "synthetic", 1024, 50257)
    assert (Path(found.directory) / "tokenizer.json").is_file()


def test_an_unknown_name_without_a_source_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"legal=/path/to/checkpoint.* small, medium, smollm2, embedded"):
        resolve("legal")


def test_resolving_imports_no_heavy_library() -> None:
    code = (
        "import sys; from workers.checkpoints.resolve import resolve; resolve('embedded'); "
        "print({'torch', 'transformers', 'huggingface_hub', 'numpy', 'falcon', 'gunicorn'} & sys.modules.keys())"
    )
    assert run_python(code).stdout.strip() == "set()"


@pytest.mark.parametrize("source", ["{}", "models/legal", "./models/legal", "~/models/legal"])
def test_directory(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    directory = write(tmp_path / "models/legal")
    found = resolve("legal", source.format(directory))
    assert (found.name, found.directory, found.source) == ("legal", str(directory), "directory")
    assert (found.warning, found.n_ctx, found.vocab_size) == (None, 32, 8192)


def test_n_ctx_is_an_older_name_of_n_positions(tmp_path: Path) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "n_positions"}
    assert resolve("old", str(write(tmp_path, {**config, "n_ctx": 32}))).n_ctx == 32


def _make_file(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.write_text("")


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def _cut(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def _write_with(field: str, value: object, directory: Path) -> None:
    write(directory, {**CONFIG, field: value})


def _replace_by_index(file: str, directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / INDEX)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"wte.weight": file}}))


def _change_tokenizer(change: Callable[[Any], object], directory: Path) -> None:
    values = json.loads((directory / "tokenizer.json").read_text())
    change(values)
    (directory / "tokenizer.json").write_text(json.dumps(values))


def _nested(depth: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [_nested(depth - 1)] if depth else []}


EXPRESSION = {"type": "Replace", "pattern": {"Regex": "(("}, "content": ""}
# The load would refuse these, too late.
DAMAGED_TOKENIZERS: dict[str, Callable[[Any], object]] = {
    "dropout": lambda v: v["model"].update(dropout=7.5),
    "expression": lambda v: v.update(normalizer=EXPRESSION),
    "depth": lambda v: v.update(normalizer=_nested(400)),
    "merge": lambda v: v["model"]["merges"].append(["qqq", "zzz"]),
}
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "is not a directory"),
    "a file": (_make_file, "is not a directory"),
    "empty": (_empty, r"lacks config\.json, model\.safetensors, tokenizer\.json"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json is damaged"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), "not hold a JSON object"),
    "not served": (lambda d: write(d, {**CONFIG, "model_type": "mamba"}), "'mamba'.*serves gpt2, llama, qwen2, qwen3"),
    "no architecture": (lambda d: write(d, {"vocab_size": 8192}), "describes the architecture None"),
    "no sizes": (
        lambda d: write(d, {"model_type": "gpt2"}),
        r"no usable n_embd \(.*, n_head \(.*, n_inner \(.*, n_layer \(",
    ),
    **{
        f"{field} {value}": (partial(_write_with, field, value), rf"no usable {field} \(a whole number from 1 to \d+\)")
        for field in ("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "vocab_size")
        for value in (10**9, 10**18, -1, 1e9, True, "12", [12])
    },
    **{
        f"{number} positions": (partial(_write_with, "n_positions", number), "n_positions is below 3")
        for number in (1, 2)
    },
    "end token out of range": (partial(_write_with, "eos_token_id", 10**100), "eos_token_id is no token id"),
    **{
        f"tokenizer with a wrong {name}": (partial(_change_tokenizer, change), "tokenizer is damaged")
        for name, change in DAMAGED_TOKENIZERS.items()
    },
    "deep JSON": (lambda d: (d / "config.json").write_text("[" * 100_000), r"config\.json is damaged, it is not JSON"),
    "heads": (lambda d: write(d, {**CONFIG, "n_head": 3}), "the width must be a multiple of the number of heads"),
    "epsilon": (lambda d: write(d, {**CONFIG, "layer_norm_epsilon": float("nan")}), "layer_norm_epsilon is no number"),
    "end token": (lambda d: write(d, {**CONFIG, "eos_token_id": [1, "2"]}), "eos_token_id is no token id"),
    "end token of generation": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": -1}'),
        "eos_token_id is no token id",
    ),
    "sentencepiece": (
        lambda d: (d / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"▁a": 0}}}'),
        "not a byte-level BPE",
    ),
    "another vocabulary": (
        lambda d: write(d, {**CONFIG, "vocab_size": 50257}),
        r"wte\.weight is F32 \[8192, 4\] where config\.json asks for \[50257, 4\]",
    ),
    "a layer short": (
        lambda d: write(d, {**CONFIG, "n_layer": 3}),
        r"lack h\.2\.ln_1\.weight and 11 more weights",
    ),
    "quantised": (
        lambda d: write(d, CONFIG, {"h.0.mlp.c_fc.weight": np.zeros((4, 16), np.int8)}),
        r"h\.0\.mlp\.c_fc\.weight is I8",
    ),
    "cut short": (lambda d: _cut(d / "model.safetensors", 4000), "is damaged, it has 4000 bytes"),
    "cut in the header": (lambda d: _cut(d / "model.safetensors", 40), "no safetensors header"),
    "cut to nothing": (lambda d: _cut(d / "model.safetensors", 0), "no safetensors header"),
    "a pointer of git-lfs": (
        lambda d: (d / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "no safetensors header",
    ),
    "header not JSON": (
        lambda d: (d / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"[1]]"),
        "header cannot be read",
    ),
    "no vocabulary": (lambda d: (d / "tokenizer.json").write_text("{}"), "not a byte-level BPE"),
    "a shard is missing": (partial(_replace_by_index, "a.safetensors"), r"a\.safetensors.* is missing"),
    "files elsewhere": (partial(_replace_by_index, "../x"), "does not name weight files in its own directory"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_directory_that_is_refused(case: str, tmp_path: Path) -> None:
    damage, sentence = BAD[case]
    directory = write(tmp_path / "bad")
    damage(directory)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        resolve("bad", str(directory))
    assert str(directory) in str(caught.value)
    assert str(caught.value).endswith(".")


# The hub -----------------------------------------------------------------------------------------


def test_fetched_once_and_then_without_a_hub(hub: Hub) -> None:
    reports: list[tuple[str, float]] = []
    first = resolve("tiny", "org/tiny", on_progress=lambda stage, fraction: reports.append((stage, fraction)))
    assert (first.name, first.source, first.n_ctx) == ("tiny", f"hub:org/tiny@{COMMIT}", 32)
    assert first.warning is None
    assert reports[0] == ("Asking the model hub for org/tiny", 0.0)
    assert [stage for stage, fraction in reports if fraction == 1.0][-1] == "Fetching model.safetensors"
    assert all(0 <= fraction <= 1 for _, fraction in reports)

    fetched = {path.partition("/main/")[2] or path.partition(f"/{COMMIT}/")[2] for path in hub.requests}
    assert fetched - {""} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in Path(first.directory).iterdir()} == fetched - {""}

    hub.requests.clear()
    hub.status = 500
    assert resolve("tiny", "org/tiny") == first
    assert hub.requests == []


@pytest.mark.parametrize("harm", ["missing", "cut short"])
def test_an_incomplete_cache_is_completed(hub: Hub, harm: str) -> None:
    first = resolve("tiny", "org/tiny")
    file = Path(first.directory) / "model.safetensors"
    if harm == "missing":
        file.unlink()
    else:
        _cut(file.resolve(), 5000)
    assert resolve("tiny", "org/tiny") == first
    assert file.stat().st_size == len(hub.repositories["org/tiny"]["model.safetensors"])


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])  # SHA-256, and git's object id
def test_a_file_damaged_in_transit_is_refused(hub: Hub, file: str) -> None:
    hub.spoiled = file
    sentence = rf"^{re.escape(file.capitalize())} arrived damaged from the model hub: "
    with pytest.raises(CheckpointError, match=sentence):
        resolve("tiny", "org/tiny")
    hub.spoiled = None
    assert resolve("tiny", "org/tiny").source == f"hub:org/tiny@{COMMIT}"


@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_a_pinned_revision_is_fetched_and_then_served_from_the_cache(hub: Hub, revision: str) -> None:
    found = resolve("tiny", f"org/tiny@{revision}")
    assert found.source == f"hub:org/tiny@{COMMIT}"
    assert Path(found.directory).name == COMMIT
    assert not any("/main" in path for path in hub.requests)
    hub.requests.clear()
    assert resolve("tiny", f"org/tiny@{revision}") == found
    assert hub.requests == []


def test_a_revision_that_the_hub_lacks_is_refused_by_its_name(hub: Hub) -> None:
    with pytest.raises(CheckpointError, match=r"^The model hub has no org/tiny@v9, or .*--revision v9"):
        resolve("tiny", "org/tiny@v9")
    with pytest.raises(CheckpointError, match="names no revision after the @"):
        resolve("tiny", "org/tiny@")


def test_a_file_without_end_is_refused_a_tenth_beyond_its_size(hub: Hub, tmp_path: Path) -> None:
    hub.endless = "model.safetensors"
    size = len(hub.repositories["org/tiny"][hub.endless])
    with pytest.raises(NotDelivered, match=rf"^More of model\.safetensors arrived than its {size:,} bytes: to serve "):
        resolve("tiny", "org/tiny")
    assert not unfinished(tmp_path)
    assert hub.num_sent < size + (64 << 20)  # what sockets and a chunk hold


FETCH_WITH_LITTLE_PATIENCE = """
import sys, time
from workers.checkpoints import child_process, hub
child_process.STALL_S = 1.5
sys.argv = ["", "", "", "org/tiny", "", str(time.monotonic() + 60)]
hub.main()
"""


@pytest.mark.parametrize("fault", ["dripped", "stalled"])
def test_a_file_that_arrives_too_slowly_is_given_up(hub: Hub, fault: str, tmp_path: Path) -> None:
    setattr(hub, fault, "model.safetensors")
    command = [sys.executable, "-c", FETCH_WITH_LITTLE_PATIENCE]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        *_, last = child.stdout
    kind, reason, _ = json.loads(last)
    assert (kind, reason) == ("failed", "less than 256 kB of model.safetensors arrived in 1.5 s")
    assert not unfinished(tmp_path)


@pytest.mark.parametrize(
    ("fault", "number"),
    [("dripped", signal.SIGTERM), ("stalled", signal.SIGINT), ("stalled", signal.SIGKILL)],
)
def test_a_download_that_is_stopped_leaves_nothing_behind(
    hub: Hub, fault: str, number: signal.Signals, tmp_path: Path
) -> None:
    setattr(hub, fault, "model.safetensors")
    # A process that has inherited that SIGINT is ignored would ignore it.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from workers.checkpoints.resolve import resolve; resolve('tiny', 'org/tiny')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        assert hub.has_stalled.wait(60)
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(number)
    child.wait(20)  # it ends with its parent
    assert not unfinished(tmp_path)


def test_a_list_of_files_without_end_takes_little_memory(hub: Hub) -> None:
    hub.page = bytes(1536 << 20)
    with pytest.raises(NotDelivered, match=r"^No model hub answered: "):
        resolve("tiny", "org/tiny")


def unfinished(directory: Path) -> list[Path]:
    """Files of the hub's cache that no download has finished."""
    return [path for path in directory.rglob("*.incomplete") if path.is_file()]


def test_refusals_come_before_the_weights_are_fetched(hub: Hub) -> None:
    tiny = hub.repositories["org/tiny"]
    cases = {
        "org/code": ({**tiny, "config.json": b'{"model_type": "gpt2", "auto_map": {}}'}, "auto_map"),
        "org/bert": ({**tiny, "config.json": b'{"model_type": "bert"}'}, "'bert'"),
        "org/bare": ({"config.json": tiny["config.json"]}, r"org/bare lacks model\.safetensors, tokenizer\.json"),
        "org/none": ({"README.md": b""}, r"org/none lacks config\.json"),
        "org/pickle": (
            {name: data for name, data in tiny.items() if not name.endswith(".safetensors")},
            r"org/pickle has its weights only as a pickle \(pytorch_model\.bin\).*from_pretrained",
        ),
    }
    for repository, (files, sentence) in cases.items():
        hub.repositories[repository] = files
        with pytest.raises(CheckpointError, match=sentence):
            resolve("other", repository)
    assert not any(path.endswith(".safetensors") for path in hub.requests)


@pytest.mark.parametrize("source", ["org/too/deep", "models/that are not here"])
def test_a_source_that_is_neither_directory_nor_repository(hub: Hub, source: str) -> None:
    with pytest.raises(CheckpointError, match="neither a directory on this machine nor the name of a"):
        resolve("legal", source)


def test_an_unavailable_model_is_refused_with_every_alternative(hub: Hub) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve("small")
    message = str(caught.value)
    assert message.startswith("The model hub has no openai-community/gpt2, or shows it only with a token")
    for way in ("hf download openai-community/gpt2 ", "TERCET_MODELS=small=/path", "TERCET_MODELS=embedded"):
        assert way in message


def test_a_hub_that_never_ends_its_answer_is_bounded(hub: Hub) -> None:
    """No single read times out: only the total time limit ends this."""
    hub.is_dripping = True
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"^No model hub answered: "):
        resolve("tiny", "org/tiny", hub_timeout_s=1.5)
    assert time.monotonic() - began < 5
