"""The commands that complete an installation, in messages: for a checkout, an installed wheel, and the container image.

They name the packages that an extra of pyproject.toml consists of, because Tercet is on no package index: by its bare
name, whatever was published under it would be installed.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib.metadata import requires
from pathlib import Path

# The folder that holds gateway/, workers/, shared/, deploy/ and gunicorn.conf.py.
ROOT = Path(__file__).parents[1]
_OF_EXTRA = re.compile(r"""(?P<requirement>[^;]+); extra == ['"](?P<extra>[^'"]+)['"]""")


def install_command(extra: str) -> str:
    """A shell command that works in any directory and installs `extra` for the Python that is running.

    Nothing is installed into the image: the command builds another one, in a checkout.
    """
    found = (_OF_EXTRA.fullmatch(line.strip()) for line in requires("tercet") or ())
    requirements = [match["requirement"].strip() for match in found if match and match["extra"] == extra]
    if not _is_image():
        return pip_install(*requirements)
    names = [re.split(r"[<>=~!;\[ ]", requirement, maxsplit=1)[0] for requirement in requirements]
    return _build_image(f"EXTRA=-c requirements/dev.txt {' '.join(names)}")


def torch_command(release: str, tag: str, indexes: str) -> str:
    """A shell command that replaces the installed torch by another build, with the libraries that this one requires.

    The local part names the build: without it, any installed build satisfies pip. The installation is forced, because
    one that was interrupted has the same version.

    Args:
        release: version of torch, like 2.13.0.
        tag: of the build, like cu126.
        indexes: address whose paths are the package indexes of the builds.
    """
    if _is_image():
        return _build_image(f"TORCH_INDEX={indexes}/{tag}")
    return pip_install("--force-reinstall", f"torch=={release}+{tag}", "--index-url", f"{indexes}/{tag}")


def pip_install(*arguments: str) -> str:
    """A shell command that installs for the Python that is running. Tools like uv make environments without pip."""
    pip = [sys.executable, "-m", "pip", "install"]
    if importlib.util.find_spec("pip") is None:
        pip = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*pip, *arguments])


def repair_command() -> str:
    """What completes this installation, if a part of it is missing."""
    if _is_image():
        return "build the image again"
    if not (ROOT / "Makefile").is_file():
        return "reinstall the wheel of Tercet"
    return "rm -f .venv/serve.stamp && make setup-serve"  # also where make would find nothing to do


def _build_image(argument: str) -> str:
    """The command that builds another image, in a checkout."""
    return f"docker build -f deploy/packaging/Dockerfile -t tercet --build-arg {shlex.quote(argument)} ."


def _is_image() -> bool:
    """Whether this is the container image: deploy/packaging/Dockerfile copies pyproject.toml and no Makefile. A
    checkout has both files, a wheel neither."""
    return (ROOT / "pyproject.toml").is_file() and not (ROOT / "Makefile").is_file()
