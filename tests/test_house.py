"""The rooms of the house: who may import whom, and what must never load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"gateway", "workers", "shared", "deploy", "tests"}
MODEL_SIDE = {"torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numba", "numpy"}
SERVER_SIDE = {"falcon", "gunicorn", "httpx"}

# Room: (what of ours it may import, what of others it may not).
RULES: dict[str, tuple[set[str], set[str]]] = {
    "shared": ({"shared"}, MODEL_SIDE | SERVER_SIDE | {"rich", "typer"}),
    "gateway": ({"gateway", "shared"}, MODEL_SIDE | {"gunicorn", "rich", "typer"}),
    "workers/text": ({"workers.text"}, SERVER_SIDE),
    "workers/engine": ({"workers.engine", "workers.text", "shared.settings", "shared.errors"}, SERVER_SIDE),
    "workers": ({"workers", "shared"}, {"httpx", "rich", "typer"}),
    # The training program: a person runs it, so it prints; no server imports it.
    "workers/training": ({"workers.training", "workers.text.tokenizer", "shared.errors"}, SERVER_SIDE | {"typer"}),
    "gunicorn.conf.py": ({"shared"}, MODEL_SIDE | SERVER_SIDE),
}


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("room", RULES)
def test_who_may_import_whom(room: str) -> None:
    allowed, forbidden = RULES[room]
    place = ROOT / room
    for path in [place] if place.is_file() else place.rglob("*.py"):
        if room == "workers" and path.is_relative_to(ROOT / "workers/training"):
            continue
        for name in imports(path):
            top = name.partition(".")[0]
            if top in OURS:
                assert any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed), f"{path} imports {name}"
            assert top not in forbidden, f"{path} imports {name}"


def test_httpx_stays_behind_the_client() -> None:
    users = {path.name for path in (ROOT / "gateway").rglob("*.py") if "httpx" in imports(path)}
    assert users == {"client.py", "transport.py"}


def test_nothing_that_serves_imports_what_trains() -> None:
    for room in ("gateway", "workers", "shared", "deploy"):
        for path in (ROOT / room).rglob("*.py"):
            if not path.is_relative_to(ROOT / "workers/training"):
                assert not any(name.startswith("workers.training") for name in imports(path)), path


def test_the_engine_reads_no_environment() -> None:
    for path in (ROOT / "workers/engine").rglob("*.py"):
        assert "os" not in imports(path), path


@pytest.mark.parametrize("module", ["gateway.app", "shared.plan", "shared.telemetry", "deploy.cli"])
def test_importing_what_needs_no_model_leaves_torch_alone(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("role", ["gateway", "workers"])
def test_running_the_gunicorn_configuration_leaves_torch_alone(role: str, tmp_path: Path) -> None:
    code = (
        "import runpy, sys; runpy.run_path('gunicorn.conf.py'); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    environ = {
        "PATH": "/usr/bin:/bin",
        "TERCET_ROLE": role,
        "TERCET_MODELS": "embedded",
        "TERCET_DEVICES": "cpu",
        "TERCET_RUN_DIR": str(tmp_path),
    }
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, check=False).returncode == 0
