"""Builds what the pages are served with of other projects: `python -m deploy.packaging.vendor.bundles DIRECTORY`.

`npm ci` installs the locked packages into the directory. Of CodeMirror, esbuild bundles what `codemirror.js` beside
this file names; of Swagger UI, which shows the API's documentation, the files are copied as its maintainers built them.
The same lock gives the same bytes. The result is committed, so serving needs no npm.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from deploy.clients.npm.client_package import exiting_on_failure, npm

HERE = Path(__file__).parent
VENDOR = HERE.parents[2] / "gateway/static/vendor"
BUNDLE = "codemirror.js"
LICENSES = "codemirror.LICENSES.txt"
# Files of the package swagger-ui-dist, by the name under which they are served.
VIEWER = {
    "swagger-ui.js": ("swagger-ui-bundle.js",),
    "swagger-ui.css": ("swagger-ui.css",),
    "swagger-ui.LICENSES.txt": ("LICENSE", "NOTICE", "swagger-ui-bundle.js.LICENSE.txt"),
}
# The oldest browsers that have import maps and what else the page uses.
TARGET = "chrome120,firefox121,safari17.4"


def build(directory: Path) -> dict[str, bytes]:
    """Build in `directory`; returns the scripts and styles, and the licences of what is in them, by file name.

    Raises what `npm` does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json", BUNDLE):
        shutil.copy(HERE / name, directory)
    npm("ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-timeout=20000", directory=directory)
    esbuild = [str(directory / "node_modules/.bin/esbuild"), BUNDLE, "--bundle", "--minify", "--format=esm"]
    options = [f"--target={TARGET}", "--legal-comments=none", "--outfile=bundle.js", "--metafile=inputs.json"]
    subprocess.run([*esbuild, *options], cwd=directory, capture_output=True, text=True, check=True)
    inputs = json.loads((directory / "inputs.json").read_text("utf-8"))["inputs"]
    packages = sorted({_package(path) for path in inputs if path.startswith("node_modules/")})
    licenses = [
        f"{package}\n\n{(directory / 'node_modules' / package / 'LICENSE').read_text('utf-8').strip()}\n"
        for package in packages
    ]
    bundle = {BUNDLE: (directory / "bundle.js").read_bytes(), LICENSES: "\n\n".join(licenses).encode()}
    package = directory / "node_modules/swagger-ui-dist"
    viewer = {name: b"\n".join((package / part).read_bytes() for part in parts) for name, parts in VIEWER.items()}
    return bundle | viewer


def _package(path: str) -> str:
    """The package of a file in node_modules: `@scope/name`, or `name`."""
    parts = path.split("/")[1:]
    return "/".join(parts[: 2 if parts[0].startswith("@") else 1])


def main() -> None:
    with exiting_on_failure():
        files = build(Path(sys.argv[1]).resolve())
    VENDOR.mkdir(exist_ok=True)
    for name, data in files.items():
        (VENDOR / name).write_bytes(data)
        sys.stdout.write(f"{VENDOR / name}: {len(data):,} bytes\n")


if __name__ == "__main__":
    main()
