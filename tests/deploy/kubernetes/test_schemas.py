"""Resources that Kubernetes' own schemas do not have: KEDA's against the types and validators generated from its
source, and cloudbuild.yaml against the schema of the schema store. The packages come from npm (tools.json).
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.npm import build
from tests.deploy.kubernetes.rendered import FOLDER, of_kind
from tests.e2e.harness import ROOT

Json = dict[str, Any]

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
    build.npm("install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", directory=folder)
    return folder


def scaled_object() -> Json:
    [document] = of_kind("overlays/keda", "ScaledObject").values()
    return copy.deepcopy(document)


def run(folder: Path, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=False, timeout=60)


def check(folder: Path, document: Json) -> subprocess.CompletedProcess[str]:
    """The validator, which knows values, then the types, which know every field: an unknown one is an error."""
    (folder / "validate.mjs").write_text(VALIDATE)
    done = run(folder, "node", "validate.mjs", text=json.dumps(document))
    if done.returncode:
        return done
    name = "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject"
    (folder / "typed.ts").write_text(
        f'import type {{ IScaledObject }} from "{name}";\nexport const found: IScaledObject = {json.dumps(document)};\n'
    )
    options = ["--ignoreConfig", "--strict", "--noEmit", "--skipLibCheck", "--module", "nodenext", "--target", "es2023"]
    return run(folder, "node_modules/.bin/tsc", *options, "typed.ts")


def test_the_scaled_object_fits_the_schema_of_keda(tools: Path) -> None:
    done = check(tools, scaled_object())
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_scaled_object_is_refused(tools: Path) -> None:
    wrong_type, unknown_field = scaled_object(), scaled_object()
    wrong_type["spec"]["maxReplicaCount"] = "8"
    unknown_field["spec"]["cooldown"] = 300
    for document in (wrong_type, unknown_field):
        assert check(tools, document).returncode != 0


def test_the_build_of_images_fits_the_schema_of_cloud_build() -> None:
    program = ROOT / "build/tools/bin/check-jsonschema"
    found = str(program) if program.exists() else shutil.which("check-jsonschema")
    assert found, "`make test-deploy` installs check-jsonschema"
    done = run(FOLDER, found, "--builtin-schema", "vendor.cloudbuild", "cloudbuild.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
