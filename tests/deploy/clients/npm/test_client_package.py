"""The npm package of the client module: what is in it, what it declares, and that the module's types are consistent."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from deploy.clients.npm import client_package
from tests.deploy.command_line.test_cli import run_module
from tests.npm_package import NpmPackage

PROGRAMS = [Path(__file__).with_name("consumer.ts"), *client_package.ROOT.glob("tests/browser/editors/*.ts")]


def test_without_npm_the_command_says_so(tmp_path: Path) -> None:
    process = run_module("deploy.clients.npm.client_package", str(tmp_path), PATH=str(tmp_path))
    assert (process.returncode, process.stderr) == (1, "npm is not installed (apt-get install npm)\n")


def test_the_package_has_the_modules_their_declarations_and_nothing_of_the_page(npm_package: NpmPackage) -> None:
    with tarfile.open(npm_package.packed) as archive:
        names = {name.removeprefix("package/") for name in archive.getnames()}
        [manifest] = [json.load(file) for file in [archive.extractfile("package/package.json")] if file]
    modules = {name for name in names if name.endswith(".js")}
    assert names == {"package.json", "README.md", "LICENSE", *modules, *(f"{name[:-3]}.d.ts" for name in modules)}
    assert {"tercet.js", "client.js", "textarea.js", "codemirror.js", "prosemirror.js"} <= modules
    assert not modules & {"page.js", "settings.js", "store.js"}
    assert f"-{manifest['version']}.tgz" in npm_package.packed.name
    assert manifest["peerDependenciesMeta"].keys() == manifest["peerDependencies"].keys()


@pytest.mark.parametrize("resolution", ["bundler", "nodenext"])
def test_declarations_serve_strict_programs(npm_package: NpmPackage, resolution: str) -> None:
    """Declarations of the package and of the editors are checked too. An expected error that is missing is an error."""
    assert len(PROGRAMS) > 1
    names = [Path(shutil.copy(path, npm_package.consumer)).name for path in PROGRAMS]
    module = "esnext" if resolution == "bundler" else resolution
    npm_package.run(
        "tsc",
        "--ignoreConfig",
        "--strict",
        "--noEmit",
        "--target",
        "es2023",
        "--lib",
        "esnext,dom",
        "--module",
        module,
        "--moduleResolution",
        resolution,
        *names,
    )


def test_the_examples_of_the_readme_are_consistent_in_their_types(npm_package: NpmPackage) -> None:
    text, _, _ = client_package.README.read_text("utf-8").partition(
        "## Frameworks"
    )  # those run in tests/browser/test_examples.py
    examples = re.findall(r"```js\n(.*?)```", text, re.DOTALL)
    names = [f"example_{number}.js" for number in range(len(examples))]
    assert len(names) == 3
    for name, example in zip(names, examples, strict=True):
        (npm_package.consumer / name).write_text(example)
    # A bundler resolves the import of a style sheet.
    npm_package.run("tsc", *client_package.CHECK, "--noEmit", "--noUncheckedSideEffectImports", "false", *names)


def test_all_modules_of_the_pages_are_consistent_in_their_types(npm_package: NpmPackage) -> None:
    copies = npm_package.tools / "static"
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir()
    files = {Path(shutil.copy(path, copies)) for path in client_package.STATIC.glob("*.js")}
    workers = {path for path in files if path.name == "service_worker.js"}
    assert files - workers
    try:
        client_package.check_types(files - workers, npm_package.tools, "--noEmit")
        for path in workers:  # its global object is another
            client_package.check_types([path], npm_package.tools, "--noEmit", "--lib", "esnext,webworker")
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stdout)


def test_a_client_outside_a_server_requires_a_url(npm_package: NpmPackage) -> None:
    """The package can be imported in Node, too."""
    program = (
        'import { Client } from "tercet-client";'
        'new Client({ url: "http://localhost:8000" });'
        "try { new Client(); } catch (error) { console.log(String(error)); }"
    )
    printed = npm_package.run("node", "--input-type=module", "--eval", program)
    assert printed == "TypeError: Client requires `url`, because no Tercet server served this module.\n"


RETRY_AFTER = """
import { createServer } from "node:http";
import { Client } from "tercet-client";
const values = ["7", "99999999999", "-3", "Wed, 21 Oct 2026 07:28:00 GMT", "Infinity", ""];
const server = createServer((request, response) => {
  response.writeHead(503, { "Retry-After": values[request.headers["x-session-id"]] }).end("{}");
}).listen(0, "127.0.0.1", async () => {
  const found = [];
  for (const index of values.keys()) {
    const url = `http://127.0.0.1:${server.address().port}/`;
    const client = new Client({ url, session: String(index) });
    found.push(await client.complete({ context: "a" }).catch(({ retryAfterS }) => retryAfterS));
  }
  console.log(JSON.stringify(found));
  server.close();
  server.closeAllConnections();
});
"""


def test_no_server_silences_the_client_for_longer_than_a_minute(npm_package: NpmPackage) -> None:
    found = npm_package.run("node", "--input-type=module", "--eval", RETRY_AFTER)
    assert json.loads(found) == [7, 60, 0, 0, 60, 0]
