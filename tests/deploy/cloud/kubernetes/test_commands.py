"""The commands of docs/KUBERNETES.md that need no cluster, run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.api_keys import read_keys
from shared.pool_keys import read_pool_keys
from tests.deploy.cloud.kubernetes.rendered import FOLDER, KUBECTL, SERVING, containers, of_kind, workloads
from tests.documentation.blocks import blocks
from tests.e2e.harness import ROOT
from tests.programs import run_program, write_program

Json = dict[str, Any]
PAGE = ROOT / "docs/KUBERNETES.md"
MOVING = ROOT / "docs/moving/GKE.md"


def commands(*programs: str) -> list[str]:
    """The page's commands of these programs, each in one line."""
    text = "".join(block.text for block in blocks(PAGE)).replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    return [re.sub(r"\s+", " ", line) for line in lines if line.startswith(programs)]


def made_secrets() -> dict[str, set[str]]:
    """Keys of the secrets that the page's commands make, by name."""
    found: dict[str, set[str]] = {}
    for line in commands("kubectl --namespace tercet create secret"):
        words = line.split()
        kind, name = words[words.index("secret") + 1 :][:2]
        if kind == "tls":
            found[name] = {"tls.crt", "tls.key"}
        else:
            found[name] = {re.split("[=/]", word.partition("=")[2])[0] for word in words if word.startswith("--from-")}
    return found


def used_secrets(overlay: str) -> dict[str, set[str]]:
    """Keys of the secrets that an overlay's pods and ingress need, by name."""
    found: dict[str, set[str]] = {}
    for _, template in workloads(overlay):
        for volume in template["spec"]["volumes"]:
            if "secret" in volume:
                keys = {item["key"] for item in volume["secret"].get("items", [{"key": "keys"}])}
                found.setdefault(volume["secret"]["secretName"], set()).update(keys)
        for container in containers(template):
            for entry in container.get("env", ()):
                reference = entry.get("valueFrom", {}).get("secretKeyRef")
                if reference and not reference.get("optional"):
                    found.setdefault(reference["name"], set()).add(reference["key"])
    for ingress in of_kind(overlay, "Ingress").values():
        for tls in ingress["spec"]["tls"]:
            found[tls["secretName"]] = {"tls.crt", "tls.key"}
    return found


@pytest.mark.parametrize("overlay", SERVING)
def test_the_page_makes_the_secrets_that_the_pods_need(overlay: str) -> None:
    made = made_secrets()
    for name, keys in used_secrets(overlay).items():
        assert keys <= made[name], name


def test_the_pages_apply_every_overlay() -> None:
    text = PAGE.read_text() + MOVING.read_text()
    applied = set(re.findall(r"kubectl apply -k deploy/cloud/kubernetes/(overlays/[a-z/-]+)", text))
    assert applied == {str(path.parent.relative_to(FOLDER)) for path in FOLDER.glob("overlays/**/kustomization.yaml")}


def test_keys_and_certificates_are_made_as_written(tmp_path: Path) -> None:
    made = commands("openssl", "printf")
    made += [line for line in commands("TERCET_KEYS=") if "key new" in line]
    made += [
        f"{line} --dry-run=client -o yaml >secrets-{number}"
        for number, line in enumerate(
            line for line in commands("kubectl --namespace tercet create secret") if "--from-file" in line
        )
    ]
    write_program(tmp_path / "bin/tercet", f'cd {ROOT} && exec {sys.executable} -m deploy "$@"')
    path = f"{tmp_path}/bin:{KUBECTL.parent}:{os.environ['PATH']}"
    done = run_program(
        ["bash", "-ec", "\n".join(made)], cwd=tmp_path, env={"PATH": path, "HOME": str(tmp_path)}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    secrets = [yaml.safe_load(file.read_text()) for file in sorted(tmp_path.glob("secrets-*"))]
    assert {secret["metadata"]["name"] for secret in secrets} >= {
        "tercet-pool-key",
        "tercet-pool-tls",
        "tercet-api-keys",
    }
    (tmp_path / "pool-key").chmod(0o600)
    assert len(read_pool_keys(tmp_path / "pool-key")) == 1
    assert {key.name for key in read_keys(tmp_path / "api-keys")} == {"laptop", "endpoints"}
    # By the rules that clients of Python 3.13 and later apply.
    checks = ["-x509_strict", "-purpose", "sslserver", "-verify_hostname", "tercet-workers.tercet.svc"]
    command = ["openssl", "verify", *checks, "-CAfile", "ca.crt", "tls.crt"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
