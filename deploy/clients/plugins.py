"""Builds the plug-ins from their sources: the Obsidian plug-in's folder and the VS Code extension's .vsix.

    python -m deploy.clients.plugins [--only obsidian|vscode]

writes to build/editors, and to build/npm the npm package of the client module, which both plug-ins contain. npm
installs TypeScript, esbuild and the editors' types into these folders, in the versions that each `package.json` pins.
The plug-ins have Tercet's version. It does not know what the plug-ins do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.clients.npm.client_package import build as build_client
from deploy.clients.npm.client_package import empty_folder, exiting_on_failure, install
from shared.version import tercet_version

ROOT = Path(__file__).parents[2]
SOURCES = Path(__file__).parent
# npm takes the newest versions before this day of what the pinned packages require: the same day, the same packages.
PUBLISHED_BEFORE = "2026-11-20"


def install_tools(name: str, work: Path) -> None:
    """Install what a plug-in's `package.json` pins into `work`, unless that is installed.

    Raises what `npm` does.
    """
    manifest = json.loads((SOURCES / name / "package.json").read_text()) | {"version": tercet_version()}
    install(work, _json(manifest), f"--before={PUBLISHED_BEFORE}")


def build_obsidian(work: Path, client: Path) -> Path:
    """Build in `work`, which is kept between builds; returns the folder to copy into a vault's `.obsidian/plugins`.

    Args:
        client: the packed npm package of the client module.

    Raises what `npm` does, and:
        subprocess.CalledProcessError: the type check or the bundler failed; its output is on stderr.
    """
    _prepare("obsidian", work, client)
    plugin = empty_folder(work / "tercet")
    # Obsidian provides these modules.
    _bundle(work, "main.ts", plugin / "main.js", ["obsidian", "@codemirror/*"], "--platform=browser")
    shutil.copy(work / "styles.css", plugin)
    manifest = json.loads((work / "manifest.json").read_text()) | {"version": tercet_version()}
    (plugin / "manifest.json").write_text(_json(manifest))
    return plugin


def build_vscode(work: Path, client: Path) -> Path:
    """Build in `work`, which is kept between builds; returns the .vsix. For the rest see `build_obsidian`."""
    _prepare("vscode", work, client)
    package = empty_folder(work / "package")
    _bundle(work, "extension.ts", package / "extension.js", ["vscode"], "--platform=node")
    for path in (work / "package.json", work / "README.md", ROOT / "LICENSE"):
        shutil.copy(path, package)
    vsix = work / f"tercet-vscode-{tercet_version()}.vsix"
    options = ["--no-dependencies", "--allow-missing-repository", "--out", str(vsix)]
    _run(package, work / "node_modules/.bin/vsce", "package", *options)
    return vsix


def _prepare(name: str, work: Path, client: Path) -> None:
    """Put a plug-in's sources, its tools and the client into `work`, and check the types."""
    install_tools(name, work)
    for path in (SOURCES / name).iterdir():
        if path.name != "package.json":
            shutil.copy(path, work)
    # Unpacked here: npm would look up all packages again.
    with tarfile.open(client) as archive:
        archive.extractall(empty_folder(work / "client"), filter="data")
    installed = work / "node_modules/tercet-client"
    shutil.rmtree(installed, ignore_errors=True)
    (work / "client/package").rename(installed)
    _run(work, work / "node_modules/.bin/tsc")


def _bundle(work: Path, entry: str, target: Path, external: Sequence[str], platform: str) -> None:
    """Bundle a module and all that it imports except `external` into one CommonJS file, which both editors load."""
    options = ["--bundle", "--format=cjs", "--target=es2022", "--log-level=warning", platform]
    externals = [f"--external:{name}" for name in external]
    _run(work, work / "node_modules/.bin/esbuild", entry, *options, *externals, f"--outfile={target}")


def _run(directory: Path, program: Path, *arguments: str) -> None:
    subprocess.run([program, *arguments], cwd=directory, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def main() -> None:
    builds = {"obsidian": build_obsidian, "vscode": build_vscode}
    parser = argparse.ArgumentParser(description="Build the editors' plug-ins.")
    parser.add_argument("--only", choices=builds, help="default: all")
    only = parser.parse_args().only
    with exiting_on_failure():
        client = build_client(ROOT / "build/npm")
        for name in [only] if only else builds:
            sys.stdout.write(f"{builds[name](ROOT / 'build/editors' / name, client)}\n")


if __name__ == "__main__":
    main()
