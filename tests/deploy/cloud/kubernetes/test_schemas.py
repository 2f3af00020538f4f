"""What Kubernetes' own schemas do not have: KEDA's resource against types and validators generated from its source,
which come from npm (tools.json); cloudbuild.yaml and compose.yaml against the schemas of the schema store.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.clients.npm import client_package
from tests.deploy.cloud.kubernetes.rendered import of_kind
from tests.e2e.harness import ROOT
from tests.programs import run_program

TOOLS = Path(__file__).with_name("tools.json")
VALIDATE = """
import { readFileSync } from "node:fs";
import { ScaledObject } from "@kubernetes-models/keda/keda.sh/v1alpha1";
new ScaledObject(JSON.parse(readFileSync(0))).validate();
"""

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def tools(request: pytest.FixtureRequest) -> Path:
    """A folder with the packages; it stays in pytest's cache."""
    folder: Path = request.config.cache.mkdir("keda")
    shutil.copy(TOOLS, folder / "package.json")
    client_package.npm("install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", directory=folder)
    return folder


def run(folder: Path, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return run_program(command, cwd=folder, input=text, timeout=60)


def assert_succeeds(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_scaled_object_fits_the_schema_of_keda(tools: Path) -> None:
    """The validator knows values, the types know every field: an unknown one is an error."""
    [document] = of_kind("overlays/keda", "ScaledObject").values()
    (tools / "validate.mjs").write_text(VALIDATE)
    assert_succeeds(run(tools, "node", "validate.mjs", text=json.dumps(document)))
    name = "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject"
    (tools / "typed.ts").write_text(
        f'import type {{ IScaledObject }} from "{name}";\nexport const found: IScaledObject = {json.dumps(document)};\n'
    )
    options = ["--ignoreConfig", "--strict", "--noEmit", "--skipLibCheck", "--module", "nodenext", "--target", "es2023"]
    assert_succeeds(run(tools, "node_modules/.bin/tsc", *options, "typed.ts"))


@pytest.mark.parametrize(
    ("schema", "path"),
    [("vendor.cloudbuild", "cloud/kubernetes/cloudbuild.yaml"), ("vendor.compose-spec", "packaging/compose.yaml")],
)
def test_other_files_fit_the_schemas_of_their_programs(schema: str, path: str) -> None:
    program = ROOT / "build/tools/bin/check-jsonschema"
    found = str(program) if program.exists() else shutil.which("check-jsonschema")
    assert found, "`make test-deploy` installs check-jsonschema"
    assert_succeeds(run(ROOT / "deploy", found, "--builtin-schema", schema, path))
