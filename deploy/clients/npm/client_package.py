"""Builds the npm package of the client module: `python -m deploy.clients.npm.client_package DIRECTORY`.

Copies what the package's entry points import from gateway/static/, lets TypeScript make declarations (`.d.ts`) from the
JSDoc, and packs the result. Requires npm, which installs the pinned tools into the directory. Knows the files' imports,
not what they do.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.version import tercet_version

ROOT = Path(__file__).parents[3]
STATIC = ROOT / "gateway/static"
MANIFEST = Path(__file__).with_name("package.json")
README = Path(__file__).with_name("README.md")
# Exact versions of the tools, of the editors' packages, whose types the declarations name, of what these require, and
# of the SDK that the tests run.
TOOLS = Path(__file__).with_name("tools.json")
INSTALL_TIMEOUT_S = 180
# TypeScript's options for checking the modules, and those for their declarations.
CHECK = (
    *("--ignoreConfig", "--strict", "--allowJs", "--checkJs", "--target", "es2023", "--lib", "esnext,dom"),
    *("--module", "esnext", "--moduleResolution", "bundler"),
)
DECLARE = ("--declaration", "--emitDeclarationOnly")


def npm(*arguments: str, directory: Path) -> None:
    """Run npm in a directory.

    Raises:
        FileNotFoundError: npm is not installed.
        subprocess.CalledProcessError: it failed; `stderr` says why.
        subprocess.TimeoutExpired: it did not end within INSTALL_TIMEOUT_S.
    """
    command = shutil.which("npm")
    if command is None:
        raise FileNotFoundError("npm is not installed (apt-get install npm)")
    subprocess.run(
        [command, *arguments], cwd=directory, capture_output=True, text=True, check=True, timeout=INSTALL_TIMEOUT_S
    )


def install(directory: Path, manifest: str, *options: str) -> None:
    """Install what a `package.json` pins into `directory`/node_modules, unless it is installed there.

    Raises what `npm` does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wanted = json.dumps([manifest, options])
    (directory / "package.json").write_text(manifest, "utf-8")
    installed = directory / "installed.json"  # written last, so an interrupted installation is repeated
    if not installed.exists() or installed.read_text("utf-8") != wanted:
        usual = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--fetch-timeout=20000"]
        npm("install", *usual, *options, directory=directory)
        installed.write_text(wanted, "utf-8")


def install_tools(directory: Path) -> None:
    """As `install`, of `TOOLS`."""
    install(directory, TOOLS.read_text("utf-8"))


def imported(entries: Iterable[str]) -> list[str]:
    """The names of these modules of the page and of all that they import, types included; sorted.

    Raises:
        FileNotFoundError: one of them does not exist.
    """
    found: set[str] = set()
    waiting = list(entries)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += re.findall(r'"\./([\w.-]+\.js)"', (STATIC / name).read_text("utf-8"))
    return sorted(found)


def check_types(files: Iterable[Path], directory: Path, *options: str) -> None:
    """Type-check modules whose folder is in `directory`, where the tools are.

    Raises:
        subprocess.CalledProcessError: they have errors; `stdout` lists them.
    """
    tsc = directory / "node_modules/.bin/tsc"
    command = [str(tsc), *CHECK, *options, *(str(path) for path in files)]
    subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)


def build(directory: Path) -> Path:
    """Build the package in `directory`; returns the packed file.

    Raises what `npm` and `check_types` do.
    """
    install_tools(directory)
    package = empty_folder(directory / "package")
    manifest = json.loads(MANIFEST.read_text("utf-8"))
    manifest["version"] = tercet_version()
    (package / "package.json").write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")
    entries = [path.removeprefix("./") for path in manifest["exports"].values()]
    files = [STATIC / name for name in imported(entries)]
    for path in (*files, README, ROOT / "LICENSE"):
        shutil.copy(path, package)
    check_types([package / path.name for path in files], directory, *DECLARE)
    npm("pack", "--ignore-scripts", f"--pack-destination={directory}", directory=package)
    return directory / f"{manifest['name']}-{manifest['version']}.tgz"


def empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@contextmanager
def exiting_on_failure() -> Iterator[None]:
    """End the process with what a failed tool has written."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stdout or ''}{error.stderr or ''}")
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        sys.exit(str(error))


def main() -> None:
    with exiting_on_failure():
        sys.stdout.write(f"{build(Path(sys.argv[1]).resolve())}\n")


if __name__ == "__main__":
    main()
