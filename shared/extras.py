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
    added = f"EXTRA=-c requirements/dev.txt {' '.join(names)}"
    return shlex.join(["docker", "build", "-f", "deploy/Dockerfile", "-t", "tercet", "--build-arg", added, "."])


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


def _is_image() -> bool:
    """Whether this is the container image: deploy/Dockerfile copies pyproject.toml and no Makefile. A checkout has both
    files, a wheel neither."""
    return (ROOT / "pyproject.toml").is_file() and not (ROOT / "Makefile").is_file()
