"""Packs the Lambda function of `lambda-ec2.yaml`: `python -m deploy.cloud.aws.wake_archive build/aws`.

The archive holds the function, the modules of Tercet that it imports, and the libraries that these import and Lambda
lacks, as wheels for Lambda's platform. Its name holds a digest of its content, so CloudFormation updates the function
when, and only when, it has changed. Equal sources and versions make equal archives.
"""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import version
from modulefinder import ModuleFinder
from pathlib import Path

ROOT = Path(__file__).parents[3]
FUNCTION = "deploy.cloud.aws.wake.handler"
# As the template's `Runtime` and `Architectures`.
PYTHON, PLATFORM = "3.11", "manylinux2014_aarch64"
PROVIDED = {"boto3", "botocore"}  # by Lambda
# Time of every file: the earliest that the format knows.
_TIME = (1980, 1, 1, 0, 0, 0)


def find_modules() -> tuple[list[Path], set[str]]:
    """The files of Tercet that the function needs, and the libraries that Lambda lacks, both by their imports."""
    finder = ModuleFinder(path=[str(ROOT)])
    finder.import_hook(FUNCTION)
    files = sorted(Path(file) for module in finder.modules.values() if (file := getattr(module, "__file__", None)))
    absent = {name.partition(".")[0] for name in finder.badmodules}
    return files, absent - sys.stdlib_module_names - PROVIDED


def download_wheels(directory: Path) -> list[Path]:
    """Fetch the libraries, in the versions that are installed here, from pip's index.

    Raises:
        subprocess.CalledProcessError: pip has said why.
    """
    options = ["--only-binary=:all:", "--platform", PLATFORM, "--python-version", PYTHON, "--implementation", "cp"]
    libraries = [f"{name}=={version(name)}" for name in sorted(find_modules()[1])]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--dest", str(directory), *libraries]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return [*directory.glob("*.whl")]


def pack(directory: Path, wheels: Iterable[Path]) -> Path:
    """Write `tercet-wake-<digest>.zip` and return its path."""
    contents = {str(path.relative_to(ROOT)): path.read_bytes() for path in find_modules()[0]}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            contents |= {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in sorted(contents.items()):
            info = zipfile.ZipInfo(name, _TIME)
            info.external_attr = 0o644 << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    data = content.getvalue()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"tercet-wake-{hashlib.sha256(data).hexdigest()[:16]}.zip"
    path.write_bytes(data)
    return path


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as wheels:
        sys.stdout.write(f"{pack(Path(sys.argv[1]), download_wheels(Path(wheels)))}\n")
