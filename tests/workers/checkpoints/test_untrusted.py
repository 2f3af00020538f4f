"""Checkpoints that would do harm: nothing in them runs, and each is refused with a sentence that says why."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.weights import weights_digest
from tests.workers.checkpoints.small_checkpoints import change_json
from tests.workers.helpers import EMBEDDED, wait_until
from tests.workers.slots import make_service, warm_service
from workers.checkpoints.int8_check import cached_int8_check
from workers.checkpoints.resolve import CheckpointError, resolve
from workers.engine.failures import LoadFailure
from workers.engine.loader import load_model
from workers.text.tokenizer import Tokenizer

WEIGHTS = "model.safetensors"


class _SideEffect:
    """Unpickled, it creates a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._marker,)


def copy_of_embedded(directory: Path) -> Path:
    shutil.copytree(EMBEDDED, directory)
    return directory


def failed_reason(directory: Path, revision: str = "") -> str:
    """The reason in the state of a worker that is to load this checkpoint."""
    service = make_service(directory, revision=revision)
    states = [service.state()]

    def is_settled() -> bool:
        states.append(service.state())
        return states[-1].state in {"failed", "warm"}

    service.start()
    wait_until(is_settled)
    service.close()
    state = states[-1]  # as it was found: after a pause the worker loads again
    assert state.state == "failed"
    assert state.counters.keys() == {"failures.load_error"}  # more than one on a machine that shows the state late
    return state.reason or ""


# The file that is a pickle, and the file that is missing.
PICKLES = {
    "instead of safetensors": ("pytorch_model.bin", WEIGHTS),
    "named as safetensors": (WEIGHTS, None),
    "named as a shard": ("a.safetensors", WEIGHTS),
    "named as a tokenizer": ("tokenizer.json", None),
    "named as a configuration": ("config.json", None),
}


@pytest.mark.parametrize("place", PICKLES)
def test_no_loader_unpickles(place: str, tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    data = pickle.dumps(_SideEffect(marker))
    pickle.loads(data)
    assert marker.exists()  # the pickle does what it should
    marker.unlink()
    directory = copy_of_embedded(tmp_path / "mine")
    name, missing = PICKLES[place]
    if missing is not None:
        (directory / missing).unlink()
    (directory / name).write_bytes(data)
    with pytest.raises(CheckpointError):
        resolve("mine", str(directory))
    for load in (
        lambda: load_model(directory),
        lambda: cached_int8_check(directory, Tokenizer.from_directory(directory, 8192), tmp_path / "cache"),
    ):
        with pytest.raises(Exception, match=r"."):  # of any kind: the marker is what matters
            load()
    assert str(directory) in failed_reason(directory)
    assert not marker.exists()


def test_a_pickle_next_to_safetensors_is_never_opened(tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    directory = copy_of_embedded(tmp_path / "mine")
    for name in ("pytorch_model.bin", "model.pt", "consolidated.pth", "last.ckpt"):
        (directory / name).write_bytes(pickle.dumps(_SideEffect(marker)))
    torch.save({"x": _SideEffect(marker)}, directory / "optimizer.pt")
    resolve("mine", str(directory))
    load_model(directory, dtype="fp32")
    assert not marker.exists()


def test_remote_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "was here"
    directory = copy_of_embedded(tmp_path / "mine")
    code = f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
    for module in ("modeling_gpt2", "tokenization_gpt2", "configuration_gpt2", "__init__", "conftest", "sitecustomize"):
        (directory / f"{module}.py").write_text(code)
    change_json(directory / "config.json", auto_map={"AutoModelForCausalLM": "modeling_gpt2.GPT2"})
    with pytest.raises(CheckpointError, match="run code that comes with the checkpoint"):
        resolve("mine", str(directory))
    assert "run code that comes with the checkpoint" in failed_reason(directory)
    (directory / "config.json").write_text((EMBEDDED / "config.json").read_text())
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_gpt2.T", None]}, "tokenizer_class": "T"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    resolve("mine", str(directory))
    load_model(directory, dtype="fp32")
    assert not marker.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_refused_by_their_name(value: float, tmp_path: Path) -> None:
    directory = copy_of_embedded(tmp_path / "mine")
    weights = load_file(directory / WEIGHTS)
    weights["transformer.h.0.mlp.c_fc.bias" if value > 0 else "transformer.wte.weight"].view(-1)[7] = value
    save_file(weights, directory / WEIGHTS)
    with pytest.raises(LoadFailure, match=r"(h\.0\.mlp\.c_fc\.bias|wte\.weight) holds values that are not numbers"):
        load_model(directory, dtype="fp32")
    assert "not numbers (NaN or infinity)" in failed_reason(directory)


def test_weights_that_changed_since_the_plan_are_refused(tmp_path: Path) -> None:
    directory = copy_of_embedded(tmp_path / "mine")
    revision = weights_digest(directory)
    weights = load_file(directory / WEIGHTS)
    weights["transformer.ln_f.bias"][0] += 1
    save_file(weights, directory / WEIGHTS)
    assert "have changed since the slot plan was made" in failed_reason(directory, revision)


def test_the_state_names_the_revision_of_the_loaded_weights() -> None:
    revision = weights_digest(EMBEDDED)
    with warm_service(revision=revision) as service:
        assert service.state().revision == revision
