"""A hub of its own for each test that asks one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.checkpoints.hub_server import Hub, serving
from tests.workers.checkpoints.small_checkpoints import write
from workers.checkpoints.resolve import resolve


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
    with serving(Hub()) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories["org/tiny"] = {
            **{path.name: path.read_bytes() for path in write(tmp_path / "tiny").iterdir()},
            "pytorch_model.bin": b"pickle",
            "README.md": b"# tiny",
            "custom.py": b"import os",
            "onnx/model.safetensors": b"not wanted",
        }
        yield server
