"""Checkpoints: which are accepted, which are refused, and how a faulty hub is handled.

The hub is a small server on 127.0.0.1 that implements the part of the hub's API that a download needs. Its client is
huggingface_hub itself, in the child process that `resolve` starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import save_file

from shared.weights import weights_digest
from tests.workers.helpers import ROOT, run_python
from workers.checkpoints.resolve import EMBEDDED, EMBEDDED_SHA256, CheckpointError, resolve, resolve_default
from workers.engine.loader import random_weights
from workers.engine.model.gpt2 import GPT2Config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 8192,
    "n_positions": 32,
    "n_embd": 4,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": None,
}


def weights() -> dict[str, Any]:
    """All weights of a GPT-2 of CONFIG's sizes, as zeros."""
    tensors = random_weights(GPT2Config.from_json(CONFIG))
    return {name: np.zeros(tensor.shape, np.float32) for name, tensor in tensors.items()}


def write(
    directory: Path, config: Mapping[str, Any] = CONFIG, changed: Mapping[str, Any] = MappingProxyType({})
) -> Path:
    """A checkpoint in `directory`: whole, unless its `config` or the `changed` weights are not."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    shutil.copy(EMBEDDED / "tokenizer.json", directory)
    save_file({**weights(), **changed}, directory / "model.safetensors")
    return directory


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
    with pytest.raises(CheckpointError, match=r"legal=/path/to/checkpoint.* small, medium, embedded"):
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


def test_directory_in_older_and_larger_layouts(tmp_path: Path) -> None:
    """n_ctx for n_positions, vocab.json for tokenizer.json, prefixed names, several weight files."""
    directory = write(tmp_path, {**{k: v for k, v in CONFIG.items() if k != "n_positions"}, "n_ctx": 32})
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    (directory / "model.safetensors").unlink()
    halves: dict[str, dict[str, Any]] = {"model-1-of-2.safetensors": {}, "model-2-of-2.safetensors": {}}
    for name, value in weights().items():
        halves[f"model-{1 + ('.1.' in name)}-of-2.safetensors"][f"transformer.{name}"] = value
    for file, half in halves.items():
        save_file(half, directory / file)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve("old", str(directory)).n_ctx == 32

    (directory / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2-of-2\.safetensors.* is missing"):
        resolve("old", str(directory))


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


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing there": (shutil.rmtree, "is not a directory"),
    "a file": (_make_file, "is not a directory"),
    "empty": (_empty, r"lacks config\.json, model\.safetensors, tokenizer\.json"),
    "config not JSON": (lambda d: (d / "config.json").write_text("{"), r"config\.json is damaged"),
    "config no object": (lambda d: (d / "config.json").write_text("[]"), "not hold a JSON object"),
    "not GPT-2": (lambda d: write(d, {**CONFIG, "model_type": "llama"}), "'llama'.*GPT-2 only"),
    "no sizes": (
        lambda d: write(d, {"model_type": "gpt2"}),
        r"no usable n_embd \(.*, n_head \(.*, n_inner \(.*, n_layer \(",
    ),
    **{
        f"{field} {value}": (partial(_write_with, field, value), rf"no usable {field} \(a whole number from 1 to \d+\)")
        for field in ("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "vocab_size")
        for value in (10**9, 10**18, -1, 1e9, True, "12", [12])
    },
    "deep JSON": (lambda d: (d / "config.json").write_text("[" * 100_000), r"config\.json is damaged, it is not JSON"),
    "heads": (lambda d: write(d, {**CONFIG, "n_head": 3}), "n_embd is no multiple of n_head"),
    "epsilon": (lambda d: write(d, {**CONFIG, "layer_norm_epsilon": float("nan")}), "layer_norm_epsilon is no number"),
    "end token": (lambda d: write(d, {**CONFIG, "eos_token_id": [1]}), "eos_token_id is no token id"),
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
    "a larger tokenizer": (
        lambda d: write(d, {**CONFIG, "vocab_size": 100}, {"wte.weight": np.zeros((100, 4), np.float32)}),
        "token ids up to 8191, and the model has 100",
    ),
    "no vocabulary": (lambda d: (d / "tokenizer.json").write_text("{}"), "not a byte-level BPE"),
    "files elsewhere": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "../x"}}'),
        "does not name weight files in its own directory",
    ),
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


def test_a_pickle_is_refused_with_a_command_that_converts_it(tmp_path: Path) -> None:
    directory = write(tmp_path / "legal")
    state = {f"transformer.{name}": torch.from_numpy(value) for name, value in weights().items()}
    torch.save(state, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"only as a pickle \(pytorch_model\.bin\)") as caught:
        resolve("legal", str(directory))
    found = re.search(r"convert it with (.*) and serve the directory \./(\S+)\.$", str(caught.value))
    assert found is not None
    command, converted = found.groups()
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run(shlex.split(command), cwd=tmp_path, env=environ, check=True, capture_output=True)
    assert resolve("legal", str(tmp_path / converted)).n_ctx == 32


# The hub -----------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """A model hub on 127.0.0.1. `repositories` maps names to files; the other attributes select faults."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _HubHandler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.status = 200
        self.page: bytes | None = None  # answers everything
        self.is_dripping = False  # sends an answer that never ends
        self.spoiled: str | None = None  # a file whose bytes do not match its digest
        self.stalled: str | None = None  # a file of which half is sent
        self.has_stalled = threading.Event()
        self.may_continue = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, self.path.partition("?")[0]
        hub.requests.append(path)
        if hub.is_dripping:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n")
            with contextlib.suppress(ConnectionError):  # the client is killed
                while True:
                    self.wfile.write(b"X-Drip: 1\r\n")
                    time.sleep(0.1)
        elif hub.status != 200 or hub.page is not None:
            self._send(hub.page or b"no", status=hub.status)
        elif match := re.fullmatch(r"/api/models/([\w-]+/\w+)(?:/revision/(.+))?", path):
            self._send_listing(match[1], match[2])
        elif match := re.fullmatch(rf"/api/models/([\w-]+/\w+)/tree/{COMMIT}", path):
            self._send_tree(match[1])
        elif match := re.fullmatch(rf"/([\w-]+/\w+)/resolve/(?:main|v1|{COMMIT})/(.+)", path):
            self._send_file(match[1], match[2])
        else:
            self._send(b"unknown", status=404)

    def _send_listing(self, repository: str, revision: str | None) -> None:
        if revision not in (None, "main", "v1", COMMIT):
            self._send(b"{}", status=404, headers={"X-Error-Code": "RevisionNotFound"})
            return
        files = self.server.repositories.get(repository)
        if files is None:
            # As the real hub answers for private and for missing repositories.
            self._send(b"{}", status=401, headers={"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": name, "size": len(data), **_digests(name, data)} for name, data in files.items()]
        self._send(json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())

    def _send_tree(self, repository: str) -> None:
        files = self.server.repositories[repository]
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in files.items()
        ]
        self._send(json.dumps(entries).encode())

    def _send_file(self, repository: str, file: str) -> None:
        data = self.server.repositories[repository][file]
        digest = hashlib.sha256(data).hexdigest()
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{digest if file.endswith(".safetensors") else digest[:40]}"',
        }
        if self.server.spoiled == file:
            data = data[:-1] + b"?"
        self._send(data, headers=headers, is_stalling=self.server.stalled == file)

    def _send(
        self,
        data: bytes,
        *,
        status: int = 200,
        headers: dict[str, str] | None = None,
        is_stalling: bool = False,
    ) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_stalling:
            self.wfile.write(data[: len(data) // 2])
            self.server.has_stalled.set()
            self.server.may_continue.wait(20)
        else:
            self.wfile.write(data)

    def log_request(self, code: object = None, size: object = None) -> None:
        """No log."""


def _digests(name: str, data: bytes) -> dict[str, Any]:
    """What the hub lists: a git object id of small files, a SHA-256 of weights, which it keeps by git-lfs."""
    if name.endswith(".safetensors"):
        sha256 = hashlib.sha256(data).hexdigest()
        return {"blobId": "0" * 40, "lfs": {"sha256": sha256, "size": len(data), "pointerSize": 130}}
    return {"blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one small repository, `org/tiny`; an empty cache; a client configured for this hub only."""
    for variable in [name for name in os.environ if name.startswith("HF_") or "proxy" in name.lower()]:
        monkeypatch.delenv(variable)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    # A busy machine may take longer than a person should wait for a hub; one test sets its own time.
    monkeypatch.setattr(resolve, "__kwdefaults__", {**(resolve.__kwdefaults__ or {}), "hub_timeout_s": 60.0})
    with Hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories["org/tiny"] = {
            **{path.name: path.read_bytes() for path in write(tmp_path / "tiny").iterdir()},
            "pytorch_model.bin": b"pickle",
            "README.md": b"# tiny",
            "custom.py": b"import os",
            "onnx/model.safetensors": b"not wanted",
        }
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


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


def test_a_killed_download_is_not_used(hub: Hub) -> None:
    hub.stalled = "model.safetensors"
    code = "from workers.checkpoints.resolve import resolve; resolve('tiny', 'org/tiny')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as process:
        assert hub.has_stalled.wait(20)
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
    child.wait(10)  # it ends with its parent
    hub.may_continue.set()
    hub.stalled = None
    found = resolve("tiny", "org/tiny")
    whole = len(hub.repositories["org/tiny"]["model.safetensors"])
    assert (Path(found.directory) / "model.safetensors").stat().st_size == whole


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


def test_default_is_small_if_the_hub_has_it(hub: Hub) -> None:
    hub.repositories["openai-community/gpt2"] = hub.repositories["org/tiny"]
    found = resolve_default()
    source = f"hub:openai-community/gpt2@{COMMIT}"
    assert (found.name, found.source, found.warning, found.n_ctx) == ("small", source, None, 32)


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("unreachable", "no model hub answered"),
        ("offline", r"the model hub is switched off \(HF_HUB_OFFLINE\)"),
        ("failing", "the model hub answered with status 503"),
        ("a portal", "what answered is not a model hub"),
        ("without it", "the model hub has no openai-community/gpt2"),
    ],
)
def test_default_is_embedded_with_the_reason(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, trouble: str, reason: str
) -> None:
    if trouble == "unreachable":
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    elif trouble == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif trouble == "failing":
        hub.status = 503
    elif trouble == "a portal":
        hub.page = b"<html>Please log in</html>"
    found = resolve_default()
    assert (found.name, found.source) == ("embedded", "embedded")
    assert found.warning is not None
    assert re.match(reason, found.warning)
    assert found.warning.endswith(", so the embedded checkpoint is served instead of GPT-2 small")
    if trouble == "offline":
        assert hub.requests == []


def test_a_hub_that_accepts_and_never_answers_costs_five_seconds(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        found = resolve_default()
        assert time.monotonic() - began < 8
    assert found.warning == "no model hub answered, so the embedded checkpoint is served instead of GPT-2 small"


def test_a_hub_that_never_ends_its_answer_is_bounded(hub: Hub) -> None:
    """No single read times out: only the total time limit ends this."""
    hub.is_dripping = True
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"^No model hub answered: "):
        resolve("tiny", "org/tiny", hub_timeout_s=1.5)
    assert time.monotonic() - began < 5
