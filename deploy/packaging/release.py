"""`make release`: checks that this checkout is one version, and builds what is published of it into `dist/`.

Publishes nothing: it prints the tag to set. Each part is built by the command that users of a checkout have, too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.clients.npm.client_package import build as build_client
from deploy.clients.plugins import build_obsidian, build_vscode
from deploy.cloud.aws.images import CPU_INDEX, build_command, find_program
from shared.errors import StartError
from shared.version import PYPROJECT, tercet_version

ROOT = PYPROJECT.parent
DIST = ROOT / "dist"
UV = ROOT / "build/tools/bin/uv"


def check(version: str) -> None:
    """
    Raises:
        StartError: something else than this version would be released.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise StartError(f"pyproject.toml: the version {version} is not of the form 1.2.3.")
    changes = _git("status", "--porcelain")
    if changes:
        raise StartError(f"The checkout has changes that are not committed:\n{changes}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE):
        raise StartError(f'CHANGELOG.md: add the date of the release to its section: "## {version} (2026-01-31)".')
    if _git("tag", "--list", f"v{version}"):
        raise StartError(f"The tag v{version} exists: raise the version in pyproject.toml.")


def build(version: str) -> list[Path]:
    """Build everything; returns the files. The container image is left out where no program can build it.

    Raises:
        subprocess.CalledProcessError: a build failed.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    # The wheel is built of the sdist, so the sdist has all that it needs.
    _run(UV, "build", "--quiet", "--out-dir", DIST)
    client = build_client(ROOT / "build/npm")
    plugins = ROOT / "build/editors"
    shutil.copy(client, DIST)
    shutil.copy(build_vscode(plugins / "vscode", client), DIST)
    obsidian = build_obsidian(plugins / "obsidian", client)
    shutil.make_archive(str(DIST / f"tercet-obsidian-{version}"), "zip", obsidian)
    _run("make", "sbom")
    shutil.copy(ROOT / "build/sbom.json", DIST / f"tercet-{version}.cdx.json")
    try:
        program = find_program()
    except StartError as error:
        sys.stderr.write(f"No container image: {error}\n")
    else:
        image, archive = f"tercet:{version}", DIST / f"tercet-{version}.tar"
        _run(*build_command(program, image, CPU_INDEX))
        if program == "buildah":
            _run(program, "push", image, f"docker-archive:{archive}:{image}")
        else:
            _run(program, "save", "--output", archive, image)
    return sorted(path for path in DIST.iterdir() if path.name != ".gitignore")


def main() -> None:
    version = tercet_version()
    try:
        check(version)
        files = build(version)
    except (StartError, FileNotFoundError) as error:
        sys.exit(f"release: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"release: {error}\n{error.stdout or ''}{error.stderr or ''}")
    for path in files:
        sys.stdout.write(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB\n")
    sys.stdout.write(f"Tag this commit: git tag -a v{version} -m 'Tercet {version}'\n")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _run(*command: str | Path) -> None:
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
