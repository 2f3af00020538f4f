"""Which build of torch is installed on which machine, and what the command of `tercet plan` installs.

pip, Python and the programs are real; tiny wheels on an index of the tests' own stand for torch, files below a
directory for devices, and a script for `nvidia-smi`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import sysconfig
import threading
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.cloud.aws import images
from deploy.tuning import gpus
from requirements import torch_build
from requirements.torch_build import find_cpu_build, find_device, read_page
from shared.extras import torch_command
from shared.gpu_builds import INDEX, fitting_builds
from tests.deploy.packaging.package_index import LIBRARIES, PackageIndex, pip_environ, serving, write_torch
from tests.deploy.packaging.test_requirements import pins
from tests.e2e.harness import ROOT
from tests.gateway.pool.helpers import Answer, sends, serving_tcp
from tests.programs import gpu_row, run_program, write_program

SCRIPT = ROOT / "requirements/torch_build.py"
PINNED = str(pins("torch")["torch"])
HANG_S = 30.0


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PackageIndex]:
    """`pypi` has the CUDA build, without a local part; `both` has the CPU build, too; `cpu` and `cu…` are PyTorch's."""
    folder = tmp_path_factory.mktemp("index")
    write_torch(folder / "pypi", PINNED, "13.0")
    write_torch(folder / "both", PINNED, "13.0")
    for name in ("cpu", "both"):
        write_torch(folder / name, f"{PINNED}+cpu", None)
    for release in (PINNED, "2.11.0"):
        for build in fitting_builds(release, None):
            write_torch(folder / build.tag, f"{release}+{build.tag}", build.cuda)
    write_torch(folder / "cpu", "2.11.0+cpu", None)
    with serving(folder) as served:
        yield served


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with nothing but pip."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    for path in Path(sysconfig.get_path("purelib")).glob("pip*"):
        shutil.copytree(path, site_packages(folder / "bin/python") / path.name)
    return folder / "bin/python"


def run_pip(python: Path, environ: dict[str, str], *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--quiet", *arguments]
    done = run_program(command, env=environ)
    assert done.returncode == 0, done.stderr


def site_packages(python: Path) -> Path:
    return python.parents[1] / f"lib/python{sysconfig.get_python_version()}/site-packages"


def installed(python: Path) -> dict[str, str]:
    """Version of each package."""
    names = (path.name.removesuffix(".dist-info") for path in site_packages(python).glob("*.dist-info"))
    return {name: version for name, _, version in (each.partition("-") for each in names)}


def remove_torch(python: Path) -> None:
    """Also what a test before left behind."""
    for path in [*site_packages(python).glob("torch*"), *site_packages(python).glob("nvidia*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


NVIDIA = {"dev/nvidia0": ""}
DEVICES = {
    "a node": NVIDIA,
    "the control node": {"dev/nvidiactl": ""},
    "WSL": {"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""},
    "a card without a driver": {
        "sys/bus/pci/devices/0000:00:04.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:00:04.0/class": "0x030200\n",
    },
    "a GPU that nvidia-smi lists": {"nvidia-smi": "#!/bin/sh\necho 'GPU 0: Tesla T4 (UUID: GPU-aaaa)'\n"},
}
OTHER_DEVICES = {
    "nothing": {},
    "WSL with another vendor's": {"dev/dxg": ""},
    "another vendor's card": {
        "sys/bus/pci/devices/0000:00:04.0/vendor": "0x1002\n",
        "sys/bus/pci/devices/0000:00:04.0/class": "0x030000\n",
    },
    "another chip of NVIDIA's": {
        "sys/bus/pci/devices/0000:00:04.0/vendor": "0x10de\n",
        "sys/bus/pci/devices/0000:00:04.0/class": "0x020000\n",
    },
    "a module of the driver alone": {"dev/nvidia-modeset": ""},
    "nvidia-smi without a GPU": {"nvidia-smi": "#!/bin/sh\necho No devices were found\n"},
    "nvidia-smi that fails": {"nvidia-smi": "#!/bin/sh\nexit 9\n"},
    "nvidia-smi that prints nothing": {"nvidia-smi": "#!/bin/sh\n"},
}


def make_files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return root


@pytest.mark.parametrize(
    ("files", "is_nvidia"),
    [*((files, True) for files in DEVICES.values()), *((files, False) for files in OTHER_DEVICES.values())],
    ids=[*DEVICES, *OTHER_DEVICES],
)
def test_a_device_is_found_by_its_files_or_by_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], is_nvidia: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (find_device(make_files(tmp_path, files)) is not None) == is_nvidia


def test_the_device_nodes_are_those_of_the_server() -> None:
    assert torch_build.DEVICE_NODES == gpus.DEVICE_NODES


MACHINES = {
    "no device": ({}, "pypi", {}, f"{PINNED}+cpu", "no NVIDIA device"),
    "device": (NVIDIA, "pypi", {}, PINNED, "has an NVIDIA device"),
    "cpu on a device": (NVIDIA, "pypi", {"TORCH": "cpu"}, f"{PINNED}+cpu", "TORCH=cpu"),
    "cuda without one": ({}, "pypi", {"TORCH": "cuda"}, PINNED, "TORCH=cuda"),
    "cuda of an index with both": ({}, "both", {"TORCH": "cuda"}, PINNED, "TORCH=cuda"),
    "default": ({}, "pypi", {"TORCH": "default"}, PINNED, "TORCH=default"),
    "default of an index with both": ({}, "both", {"TORCH": "default"}, f"{PINNED}+cpu", "TORCH=default"),
    "no index": ({}, "pypi", {"TORCH_INDEX": "http://127.0.0.1:1"}, PINNED, "does not answer"),
}


@pytest.mark.integration
@pytest.mark.parametrize(("files", "configured", "environ", "version", "why"), MACHINES.values(), ids=MACHINES)
def test_the_machine_or_the_setting_decides_which_build_pip_installs(
    environment: Path,
    index: PackageIndex,
    tmp_path: Path,
    files: dict[str, str],
    configured: str,
    environ: dict[str, str],
    version: str,
    why: str,
) -> None:
    """pip is configured as on most machines: with an index whose torch brings CUDA."""
    index.requests.clear()
    own = pip_environ(f"{index.url}/{configured}")
    remove_torch(environment)
    environ = own | {"TORCH_INDEX": f"{index.url}/cpu", "TORCH_ROOT": str(make_files(tmp_path, files))} | environ
    command = [str(environment), str(SCRIPT)]
    done = run_program(command, env=environ, check=True)
    assert why in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(index.requests) <= 1
    requirements = tmp_path / "torch.txt"
    requirements.write_text(done.stdout)
    pinned = ("-c", str(ROOT / "requirements/cuda.txt")) if version.endswith("+cpu") else ()  # another cuBLAS here
    run_pip(environment, own, "install", "--only-binary", ":all:", "-r", str(requirements), *pinned)
    assert installed(environment)["torch"] == version
    assert ("nvidia_cublas" in installed(environment)) == (version == PINNED)
    assert ("--hash=sha256:" in done.stdout) == ("TORCH_INDEX" not in environ or "--index-url" in done.stdout)

    again = run_program(command, env=environ, check=True)
    assert "stays" in again.stderr
    assert "torch" not in again.stdout.replace("torch_build", "")


def test_another_value_is_refused_with_the_values() -> None:
    for value in ("gpu", "CPU", "cu126", "cpu cuda"):
        environ = {**os.environ, "TORCH": value}
        done = run_program([sys.executable, SCRIPT], env=environ)
        assert (done.returncode, done.stdout) == (1, "")
        assert f"TORCH={value}" in done.stderr
        assert "cpu, cuda or default" in done.stderr


released = threading.Event()  # ends what trickles, for the thread that still reads it


def trickle(connection: socket.socket) -> None:
    released.clear()
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    ends = time.monotonic() + HANG_S
    while time.monotonic() < ends and not released.wait(0.05):
        connection.sendall(b"<a href='torch'>")


SILENT: dict[str, Answer] = {
    "never answers": lambda connection: connection.recv(1),
    "trickles": trickle,
    "fails": sends(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"),
    "speaks something else": sends(b"\0\1\2\r\n\r\n"),
    "ends in the middle": sends(),
}


@pytest.mark.parametrize("answer", SILENT.values(), ids=SILENT)
def test_an_index_that_does_not_answer_is_asked_once_and_does_not_hold_up_the_setup(answer: Answer) -> None:
    with serving_tcp(answer) as server:
        began = time.monotonic()
        assert read_page(f"http://{server.address}/torch/", limit_s=0.5) == ""
        assert time.monotonic() - began < HANG_S / 2
        assert server.num_connections == 1
        released.set()


def test_a_name_server_that_hangs_does_not_hold_up_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hang(*arguments: object, **options: object) -> None:
        released.wait(HANG_S)
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    began = time.monotonic()
    assert read_page("http://index.example/torch/", limit_s=0.2) == ""
    assert time.monotonic() - began < HANG_S / 2
    released.set()


def test_the_program_ends_while_an_index_hangs(tmp_path: Path) -> None:
    """Its thread waits for the answer; Python does not wait for the thread."""
    assert torch_build.LIMIT_S < 2
    with serving_tcp(trickle) as server:
        environ = {**os.environ, "TORCH": "cpu", "TORCH_INDEX": f"http://{server.address}"}
        command = [sys.executable, "-S", str(SCRIPT)]  # without site-packages: no torch is installed
        began = time.monotonic()
        done = run_program(command, env=environ, check=True)
        assert time.monotonic() - began < HANG_S / 2
    assert f"torch=={PINNED}\n" in done.stdout
    assert "does not answer" in done.stderr


OWN = f"cp{sys.version_info[0]}{sys.version_info[1]}"
MACHINE = f"manylinux_2_28_{os.uname().machine}"
A, B = "a" * 64, "b" * 64


def link(version: str, tags: str = f"{OWN}-{OWN}-{MACHINE}", digest: str = A) -> str:
    return (
        f'<a href="/whl/cpu/torch-{version}-{tags}.whl#sha256={digest}" data-requires-python="&gt;=3.10">torch</a><br/>'
    )


PAGES = {
    "as PyTorch's": (link("2.13.0%2Bcpu"), ("2.13.0+cpu", [A])),
    "a plus sign": (link("2.13.0+cpu"), ("2.13.0+cpu", [A])),
    "a plus sign of HTML": (link("2.13.0&#43;cpu"), ("2.13.0+cpu", [A])),
    "no local part": (link("2.13.0"), ("2.13.0", [A])),
    "with and without": (link("2.13.0", digest=B) + link("2.13.0+cpu"), ("2.13.0+cpu", [A])),
    "a build number": (link("2.13.0+cpu-1"), ("2.13.0+cpu", [A])),
    "two files": (link("2.13.0+cpu") + link("2.13.0+cpu-1", digest=B), ("2.13.0+cpu", [A, B])),
    "any machine": (link("2.13.0+cpu", "py3-none-any"), ("2.13.0+cpu", [A])),
    "no hash": (link("2.13.0+cpu").replace("#sha256", "#md5"), ("2.13.0+cpu", [])),
    "one without a hash": (link("2.13.0+cpu") + link("2.13.0+cpu-1", digest="0"), ("2.13.0+cpu", [])),
    "other versions": (link("2.13.1+cpu") + link("2.13.0.post1+cpu") + link("2.12.0+cpu"), None),
    "another release of the same prefix": (link("12.13.0+cpu"), None),
    "a CUDA build": (link("2.13.0+cu130"), None),
    "another Python": (link("2.13.0+cpu", f"cp38-cp38-{MACHINE}"), None),
    "a Python without a lock": (link("2.13.0+cpu", f"{OWN}-{OWN}t-{MACHINE}"), None),
    "another machine": (link("2.13.0+cpu", f"{OWN}-{OWN}-manylinux_2_28_s390x"), None),
    "Windows": (link("2.13.0+cpu", f"{OWN}-{OWN}-win_amd64"), None),
    "another project": (link("2.13.0+cpu").replace("/torch-", "/torchvision-"), None),
    "a login": ('<html><a href="https://[login">Log in</a> to go on</html>', None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("page", "expected"), PAGES.values(), ids=PAGES)
def test_the_exact_version_and_the_hashes_are_those_of_the_page(
    page: str, expected: tuple[str, list[str]] | None
) -> None:
    assert find_cpu_build(f"<!DOCTYPE html><html><body>{page}</body></html>", "2.13.0") == expected


CPU, CUDA_13 = f"{PINNED}+cpu", PINNED
# Card, torch that is installed, and the build that the command installs.
REPAIRS = {
    "V100": (gpu_row("Tesla V100-SXM2-16GB", "7.0"), CPU, "cu126"),
    "V100 with an interrupted installation": (gpu_row("Tesla V100-SXM2-16GB", "7.0"), f"{PINNED}+cu126", "cu126"),
    "T4 with driver 535 and the build of PyPI": (gpu_row("Tesla T4", "7.5", "535.183.01"), CUDA_13, "cu126"),
    "B200 with the build for V100": (gpu_row("NVIDIA B200", "10.0"), f"{PINNED}+cu126", "cu132"),
    "torch 2.11, H100, driver 535": (gpu_row("NVIDIA H100 80GB HBM3", driver="535.183.01"), "2.11.0+cpu", "cu128"),
}
# Tercet's other requirements come from the environment of the tests, after the torch that is checked.
CHECK = (
    "import sys; sys.path.append(sys.argv[1]); from deploy.tuning.gpus import check_gpus\n"
    "check_gpus(['cuda:0'], 'auto', {})"
)


def check(python: Path, environ: dict[str, str]) -> str:
    """What `tercet plan` says about the GPU, with the torch of this Python; empty if that serves it."""
    command = [str(python), "-c", CHECK, sysconfig.get_path("purelib")]
    done = run_program(command, env=environ, cwd=ROOT)
    return done.stderr


@pytest.mark.integration
@pytest.mark.parametrize(("row", "version", "tag"), REPAIRS.values(), ids=REPAIRS)
def test_the_command_that_a_refusal_names_installs_the_build_that_serves_the_card(
    environment: Path, index: PackageIndex, tmp_path: Path, row: str, version: str, tag: str
) -> None:
    remove_torch(environment)
    wheel = next(index.folder.glob(f"*/torch/torch-{version}-*.whl"))
    zipfile.ZipFile(wheel).extractall(site_packages(environment))
    if version.endswith(f"+{tag}"):
        (site_packages(environment) / "torch/version.py").write_text("")
    write_program(tmp_path / "nvidia-smi", f"echo '{row}'")
    environ = pip_environ(f"{index.url}/pypi") | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    refusal = check(environment, environ)
    found = re.search(rf"{re.escape(str(environment))} -m pip install .*?(?= \(docs/GPU\.md)", refusal)
    assert found is not None, refusal
    assert INDEX in found[0]
    command = found[0].replace(INDEX, index.url)
    done = run_program(command, env=environ, shell=True)
    assert done.returncode == 0, done.stderr

    release, driver = version.partition("+")[0], int(row.split(", ")[3].partition(".")[0])
    [build] = [build for build in fitting_builds(release, None, driver) if build.tag == tag]
    versions = installed(environment)
    assert versions["torch"] == f"{release}+{tag}"
    name, _, pinned = LIBRARIES[build.cuda].partition("==")
    assert versions[name.replace("-", "_")] == pinned
    assert check(environment, environ) == ""


def test_every_text_names_builds_that_the_pinned_torch_has() -> None:
    """And the pinned version."""
    texts = [
        path.read_text()
        for path in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "deploy/packaging/Dockerfile"]
    ]
    texts += [(ROOT / "deploy/cloud/kubernetes/cloudbuild.yaml").read_text(), images.GPU_INDEX, images.CPU_INDEX]
    tags = {tag for text in texts for tag in re.findall(rf"{re.escape(INDEX)}/(\w+)", text)}
    assert tags - {"cpu"} <= {build.tag for build in fitting_builds(PINNED, None)}
    assert "cpu" in tags
    assert images.CPU_INDEX == torch_build.CPU_INDEX
    assert {version for text in texts for version in re.findall(r"\btorch==([\d.]+)", text)} == {PINNED}
    [command] = re.findall(r"^\.venv/bin/python (-m pip install .*)$", (ROOT / "docs/GPU.md").read_text(), re.MULTILINE)
    assert torch_command(PINNED, "cu126", INDEX) == f"{sys.executable} {command}"


def test_the_table_of_builds_by_version_is_that_of_the_code() -> None:
    [line] = re.findall(
        r"\*\*Builds by version of torch:\*\* ([^;]*); ([^.]*\.[^.]*\.[^.]*)\.", (ROOT / "docs/GPU.md").read_text()
    )
    for text, releases in zip(line, (("2.11.0",), ("2.12.0", "2.13.1", "2.14.0")), strict=True):
        for release in releases:
            assert set(re.findall(r"cu\d+", text)) == {build.tag for build in fitting_builds(release, None)}
