"""What `make release` refuses to build, and what it builds: the wheel is installed and run by uv."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.packaging import release
from shared.errors import StartError
from shared.version import tercet_version
from tests.deploy.packaging.installed import check_serving
from tests.e2e.harness import ROOT
from tests.programs import run_program, write_program

BUILD_S = 1500
# uv installs torch with CUDA libraries where no other index is named.
INSTALLED_BYTES = 8_000_000_000
# Stands for Docker, because no registry can be reached.
DOCKER = 'if [ "$1" = save ]; then echo image >"$3"; fi'
CHANGELOG = "# Changelog\n\n## 1.2.3 (2026-01-31)\n\n- First.\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    for command in ("init -q", "add .", "-c user.name=n -c user.email=e commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("1.2", r"not of the form 1\.2\.3"),
        ("1.2.3rc1", r"not of the form 1\.2\.3"),
        ("unknown", r"not of the form 1\.2\.3"),
        ("1.2.4", r'"## 1\.2\.4 \(2026-01-31\)"'),
    ],
)
def test_another_form_of_version_and_one_without_a_dated_section_are_refused(
    checkout: Path, version: str, reason: str
) -> None:
    release.check("1.2.3")
    with pytest.raises(StartError, match=reason):
        release.check(version)


def test_changes_that_are_not_committed_are_named_and_a_version_is_released_once(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    with pytest.raises(StartError, match=r"new\.py"):
        release.check("1.2.3")
    (checkout / "new.py").unlink()
    subprocess.run(["git", "tag", "v1.2.3"], cwd=checkout, check=True)
    with pytest.raises(StartError, match=r"The tag v1\.2\.3 exists"):
        release.check("1.2.3")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A clone of this checkout's commit whose changelog has a date, `make release` run in it, and what it printed."""
    base = tmp_path_factory.mktemp("release")
    clone, programs = base / "tercet", base / "programs"
    write_program(programs / "docker", DOCKER)
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    changelog = clone / "CHANGELOG.md"
    heading = rf"^## {re.escape(tercet_version())}.*$"
    dated = re.sub(heading, f"## {tercet_version()} (2026-01-31)", changelog.read_text(), flags=re.MULTILINE)
    changelog.write_text(dated)
    git = ["git", "-C", str(clone), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "commit", "--quiet", "--all", "--allow-empty", "--message=Date the changelog"], check=True)
    environ = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = run_program(["make", "release"], cwd=clone, env=environ, timeout=BUILD_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return clone, done.stdout


@pytest.mark.deploy
@pytest.mark.timeout(1800)
def test_everything_that_is_published_is_built(released: tuple[Path, str]) -> None:
    clone, printed = released
    version = tercet_version()
    kinds = {re.sub(r"-py3-.*(?=\.whl)", "", path.name) for path in (clone / "dist").iterdir()} - {".gitignore"}
    assert kinds == {
        f"tercet-{version}.whl",
        f"tercet-{version}.tar.gz",
        f"tercet-{version}.tar",  # the image
        f"tercet-{version}.cdx.json",
        f"tercet-client-{version}.tgz",
        f"tercet-vscode-{version}.vsix",
        f"tercet-obsidian-{version}.zip",
    }
    assert f"git tag -a v{version}" in printed


@pytest.mark.deploy
@pytest.mark.timeout(1800)
def test_uv_installs_it_and_it_serves(released: tuple[Path, str], short_tmp_path: Path) -> None:
    if shutil.disk_usage(short_tmp_path).free < INSTALLED_BYTES:
        pytest.skip(f"needs {INSTALLED_BYTES / 1e9:.0f} GB of disk")
    clone, _ = released
    [wheel] = (clone / "dist").glob("*.whl")
    pins = [line.split()[0] for name in ("serve", "torch") for line in _pinned(clone / f"requirements/{name}.txt")]
    constraints = short_tmp_path / "constraints.txt"
    constraints.write_text("\n".join(pins))
    directories = {"UV_TOOL_DIR": str(short_tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(short_tmp_path / "bin")}
    install: list[str | Path] = [clone / "build/tools/bin/uv", "tool", "install", wheel, "--constraints", constraints]
    run_program(install, env=os.environ | directories, check=True)
    check_serving([str(short_tmp_path / "bin/tercet")], short_tmp_path / "p")


def _pinned(requirements: Path) -> list[str]:
    return [line for line in requirements.read_text().splitlines() if "==" in line and not line.startswith(("#", " "))]
