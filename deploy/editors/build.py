"""Builds the plug-ins from their sources: the Obsidian plug-in's folder and the VS Code extension's .vsix.

    python -m deploy.editors.build [obsidian|vscode]

writes to build/editors. npm installs TypeScript, esbuild and the editors' types there, in the versions that each
`package.json` pins; nothing is installed elsewhere. The plug-ins have Tercet's version.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.editors.local_client import make_client

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent
# Of the packages that the pinned ones require, npm takes the newest before this day: the same day, the same packages.
PUBLISHED_BEFORE = "2026-11-20"


class InstallError(Exception):
    """The build's tools cannot be installed."""


def build_obsidian(work: Path) -> Path:
    """Build in `work`, which is kept between builds; returns the folder to copy into a vault's `.obsidian/plugins`.

    Raises:
        InstallError: npm is missing, or could not install the pinned packages.
        subprocess.CalledProcessError: the type check or the bundler failed; its output is on stderr.
    """
    _prepare("obsidian", work)
    _run(work, "tsc")
    plugin = _empty_folder(work / "tercet")
    # Obsidian provides these modules.
    hosts = ["obsidian", "electron", "@codemirror/*", "@lezer/*"]
    _bundle(work, "main.ts", plugin / "main.js", hosts, "--platform=browser")
    shutil.copy(work / "styles.css", plugin)
    _write_json(plugin / "manifest.json", json.loads((work / "manifest.json").read_text()) | {"version": _version()})
    return plugin


def build_vscode(work: Path) -> Path:
    """Build in `work`, which is kept between builds; returns the .vsix.

    Raises:
        InstallError: npm is missing, or could not install the pinned packages.
        subprocess.CalledProcessError: the type check, the bundler or vsce failed; its output is on stderr.
    """
    _prepare("vscode", work)
    _run(work, "tsc")
    package = _empty_folder(work / "package")
    _bundle(work, "extension.ts", package / "extension.js", ["vscode"], "--platform=node")
    for path in (work / "package.json", work / "README.md", ROOT / "LICENSE"):
        shutil.copy(path, package)
    vsix = work / f"tercet-vscode-{_version()}.vsix"
    options = ["--no-dependencies", "--allow-missing-repository", "--out", str(vsix)]
    _run(package, "../node_modules/.bin/vsce", "package", *options)
    return vsix


def _prepare(name: str, work: Path) -> None:
    """Copy a plug-in's sources to `work`, and install what its package.json pins unless that is installed."""
    npm = shutil.which("npm")
    if npm is None:
        raise InstallError("npm is not installed")
    work.mkdir(parents=True, exist_ok=True)
    for path in (SOURCES / name).iterdir():
        shutil.copy(path, work)
    manifest = json.loads((work / "package.json").read_text()) | {"version": _version()}
    _write_json(work / "package.json", manifest)
    installed = work / "installed.json"
    wanted = json.dumps([manifest["devDependencies"], PUBLISHED_BEFORE])
    if not installed.exists() or installed.read_text() != wanted:
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
        try:
            _run(work, npm, "install", *options, f"--before={PUBLISHED_BEFORE}")
        except subprocess.CalledProcessError as error:
            raise InstallError(f"npm install ended with status {error.returncode}") from error
        installed.write_text(wanted)
    # Made elsewhere: tsc does not compile what is in node_modules.
    client = make_client(work / "client", work / "node_modules/.bin/tsc")
    shutil.copytree(client, work / "node_modules/tercet-client", dirs_exist_ok=True)


def _bundle(work: Path, entry: str, target: Path, external: Sequence[str], platform: str) -> None:
    """Bundle a module and all that it imports except `external` into one CommonJS file, which both editors load."""
    options = ["--bundle", "--format=cjs", "--target=es2022", "--log-level=warning", platform]
    _run(work, "esbuild", entry, *options, *(f"--external:{name}" for name in external), f"--outfile={target}")


def _run(folder: Path, program: str, *arguments: str) -> None:
    """Run a program in a folder; a name without a path is one that npm installed there."""
    path = program if "/" in program else str(folder / "node_modules/.bin" / program)
    subprocess.run([path, *arguments], cwd=folder, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def main() -> None:
    builds = {"obsidian": build_obsidian, "vscode": build_vscode}
    names = sys.argv[1:] or list(builds)
    if unknown := set(names) - set(builds):
        raise SystemExit(f"unknown plug-in {', '.join(unknown)}; known are {', '.join(builds)}")
    for name in names:
        print(builds[name](ROOT / "build/editors" / name))  # noqa: T201


if __name__ == "__main__":
    main()
