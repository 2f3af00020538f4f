"""The wheel, built and installed elsewhere: it serves, and neither needs nor gives modules by names that others own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shared.version import tercet_version
from tests.e2e.harness import free_port, until

ROOT = Path(__file__).parents[2]
START_S = 120
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


@contextmanager
def serving(environment: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that is started in a folder with a module `shared` of its own, as a user's project may have."""
    folder.mkdir()
    (folder / "shared").mkdir()
    (folder / "shared" / "__init__.py").write_text("raise ImportError('shared of the working directory')")
    address = f"127.0.0.1:{free_port()}"
    environ = environ_of(folder) | {"TERCET_BIND": address}
    with (folder / "log").open("w") as log:
        command = [str(environment / "bin/tercet"), "serve"]
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, text=True)
        try:
            yield process, f"http://{address}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def environ_of(folder: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TERCET_", "PYTHON"))}
    own |= {"PYTHONPATH": ".", "TERCET_MODELS": "embedded", "TERCET_DEVICES": "cpu", "TERCET_CPU_THREADS": "1"}
    return own | {"TERCET_RUN_DIR": str(folder / "run"), "TERCET_CACHE_DIR": str(folder / "cache")}


def test_it_serves_reloads_and_stops(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    with (
        serving(installed, folder) as (process, url),
        httpx.Client(base_url=url, trust_env=False, timeout=30) as client,
    ):

        def is_ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                return client.get("/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready, START_S, "the server of the wheel is ready")
        assert client.get("/health/ready").json()["version"] == tercet_version()
        context = "The old man looked at the sea and"
        assert len(client.post("/autocomplete", json={"context": context}).json()["sentences"]) == 3
        assert "<title>" in client.get("/", headers={"Accept": "text/html"}).text
        environ = environ_of(folder) | {"TERCET_BIND": url.removeprefix("http://")}
        for arguments in (["reload"], ["doctor"], ["plan"], ["complete", context]):
            command = [str(installed / "bin/tercet"), *arguments]
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        assert len(client.post("/autocomplete", json={"context": context}).json()["sentences"]) == 3
    assert process.returncode == 0, (folder / "log").read_text()


def test_only_tercet_can_be_imported(built: dict[str, Path]) -> None:
    """Whatever the wheel is made of; an installation from the sdist has the same files."""
    names = {name: set(zipfile.ZipFile(path).namelist()) for name, path in built.items() if path.suffix == ".whl"}
    assert {Path(name).parts[0] for name in names["wheel"]} == {"tercet", f"tercet-{tercet_version()}.dist-info"}
    assert names["wheel"] == names["wheel of the sdist"]
    assert {"tercet/_app/gunicorn.conf.py", "tercet/_app/gateway/static/vendor/codemirror.js"} <= names["wheel"]
    assert any(re.fullmatch(r"tercet/_app/workers/engine/cpu/compiled/.*\.so", name) for name in names["wheel"])
    assert not any("/tests/" in name or "/training/" in name for name in names["wheel"])


def test_the_command_says_the_version(installed: Path, tmp_path: Path) -> None:
    command = [str(installed / "bin/tercet"), "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environ_of(tmp_path), capture_output=True, text=True, check=True)
    assert done.stdout == f"tercet {tercet_version()}\n"
