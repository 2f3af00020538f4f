"""docs/ARCHITECTURE.md names files and functions, docs/RELIABILITY.md the tests of each promise; all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# `path`, `path:Name` or `path:Name.method`; a path has a slash or is the one configuration file.
_REFERENCE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|gunicorn\.conf\.py)(?::([\w.]+))?`")


def references(page: str) -> list[tuple[str, str | None]]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [(match[1], match[2]) for match in _REFERENCE.finditer(text)]


def names_in(path: Path) -> set[str]:
    """Top-level names of a module, and the methods and attributes of its classes as `Class.name`."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "RELIABILITY.md"])
def test_every_file_and_function_that_the_page_names_exists(page: str) -> None:
    found = references(page)
    assert len(found) >= 40, "the page names too little to be a map"
    missing = []
    for path, name in found:
        if not (ROOT / path).exists():
            missing.append(path)
        elif name is not None and name not in names_in(ROOT / path):
            missing.append(f"{path}:{name}")
    assert missing == []
