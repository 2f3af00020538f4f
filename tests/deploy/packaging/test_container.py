"""The container image, built by buildah, and its server run from the image's files.

No base image is fetched: mmdebstrap makes a root of Debian 12, which takes the place of `debian:12-slim` (Dockerfile,
ARG BASE). Not shown: Docker, containerd or Kubernetes running the image, and the build with CUDA.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.cpu_features import INSTRUCTION_SETS
from tests.deploy.needs import need
from tests.deploy.packaging.container import COMPOSE, USER, Container
from tests.e2e.harness import ROOT, free_port, until
from tests.workers.checkpoints.gguf_files import random_model, write_gguf
from tests.workers.checkpoints.hub_server import Hub, serving
from workers.checkpoints.resolve import EMBEDDED
from workers.engine.cpu_kernels import compiled_path

MAX_IMAGE_BYTES = 950_000_000
# What serving never imports: build tools, and what training or torch.compile needs.
ABSENT = {"pip", "ziglang", "transformers", "regex", "sympy", "mpmath", "networkx", "numba", "llvmlite"}
# Prints the packages that modules import and do not find; training needs a checkout.
IMPORT_ALL = """
import importlib, pkgutil
missing = set()
for folder in ("deploy", "gateway", "shared", "workers"):
    for found in pkgutil.walk_packages([folder], f"{folder}."):
        if not found.name.startswith("workers.training") and not found.name.endswith("__main__"):
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                missing.add(error.name.partition(".")[0])
print(*sorted(missing))
"""
IMAGE = "localhost/tercet-test"
# No overlay file system, which not every container or virtual machine has.
STORAGE = ("--storage-driver", "vfs")
# What Debian's slim images leave out of each package.
SLIM = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "info", "linda", "lintian", "locale", "man")]

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The first words of each buildah command, with a storage of the tests' own."""
    need("buildah", "mmdebstrap", root=True)
    base = tmp_path_factory.mktemp("storage")
    yield ["buildah", *STORAGE, "--root", f"{base}/root", "--runroot", f"{base}/run"]
    shutil.rmtree(base)


def run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def pip_options(directory: Path) -> list[str]:
    """buildah options by which pip in the build uses the packages that pip on this machine uses."""
    lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    found = re.findall(r"^(?:global|:env:)\.([a-z-]+)='(.*)'$", "\n".join(lines), re.MULTILINE)
    values = {name: value.replace("\\n", " ") for name, value in found}
    if "cert" in values:  # where it lies, packages of Debian write
        values["cert"] = str(shutil.copy(values["cert"], directory / "cert.pem"))
    config = directory / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    words = {word for value in values.values() for word in value.split()}
    # The files of an index on this machine lie next to it.
    paths = {Path(word) for word in words} | {Path(word.removeprefix("file://")).parent for word in words}
    mounted = sorted(str(path) for path in paths if path.is_absolute() and len(path.parts) > 2 and path.exists())
    return [f"--secret=id=pip.conf,src={config}", *(f"--volume={path}:{path}:ro" for path in mounted)]


@pytest.fixture(scope="module")
def image(storage: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files of the built image."""
    base = tmp_path_factory.mktemp("image")
    run("mmdebstrap", "--mode=root", "--variant=minbase", *SLIM, "bookworm", base / "debian.tar")
    debian = run(*storage, "from", "scratch").strip()
    run(*storage, "add", debian, base / "debian.tar", "/")
    run(*storage, "commit", "--rm", debian, "localhost/debian-test")
    run(
        *storage,
        "build",
        "--isolation",
        "chroot",
        "--format",
        "docker",
        "--layers=false",
        "--pull=never",
        "--build-arg",
        "BASE=localhost/debian-test",
        "--build-arg",
        "TORCH_INDEX=",
        *pip_options(base),
        "--ignorefile",
        ROOT / "deploy/packaging/Dockerfile.dockerignore",
        "--file",
        ROOT / "deploy/packaging/Dockerfile",
        "--tag",
        IMAGE,
        ROOT,
    )
    container = run(*storage, "from", "--pull=never", IMAGE).strip()
    yield Path(run(*storage, "mount", container).strip())
    run(*storage, "umount", container)


@pytest.fixture(scope="module")
def config(storage: list[str], image: Path) -> dict[str, Any]:
    """What an engine runs: `USER`, `ENV`, `ENTRYPOINT`, `CMD`, `HEALTHCHECK`."""
    inspected = json.loads(run(*storage, "inspect", "--type", "image", IMAGE))
    config: dict[str, Any] = inspected["Docker"]["config"]
    return config


def test_the_image_is_small_and_has_no_tools_of_a_build(config: dict[str, Any], image: Path) -> None:
    assert (config["User"], set(config["Volumes"])) == (str(USER), {"/var/lib/tercet", "/models"})
    size = int(run("du", "--summarize", "--apparent-size", "--block-size=1", image).split()[0])
    parts = run("du", "--apparent-size", "--block-size=1M", "--max-depth=7", "--threshold=10M", image)
    parts = parts.replace(f"{image}/", "/")
    print(f"image: {size / 1e6:.0f} MB\n{parts}")
    assert size <= MAX_IMAGE_BYTES, parts
    packages = {path.name for path in (image / "opt/tercet/.venv").glob("lib/python3*/site-packages/*")}
    assert {"torch", "falcon"} <= packages
    assert not ABSENT & packages
    kernels = {path.name for path in (image / "opt/tercet/workers/engine/cpu/compiled").iterdir()}
    sets = [one for one in INSTRUCTION_SETS if one.machine == platform.machine()]
    assert kernels == {compiled_path(one, Path(), "linux").name for one in sets}
    assert not (image / "opt/tercet/tests").exists()
    assert not list(image.glob("etc/pip.conf"))


def test_the_server_is_warm_soon_and_completes(config: dict[str, Any], image: Path, tmp_path: Path) -> None:
    """A first start, whose volume is empty, and a later one; prints the times."""
    port = free_port()
    container = Container(image, config, tmp_path, BIND=f"127.0.0.1:{port}", KEYS="", MODELS="embedded")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
        for start in ("first", "later"):
            started_at = time.monotonic()
            with container.running() as running:
                until(lambda: running.has_ended or _is_ready(client), 120, "ready")
                print(f"from exec to warm, {start} start: {time.monotonic() - started_at:.2f} s")
                running.assert_alive()
                assert len(client.post("/autocomplete", json={"context": "The sea"}).json()["sentences"]) == 3
    # Its kernels are the image's: none were compiled at a start.
    assert "ompiled kernels cannot be" not in container.log_path.read_text()
    assert not list(container.state.glob(".cache/tercet/kernels-*"))


def test_models_of_the_hub_come_into_the_volume(config: dict[str, Any], image: Path, tmp_path: Path) -> None:
    """By the documented command, from a hub on this machine. Then they are served without it, beside a checkpoint and
    a GGUF file of /models."""
    assert "run --rm tercet plan --fetch" in COMPOSE.read_text()
    port = free_port()
    models = "tiny=org/tiny,own=/models/own,file=/models/file.gguf"
    container = Container(image, config, tmp_path / "container", BIND=f"127.0.0.1:{port}", KEYS="", MODELS=models)
    write_checkpoint(container.models / "own")
    write_gguf(container.models / "file.gguf", random_model("llama"))
    run("chmod", "-R", "a+rX", container.models)
    with serving(Hub()) as hub:
        files = write_checkpoint(tmp_path / "tiny").iterdir()
        hub.repositories["org/tiny"] = {path.name: path.read_bytes() for path in files}
        container.environ["HF_ENDPOINT"] = hub.url
        done = container.run("plan", "--fetch")
        assert done.returncode == 0, done.stdout
    with container.running() as running:
        running.wait_until_healthy()
        url = f"http://127.0.0.1:{port}/slots"
        slots = httpx.get(url, headers={"Accept": "application/json"}, trust_env=False).json()["slots"]
        assert [slot["model"] for slot in slots] == ["tiny", "own", "file"]


def test_no_module_needs_a_package_that_was_left_out(config: dict[str, Any], image: Path, tmp_path: Path) -> None:
    """What the modules lack is an extra's, or is in images for GPUs."""
    done = Container(image, config, tmp_path).run("-c", IMPORT_ALL, entrypoint=["python"])
    assert done.returncode == 0, done.stdout
    missing = set(done.stdout.splitlines()[-1].split())
    assert missing <= {"boto3", "botocore", "lsprotocol", "pygls", "ray", "triton"}, done.stdout


def write_checkpoint(directory: Path) -> Path:
    """A small GPT-2 with the embedded tokenizer."""
    random_model("gpt2").save_pretrained(directory)
    shutil.copy(EMBEDDED / "tokenizer.json", directory)
    return directory


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False
