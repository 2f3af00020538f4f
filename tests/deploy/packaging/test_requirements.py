"""Lock files: hashes, agreement with pyproject.toml and the SBOM. The audit's exit status. An interrupted set-up."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.programs import run_program, write_program

ROOT = Path(__file__).parents[3]
HASHED = ("backend", "compiler", "pip", "serve", "dev", "ray", "tools", "clients")
UNHASHED = ("torch", "cuda")
PIN = re.compile(r"([a-z0-9.-]+)==([^ ;]+)((?: --hash=sha256:[0-9a-f]{64})*)")


def pins(*names: str) -> dict[str, Version]:
    """Versions by package name, from these files of requirements/."""
    return {pin[1]: Version(pin[2]) for name in names for line in lines(name) if (pin := PIN.fullmatch(line))}


def lines(name: str) -> list[str]:
    """What pip reads: continued lines joined, without comments."""
    text = re.sub(r" *\\\n *", " ", (ROOT / f"requirements/{name}.txt").read_text())
    return [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", HASHED + UNHASHED)
def test_a_lock_file_holds_pins_and_nothing_else(name: str) -> None:
    """No options either: an index named here would override the one that pip is configured with."""
    assert lines(name)
    for line in lines(name):
        pin = PIN.fullmatch(line)
        assert pin, line
        assert bool(pin[3]) == (name in HASHED), line
        assert name in HASHED or pin[1] in {"torch", "triton"} or pin[1].startswith(("cuda-", "nvidia-")), line


def test_no_package_is_in_two_files_that_are_installed_together() -> None:
    names = [name for file in ("pip", "serve", "torch", "cuda", "dev") for name in pins(file)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("table", "key", "files"),
    [
        ("project", "dependencies", ("serve", "torch")),
        ("build-system", "requires", ("backend", "compiler", "serve")),
        ("dependency-groups", "backend", ("backend",)),
        ("optional", "dev", ("serve", "dev")),
        ("dependency-groups", "pip", ("pip",)),
        ("dependency-groups", "tools", ("tools",)),
        ("dependency-groups", "clients", ("clients",)),
    ],
)
def test_every_direct_dependency_is_pinned_within_its_range(table: str, key: str, files: tuple[str, ...]) -> None:
    tables = pyproject()
    tables["optional"] = tables["project"]["optional-dependencies"]
    locked = pins(*files)
    for dependency in map(Requirement, tables[table][key]):
        assert locked[canonicalize_name(dependency.name)] in dependency.specifier, dependency


def test_torch_installs_no_further_package_without_a_hash() -> None:
    locked = pins("serve", "cuda")
    [listed] = re.findall(r"^TORCH_REQUIRES = (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installed_before = {*listed.split(), *pins("cuda")}
    for dependency in map(Requirement, metadata.requires("torch") or []):
        if dependency.marker is None or dependency.marker.evaluate({"extra": ""}):
            assert locked[canonicalize_name(dependency.name)] in dependency.specifier, dependency
            assert canonicalize_name(dependency.name) in installed_before


@pytest.mark.skipif("SBOM" not in os.environ, reason="`make sbom` writes the SBOM and runs this test")
def test_the_sbom_lists_the_versions_and_hashes_of_the_lock() -> None:
    files = ("pip", "serve", "torch", "cuda")
    components = json.loads(Path(os.environ["SBOM"]).read_text())["components"]
    assert {part["name"]: Version(part["version"]) for part in components} == pins(*files)
    assert len(components) == len(pins(*files))
    listed = {
        found["content"]
        for part in components
        for where in part["externalReferences"]
        for found in where.get("hashes", [])
    }
    assert listed == {found for name in files for line in lines(name) for found in re.findall(r"sha256:(\w+)", line)}


CLEAN = {"name": "falcon", "version": "4.4.0", "vulns": []}
SKIPPED = {"name": "falcon", "skip_reason": "falcon (4.4.0) was not found"}
OPEN = {
    "name": "jinja2",
    "version": "3.1.2",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["3.1.3"], "aliases": ["CVE-2024-1"]}],
}


@pytest.mark.parametrize(
    ("printed", "status", "words"),
    [
        (json.dumps({"dependencies": [CLEAN]}), 0, "0 known vulnerabilities in 1 packages; 0 packages could not"),
        (json.dumps({"dependencies": [CLEAN, OPEN]}), 1, "jinja2 3.1.2: PYSEC-1 (CVE-2024-1), fixed in 3.1.3"),
        (json.dumps({"dependencies": [CLEAN, SKIPPED]}), 3, "1 packages could not be audited"),
        (json.dumps({"dependencies": [OPEN, SKIPPED]}), 1, "1 known vulnerabilities in 1 packages"),
        (json.dumps({"dependencies": []}), 3, "0 known vulnerabilities in 0 packages"),
        ("", 3, "its advisory service cannot be reached"),
    ],
)
def test_the_audit_passes_only_when_every_package_was_audited(
    printed: str, status: int, words: str, tmp_path: Path
) -> None:
    """A module stands for pip-audit, which needs the advisory service and exits 0 where it knows no package."""
    (tmp_path / "pip_audit.py").write_text(f"print({printed!r})")
    done = run_program(
        [sys.executable, ROOT / "requirements/audit.py", "one.txt", "two.txt"], env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == status, done.stderr
    assert words in done.stdout + done.stderr


PYTHON = """
case "$*" in
    "-m venv "*) echo venv >>$CALLS; mkdir -p $3/bin; cp $0 $3/bin/python ;;
    "-m pip uninstall "*torch) echo replaced >>$CALLS ;;
    "-m pip "*) echo pip >>$CALLS; test ! -e $CALLS.fails ;;
    "-c import ziglang") exit 1 ;;
    "-m workers.engine.cpu.kernel_source.build") echo kernels >>$CALLS ;;
    *) exec REAL "$@" ;;
esac
"""


Make = Callable[..., tuple[int, dict[str, int]]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make setup` in a directory, with variables: its exit status, and how often it called what.

    The Makefile is real; a script that counts calls stands for Python, because an installation takes a minute.
    """
    first, calls = tmp_path / "first", tmp_path / "calls"
    first.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, first)
    for name in ("requirements", "shared", "workers"):
        shutil.copytree(ROOT / name, first / name, ignore=shutil.ignore_patterns("__pycache__", "compiled"))
    python = tmp_path / "python3"
    write_program(python, PYTHON.replace("REAL", sys.executable))

    def run(directory: Path, *variables: str) -> tuple[int, dict[str, int]]:
        calls.write_text("")
        done = subprocess.run(
            ["make", "-C", directory, "setup", f"PYTHON={python}", *variables],
            env={"PATH": os.environ["PATH"], "CALLS": str(calls)},
            capture_output=True,
            check=False,
        )
        made = calls.read_text().split()
        return done.returncode, {call: made.count(call) for call in set(made)}

    return run


def test_an_interrupted_setup_resumes_and_a_moved_one_starts_again(make: Make, tmp_path: Path) -> None:
    first, moved = tmp_path / "first", tmp_path / "moved"
    (tmp_path / "calls.fails").touch()
    assert make(first) == (2, {"venv": 1, "pip": 1})
    (tmp_path / "calls.fails").unlink()
    half_installed = first / ".venv/lib/python3/site-packages/torch-2.dist-info"
    half_installed.mkdir(parents=True)
    status, resumed = make(first)
    assert status == 0
    assert "venv" not in resumed
    assert resumed["pip"] > 1
    assert resumed["kernels"] == 1
    assert not half_installed.exists()
    assert make(first) == (0, {})
    first.rename(moved)
    status, again = make(moved)
    assert status == 0
    assert again["venv"] == 1


def test_another_selection_of_torch_replaces_it_and_stays(make: Make, tmp_path: Path) -> None:
    directory = tmp_path / "first"
    status, calls = make(directory)
    assert (status, "replaced" in calls) == (0, False)
    status, calls = make(directory, "TORCH=cpu")
    assert (status, calls["replaced"], "venv" in calls) == (0, 1, False)
    assert make(directory, "TORCH=cpu") == (0, {})
    assert make(directory) == (0, {})
    (directory / "requirements/torch.txt").touch()  # as a newer version does
    status, calls = make(directory)
    assert (status, "replaced" in calls) == (0, False)
    assert (directory / ".venv/torch.stamp").read_text() == "cpu\n"
    status, calls = make(directory, "TORCH=")  # the machine decides again
    assert (status, calls["replaced"]) == (0, 1)
    assert make(directory) == (0, {})


def test_another_value_of_torch_changes_nothing(make: Make, tmp_path: Path) -> None:
    make(tmp_path / "first")
    assert make(tmp_path / "first", "TORCH=gpu") == (2, {})
    assert make(tmp_path / "first") == (0, {})
