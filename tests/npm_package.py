"""The npm package of the client module, built once for all tests, and installed where its tools are found."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploy.clients.npm import client_package


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """The packed file, and a folder with the pinned tools and editors in `node_modules`."""

    tools: Path
    packed: Path

    @property
    def consumer(self) -> Path:
        """A folder into which the packed file was installed, as an editor's maker would."""
        return self.tools / "consumer"

    def run(self, *command: str | Path) -> str:
        """Run one of the tools, or node, in the consumer's folder; returns what it printed.

        Raises:
            AssertionError: it failed; the message is what it printed.
        """
        program = self.tools / "node_modules/.bin" / command[0]
        arguments = [program if program.exists() else command[0], *command[1:]]
        process = subprocess.run(arguments, cwd=self.consumer, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def bundle(self, sources: Sequence[Path], directory: Path) -> None:
        """Bundle each of these programs into one classic script, where modules have no URL."""
        for source in sources:
            shutil.copy(source, self.consumer)
        options = ["--bundle", "--format=iife", "--log-level=error", f"--outdir={directory}"]
        self.run("esbuild", *options, *(source.name for source in sources))


@contextmanager
def skipping_without_npm() -> Iterator[None]:
    """Skips the test if npm, or a registry that it needs, cannot be had."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm could not install what the test needs: {error}; {getattr(error, 'stderr', '') or ''}")


def build_package(tools: Path) -> NpmPackage:
    """Build the package and install the packed file."""
    with skipping_without_npm():
        client_package.install_tools(tools)
    try:
        package = NpmPackage(tools, client_package.build(tools))
    except subprocess.CalledProcessError as error:
        pytest.fail(f"{error}\n{error.stdout}{error.stderr}")
    shutil.rmtree(package.consumer, ignore_errors=True)
    package.consumer.mkdir()
    manifest = {"private": True, "type": "module", "dependencies": {"tercet-client": f"file:{package.packed}"}}
    (package.consumer / "package.json").write_text(json.dumps(manifest))
    client_package.npm(
        "install", "--offline", "--ignore-scripts", "--no-audit", "--no-fund", directory=package.consumer
    )
    return package
