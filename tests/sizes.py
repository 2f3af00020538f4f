"""`python -m tests.sizes`, a part of `make lint`: the size of the project, and the limits that pyproject.toml sets.

Counts files that git knows. Lines are all lines of a file, words what `wc -w` counts. A part of a page between
`<!-- written by MODULE: NAME -->` and `<!-- end -->`, or the end of the page, counts no words. Those of the strings in
that module count instead, so that prose does not leave the count when it moves into the module.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("gateway/", "workers/", "shared/", "deploy/", "gunicorn.conf.py")
BENCHMARKS = "tests/bench/"
CODE = {".py", ".c", ".h", ".js", ".ts", ".css", ".html", ".sh"}
# Tests may keep their cases in such files.
DATA = {".json", ".jsonl", ".yaml", ".yml", ".toml", ".csv", ".txt"}
# What others wrote, or a tool built from what others wrote.
FOREIGN = ("gateway/static/vendor/", "tests/gateway/api/peer_schemas.json", "tests/bench/quality/texts/")
PAGE = re.compile(r"README\.md|docs/.*\.md")
WRITTEN = re.compile(r"<!-- written by ([\w.]+)(?:: [^>]*)? -->.*?(?:<!-- end -->|\Z)", re.DOTALL)


def known_files() -> list[str]:
    """Paths of the files that git knows, those of others aside."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0")[:-1] if not name.startswith(FOREIGN) and (ROOT / name).is_file()]


def sizes(names: list[str]) -> dict[str, int]:
    """Size by the name of its limit."""
    code = {name: _num_lines(name) for name in names if Path(name).suffix in CODE}
    tested = {name: _num_lines(name) for name in names if name.startswith("tests/") and Path(name).suffix in DATA}
    product = {name: lines for name, lines in code.items() if name.startswith(PRODUCT)}
    tests = {name: lines for name, lines in (code | tested).items() if name.startswith("tests/")}
    benchmarks = {name: lines for name, lines in tests.items() if name.startswith(BENCHMARKS)}
    return {
        "product_lines": sum(product.values()),
        "test_lines": sum(tests.values()) - sum(benchmarks.values()),
        "benchmark_lines": sum(benchmarks.values()),
        "words": num_words([_read(name) for name in names if PAGE.fullmatch(name)]),
        "longest_file_lines": max(code.values()),
    }


def num_words(pages: list[str]) -> int:
    """Words of pages that no command writes, and of the strings in the modules that write the others."""
    own = sum(len(WRITTEN.sub(" ", page).split()) for page in pages)
    writers = {module for page in pages for module in WRITTEN.findall(page)}
    return own + sum(len(text.split()) for module in writers for text in _strings(module))


def _strings(module: str) -> Iterator[str]:
    """The strings in a module, docstrings aside."""
    tree = ast.parse(_read(module.replace(".", "/") + ".py"))
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
            yield node.value


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _num_lines(name: str) -> int:
    return (ROOT / name).read_bytes().count(b"\n")


def main() -> int:
    limits = tomllib.loads(_read("pyproject.toml"))["tool"]["tercet"]["sizes"]
    is_within = True
    for name, size in sizes(known_files()).items():
        limit = limits[name]
        is_within &= size <= limit
        print(f"{name.replace('_', ' '):20}{size:8,} of {limit:8,}{'' if size <= limit else '  too many'}")
    return 0 if is_within else 1


if __name__ == "__main__":
    sys.exit(main())
