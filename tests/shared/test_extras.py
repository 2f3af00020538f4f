"""The commands that install extras, in messages and in texts."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from shared import extras
from shared.errors import StartError
from shared.extras import ROOT, install_command, pip_install, repair_command, torch_command
from shared.tracing import require_opentelemetry

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_the_command_names_this_python_and_the_packages_of_an_extra() -> None:
    """It works wherever the message is printed: in a checkout, and where a wheel is installed."""
    for extra in ("redis", "dynamodb", "aws", "lsp", "otel"):
        python, *pip = shlex.split(install_command(extra))[:4]
        assert (python, pip) == (sys.executable, ["-m", "pip", "install"])
        packages = {Requirement(each) for each in shlex.split(install_command(extra))[4:]}
        assert packages == set(map(Requirement, EXTRAS[extra]))
    assert subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def test_an_environment_without_pip_gets_a_command_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert shlex.split(pip_install("a>1"))[:5] == ["uv", "pip", "install", "--python", sys.executable]


def test_the_image_is_built_again_with_pinned_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has neither pip nor a file system that can be written to."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    *command, argument, context = shlex.split(install_command("otel"))
    assert (command, context) == (
        ["docker", "build", "-f", "deploy/packaging/Dockerfile", "-t", "tercet", "--build-arg"],
        ".",
    )
    packages = argument.removeprefix("EXTRA=-c requirements/dev.txt ").split()
    assert packages == ["opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk"]
    pins = (ROOT / "requirements/dev.txt").read_text()
    assert all(f"\n{name}==" in pins for name in packages)
    assert repair_command() == "build the image again"
    *command, argument, context = shlex.split(torch_command("2.13.0", "cu126", "https://index.example/whl"))
    assert (command[:2], argument, context) == (["docker", "build"], "TORCH_INDEX=https://index.example/whl/cu126", ".")


def test_traces_without_opentelemetry_are_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(StartError, match=re.escape(install_command("otel"))):
        require_opentelemetry()


def test_nothing_asks_to_install_tercet_from_an_index() -> None:
    """The name `tercet` is not ours there: another owner of it would run code on our users' machines."""
    bare = re.compile(r"pip install[^\n`]*[\s'\"]tercet\b(?!-)")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in names.split("\0") if name.endswith((".py", ".md", ".sh", ".html", ".js", ".yaml"))]
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in paths
        if path.is_file() and path != Path(__file__)
        for match in bare.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert bare.search("pip install 'tercet[otel]'")
