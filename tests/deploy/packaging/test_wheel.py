"""The wheel, built and installed elsewhere: it serves, and neither needs nor gives modules by names that others own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from shared.version import tercet_version
from tests.deploy.packaging.installed import check_serving, environ_of
from tests.deploy.paths import check_relative_paths
from tests.programs import run_program

ROOT = Path(__file__).parents[3]
# Names that any other package may own.
FOREIGN = ("deploy", "gateway", "shared", "workers")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and an sdist of this checkout, and a wheel of the sdist."""
    folder = tmp_path_factory.mktemp("built")
    backend = folder / "backend"
    pip = (sys.executable, "-m", "pip", "--quiet")
    options = ("--require-hashes", "--only-binary", ":all:", "--target", backend)
    subprocess.run([*pip, "install", *options, "-r", ROOT / "requirements/backend.txt"], check=True)
    environ = {**os.environ, "PYTHONPATH": str(backend)}
    build = (sys.executable, "-m", "hatchling", "build", "--directory", folder)
    subprocess.run([*build, "--target", "wheel", "--target", "sdist"], cwd=ROOT, env=environ, check=True)
    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder / "of-sdist")
    subprocess.run([*pip, "wheel", *options, sdist], cwd=folder, env=environ, check=True)
    return {"wheel": wheel, "sdist": sdist, "wheel of the sdist": next((folder / "of-sdist").glob("*.whl"))}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with others' packages of the names that the repository's folders have.

    Tercet's requirements are those of the environment of the tests, without what is installed there from a checkout.
    """
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    site = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", environment / "bin/python")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", built["wheel"]], check=True)
    # Directories that a .pth file adds are not searched for further .pth files, so not for the checkout's.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    for name in FOREIGN:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"raise ImportError('{name} of another package')")
    return environment


def test_it_serves_reloads_and_stops(installed: Path, short_tmp_path: Path) -> None:
    check_serving([str(installed / "bin/tercet")], short_tmp_path / "p")


def test_every_path_is_relative_to_the_shell_that_started_it(installed: Path, short_tmp_path: Path) -> None:
    check_relative_paths([str(installed / "bin/tercet")], short_tmp_path)


def test_only_tercet_can_be_imported_and_the_command_says_the_version(
    built: dict[str, Path], installed: Path, tmp_path: Path
) -> None:
    """Whatever the wheel is made of; an installation from the sdist has the same files."""
    command = [str(installed / "bin/tercet"), "--version"]
    done = run_program(command, cwd=tmp_path, env=environ_of(tmp_path), check=True)
    assert done.stdout == f"tercet {tercet_version()}\n"
    names = {name: set(zipfile.ZipFile(path).namelist()) for name, path in built.items() if path.suffix == ".whl"}
    assert {Path(name).parts[0] for name in names["wheel"]} == {"tercet", f"tercet-{tercet_version()}.dist-info"}
    assert names["wheel"] == names["wheel of the sdist"]
    assert {"tercet/_app/gunicorn.conf.py", "tercet/_app/gateway/static/vendor/codemirror.js"} <= names["wheel"]
    assert any(re.fullmatch(r"tercet/_app/workers/engine/cpu/compiled/.*\.so", name) for name in names["wheel"])
    assert not any("/tests/" in name or "/training/" in name for name in names["wheel"])
