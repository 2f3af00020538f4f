"""What `deploy/packaging/Dockerfile` says of an image that is built from it, without building it."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from tests.e2e.harness import ROOT

DOCKERFILE = ROOT / "deploy/packaging/Dockerfile"


class Image(NamedTuple):
    """What an engine runs."""

    environ: dict[str, str]
    user: str
    entrypoint: list[str]
    command: list[str]


def image(target: str | None = None) -> Image:
    """
    Args:
        target: a stage, as of `docker build --target`; None is the last.
    """
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    stages: dict[str, tuple[str, str]] = {}
    for block in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        line, _, body = block.partition("\n")
        base, _, name = line.partition(" AS ")
        stages[name] = (base, body)
    # The last stage has no name.
    found = Image({}, "root", [], [])
    for body in _bodies(stages, target or ""):
        for instruction, value in re.findall(r"^(ENV|USER|ENTRYPOINT|CMD) (.*)$", body, re.MULTILINE):
            if instruction == "ENV":
                found.environ.update(pair.split("=", 1) for pair in value.split())
            elif instruction == "USER":
                found = found._replace(user=value)
            elif instruction == "ENTRYPOINT":
                found = found._replace(entrypoint=json.loads(value))
            else:
                found = found._replace(command=json.loads(value))
    return found


def _bodies(stages: dict[str, tuple[str, str]], name: str) -> list[str]:
    """The instructions of a stage and those that it begins with, in order."""
    if name not in stages:
        return []
    base, body = stages[name]
    return [*_bodies(stages, base), body]
