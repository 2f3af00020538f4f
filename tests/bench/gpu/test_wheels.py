"""The wheels that travel to a bare machine: with them and what it has, everything that a run imports is there.

The machine is imitated by an import system that finds nothing else. It cannot show that another version of a package
that the machine has is good enough.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.bench.gpu.gpu_tests import gpu_test_files
from tests.bench.gpu.wheels import MISSING, PRESENT
from tests.programs import run_program

ROOT = Path(__file__).parents[3]
# What the stages' processes, servers and clients import, whatever imports it.
MODULES = (
    *("tests.bench.cli", "tests.bench.speed.baselines", "deploy.command_line.serve", "deploy.tuning.load.clients"),
    *("gateway.app", "gateway.server.gunicorn_worker", "workers.app", "workers.gunicorn_worker"),
    "workers.engine.cpu.runner",
    *("workers.training.train", "gunicorn.app.wsgiapp", "gunicorn.arbiter", "transformers.models.gpt2.modeling_gpt2"),
    "transformers.generation.utils",
)
BARE = """
import importlib, importlib.machinery, importlib.metadata, json, pathlib, re, sys

present, modules = json.loads(sys.argv[1])

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

known = importlib.metadata.packages_distributions()
allowed, to_do = set(), [plain(name) for name in present]
while to_do:  # and what these require, in the versions of this machine
    name = to_do.pop()
    if name in allowed:
        continue
    allowed.add(name)
    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    to_do += [plain(re.match(r"[\\w.-]+", need)[0]) for need in needs if "extra ==" not in need]

class Bare(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        owners = known.get(top)
        if owners and not any(plain(owner) in allowed for owner in owners) and top not in sys.stdlib_module_names:
            if not (pathlib.Path.cwd() / top).is_dir():
                return None
        return super().find_spec(name, path, target)

sys.meta_path[:] = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, Bare]
sys.path_importer_cache.clear()
lacking = {}
for name in modules:
    try:
        importlib.import_module(name)
    except ImportError as error:
        lacking[name] = str(error)
print(json.dumps(lacking))
"""


def test_a_bare_machine_with_the_wheels_can_import_all_that_a_run_imports() -> None:
    stages = [f"tests.bench.gpu.{path.stem}" for path in sorted((ROOT / "tests/bench/gpu").glob("[!t]*.py"))]
    tests = [path.removesuffix(".py").replace("/", ".") for path in gpu_test_files(ROOT)]
    assert tests, "no test is marked gpu"
    modules = [*MODULES, *stages, *tests, "tests.conftest", "pytest_timeout"]
    done = run_program(
        [sys.executable, "-c", BARE, json.dumps([(*PRESENT, *MISSING), modules])],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}  # what cannot be imported, with the reason
