"""The container image, built by buildah, and its server run from the image's files.

No base image is fetched: mmdebstrap makes a root of Debian 12, which takes the place of `debian:12-slim` (Dockerfile,
ARG BASE). Not shown: Docker, containerd or Kubernetes running the image, and the build with CUDA.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.cpu_features import INSTRUCTION_SETS
from tests.deploy.needs import need
from tests.e2e.harness import ROOT, free_port, until
from workers.engine.cpu_kernels import compiled_path

MAX_IMAGE_BYTES = 1_200_000_000
USER = 10001
WRITABLE = ("tmp", "var/lib/tercet")
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
        ROOT / "deploy/Dockerfile.dockerignore",
        "--file",
        ROOT / "deploy/Dockerfile",
        "--tag",
        IMAGE,
        ROOT,
    )
    container = run(*storage, "from", "--pull=never", IMAGE).strip()
    yield Path(run(*storage, "mount", container).strip())
    run(*storage, "umount", container)


def config_of(storage: Sequence[str]) -> dict[str, Any]:
    """What an engine runs: `USER`, `ENV`, `ENTRYPOINT`, `CMD`, `HEALTHCHECK`."""
    inspected = json.loads(run(*storage, "inspect", "--type", "image", IMAGE))
    config: dict[str, Any] = inspected["Docker"]["config"]
    return config


def test_the_image_is_small_and_has_no_tools_of_a_build(image: Path) -> None:
    size = int(run("du", "--summarize", "--apparent-size", "--block-size=1", image).split()[0])
    parts = run("du", "--apparent-size", "--block-size=1M", "--max-depth=7", "--threshold=10M", image)
    parts = parts.replace(f"{image}/", "/")
    print(f"image: {size / 1e6:.0f} MB\n{parts}")
    assert size <= MAX_IMAGE_BYTES, parts
    packages = {path.name for path in (image / "opt/tercet/.venv").glob("lib/python3*/site-packages/*")}
    assert {"torch", "falcon"} <= packages
    assert not {"pip", "ziglang"} & packages
    kernels = {path.name for path in (image / "opt/tercet/workers/engine/cpu/compiled").iterdir()}
    sets = [one for one in INSTRUCTION_SETS if one.machine == platform.machine()]
    assert kernels == {compiled_path(one, Path(), "linux").name for one in sets}
    assert not (image / "opt/tercet/tests").exists()
    assert not list(image.glob("etc/pip.conf"))


def test_the_image_runs_without_root_and_checks_its_health(storage: list[str], image: Path) -> None:
    config = config_of(storage)
    assert config["User"] == str(USER)
    assert "/health/ready" in " ".join(config["Healthcheck"]["Test"])
    assert set(config["Volumes"]) == {"/var/lib/tercet", "/models"}


def test_the_server_of_the_image_is_warm_soon_on_a_read_only_file_system(
    storage: list[str], image: Path, tmp_path: Path
) -> None:
    """As deploy/compose.yaml has it: a user without privileges, a read-only root, temporary directories in memory."""
    config = config_of(storage)
    port = free_port()
    environ = dict(entry.split("=", 1) for entry in config["Env"])
    environ |= {"TERCET_BIND": f"127.0.0.1:{port}", "TERCET_MODELS": "embedded"}
    del environ["TERCET_KEYS"]
    mounts = " && ".join(
        [
            f"mount --bind {image} {image} && mount -o remount,bind,ro {image}",
            *(f"mount -t tmpfs -o uid={USER} tercet {image}/{name}" for name in WRITABLE),
            f"mount -t proc proc {image}/proc && mount -t sysfs -o ro sys {image}/sys",
            f"mount --rbind /dev {image}/dev",
        ]
    )
    program = f'{mounts} && exec chroot --userspec={USER}:{USER} {image} sh -c \'cd /opt/tercet && exec "$@"\' sh "$@"'
    log_path = tmp_path / "log"
    started_at = time.monotonic()
    with (
        log_path.open("wb") as log,
        subprocess.Popen(
            [
                "unshare",
                "--mount",
                "--pid",
                "--fork",
                "--kill-child=TERM",
                "sh",
                "-c",
                program,
                "sh",
                *config["Entrypoint"],
                *config["Cmd"],
            ],
            env=environ,
            stdout=log,
            stderr=log,
            process_group=0,
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
    ):
        try:
            until(lambda: process.poll() is not None or _is_ready(client), 60, "ready")
            warm_s = time.monotonic() - started_at
            assert process.poll() is None, log_path.read_text()
            print(f"from the start of the container to warm: {warm_s:.2f} s")
            assert len(client.post("/autocomplete", json={"context": "The sea"}).json()["sentences"]) == 3
            health = [word.replace("8000", str(port)) for word in config["Healthcheck"]["Test"][1:]]
            inside = ["nsenter", f"--target={_child(process.pid)}", "--mount", "--root"]
            inside += ["env", f"PATH={environ['PATH']}"]
            run(*inside, *health)
            # Its kernels are the image's: none were compiled at the start.
            run(*inside, "sh", "-c", "! ls /var/lib/tercet/.cache/tercet/kernels-*")
        finally:
            os.kill(_child(process.pid), 15)
            assert process.wait(timeout=40) == 0, log_path.read_text()
    assert "ompiled kernels cannot be" not in log_path.read_text()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health/ready").status_code == 200
    except httpx.TransportError:
        return False


def _child(pid: int) -> int:
    """The first process of the container, seen from outside."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
