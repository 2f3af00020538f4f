"""The bundle of CodeMirror that is committed: made from its lock, byte for byte, and what the page imports."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from deploy.packaging.vendor import bundles
from gateway.api.page import STATIC


def test_the_lock_gives_the_committed_bytes(tmp_path: Path) -> None:
    try:
        files = bundles.build(tmp_path)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"npm could not install the tools: {error}; {getattr(error, 'stderr', '') or ''}")
    for name, data in files.items():
        assert (bundles.VENDOR / name).read_bytes() == data, f"{name} differs: run `make vendor`"


def test_the_bundle_has_what_the_page_imports() -> None:
    pattern = re.compile(r'import \{([^}]*)\} from "(@(?:codemirror|lezer)/[\w-]+)"')
    source = (Path(bundles.__file__).with_name(bundles.BUNDLE)).read_text("utf-8")
    exported = {
        package: {name.strip() for name in names.split(",")}
        for names, package in re.findall(r'export \{([^}]*)\} from "([^"]+)"', source)
    }
    index = (STATIC / "index.html").read_text("utf-8")
    imported: dict[str, set[str]] = {}
    for path in STATIC.glob("*.js"):
        for names, package in pattern.findall(path.read_text("utf-8")):
            imported.setdefault(package, set()).update(name.strip() for name in names.split(",") if name.strip())
    assert imported == exported
    assert all(f'"{package}": "./static/vendor/codemirror.js"' in index for package in imported)
