"""What `make release` refuses to build."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy import release
from shared.errors import StartError

CHANGELOG = "# Changelog\n\n## 1.2.3 (2026-01-31)\n\n- First.\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    for command in ("init -q", "add .", "-c user.name=n -c user.email=e commit -qm first"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    return tmp_path


def test_a_commit_whose_changelog_has_its_version_is_released(checkout: Path) -> None:
    release.check("1.2.3")


@pytest.mark.parametrize("version", ["1.2", "1.2.3rc1", "unknown"])
def test_another_form_of_version_is_refused(checkout: Path, version: str) -> None:
    with pytest.raises(StartError, match=r"not of the form 1\.2\.3"):
        release.check(version)


def test_a_version_without_a_dated_section_is_refused(checkout: Path) -> None:
    with pytest.raises(StartError, match=r'"## 1\.2\.4 \(2026-01-31\)"'):
        release.check("1.2.4")


def test_changes_that_are_not_committed_are_named(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    with pytest.raises(StartError, match=r"new\.py"):
        release.check("1.2.3")


def test_a_version_is_released_once(checkout: Path) -> None:
    subprocess.run(["git", "tag", "v1.2.3"], cwd=checkout, check=True)
    with pytest.raises(StartError, match=r"The tag v1\.2\.3 exists"):
        release.check("1.2.3")
