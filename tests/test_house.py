"""Rules of the code that no linter checks; import-linter has the other contracts in pyproject.toml (`make lint`)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.helpers import run_python

ROOT = Path(__file__).parents[1]


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


def test_the_gunicorn_configuration_imports_only_shared_and_the_standard_library() -> None:
    """It is no module of a package, so import-linter does not see it."""
    for name in imports(ROOT / "gunicorn.conf.py"):
        assert name.partition(".")[0] in {"shared", *sys.stdlib_module_names}, name


def test_the_gateway_uses_httpx_in_its_pool_folder_alone() -> None:
    """A successor of httpx then changes one folder. Contracts list who may not import; this lists who may."""
    users = {path.parent for path in (ROOT / "gateway").rglob("*.py") if "httpx" in imports(path)}
    assert users == {ROOT / "gateway/pool"}


MODEL_LIBRARIES = {"torch", "transformers"}


@pytest.mark.parametrize(
    ("modules", "libraries"),
    [
        ("gateway.app", MODEL_LIBRARIES),
        ("shared.plan", MODEL_LIBRARIES),
        ("shared.telemetry", MODEL_LIBRARIES),
        ("workers.engine.core, workers.engine.scheduler", MODEL_LIBRARIES),
        (
            "deploy.cli, deploy.clients.lsp.lsp_command, deploy.clients.lsp.server",
            {*MODEL_LIBRARIES, "numpy", "tokenizers", "gunicorn", "falcon"},
        ),
        ("gateway.app, workers.app, deploy.command_line.serve", {"opentelemetry"}),  # without TERCET_TRACES
    ],
)
def test_what_needs_no_library_does_not_import_it(modules: str, libraries: set[str]) -> None:
    done = run_python(f"import sys, {modules}; assert not {libraries} & {{*sys.modules}}")
    assert done.returncode == 0, done.stderr


def test_the_command_line_imports_no_model_library_and_serve_no_other_command() -> None:
    """`tercet serve` runs as long as the server; what it imports stays in memory."""
    code = (
        "import sys, typer; from deploy.cli import COMMANDS, cli; group = typer.main.get_command(cli)\n"
        "def modules(name): return {COMMANDS[name].partition(':')[0]}\n"
        "others = set().union(*map(modules, COMMANDS)) - modules('serve')\n"
        "assert not others & {*sys.modules}\n"
        "group.get_command(None, 'serve')\n"
        "assert not others & {*sys.modules}, others & {*sys.modules}\n"
        "assert 'numpy' not in sys.modules\n"
        "for name in COMMANDS: assert group.get_command(None, name).name == name\n"
        "assert others < {*sys.modules}\n"
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("role", ["gateway", "workers"])
def test_running_the_gunicorn_configuration_leaves_torch_unimported(role: str, tmp_path: Path) -> None:
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


def test_the_formatter_is_never_switched_off() -> None:
    pattern = "fmt: " + "(skip|off)"
    found = subprocess.run(["git", "grep", "-lE", pattern], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.stdout == ""
