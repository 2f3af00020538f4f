"""The manifests of deploy/cloud/kubernetes as kustomize renders them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shared.settings import Settings
from tests.deploy.packaging.dockerfile import image
from tests.e2e.harness import ROOT
from tests.programs import run_program

Json = dict[str, Any]

FOLDER = ROOT / "deploy/cloud/kubernetes"
KUBECTL = Path(sys.executable).parent / "kubectl"
# What each user of this folder applies.
OVERLAYS = sorted(str(path.parent.relative_to(FOLDER)) for path in FOLDER.glob("overlays/**/kustomization.yaml"))
# Those that run Tercet.
SERVING = [name for name in OVERLAYS if not name.endswith("/drivers")]
WORKLOADS = {"Deployment", "DaemonSet", "StatefulSet", "Job"}
# Settings that hold a password come from a Secret, which the commands of docs/KUBERNETES.md make.
SECRET_VALUES = {
    ("tercet-redis", "jobs"): "redis://:secret@redis.example:6379/0",
    ("tercet-endpoints-key", "key"): "tct_key",
}


@cache
def render(overlay: str) -> tuple[Json, ...]:
    """The documents of an overlay; they must not be changed."""
    done = run_program([KUBECTL, "kustomize", FOLDER / overlay], timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr  # kustomize warns of fields that are deprecated
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def of_kind(overlay: str, kind: str) -> dict[str, Json]:
    """The documents of a kind by name."""
    return {document["metadata"]["name"]: document for document in render(overlay) if document["kind"] == kind}


def workloads(overlay: str) -> Iterator[tuple[str, Json]]:
    """Names and pod templates."""
    for document in render(overlay):
        if document["kind"] in WORKLOADS:
            yield document["metadata"]["name"], document["spec"]["template"]


def containers(template: Json) -> list[Json]:
    """All containers of a pod, sidecars and init containers included."""
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def environment(overlay: str, template: Json, container: Json) -> dict[str, str]:
    """A container's environment: the image's, the ConfigMaps', and its own."""
    environ = image().environ if "registry.example" in container["image"] or "tercet" in container["image"] else {}
    config_maps = of_kind(overlay, "ConfigMap")
    for source in container.get("envFrom", ()):
        environ |= config_maps[source["configMapRef"]["name"]]["data"]
    for entry in container.get("env", ()):
        environ[entry["name"]] = _value(entry, container)
    return environ


def _value(entry: Json, container: Json) -> str:
    if "value" in entry:
        return str(entry["value"])
    source = entry["valueFrom"]
    if "resourceFieldRef" in source:
        group, _, resource = source["resourceFieldRef"]["resource"].partition(".")
        return str(container["resources"][group][resource])
    reference = source["secretKeyRef"]
    return SECRET_VALUES[reference["name"], reference["key"]]


class Served(NamedTuple):
    """A pod that runs `tercet serve`."""

    template: Json
    container: Json
    settings: Settings


@cache
def served(overlay: str) -> dict[str, Served]:
    """What runs `tercet serve`, by the name of the workload."""
    return {
        name: Served(template, container, Settings.load(environment(overlay, template, container)))
        for name, template in workloads(overlay)
        for container in containers(template)
        if container.get("args", [""])[0] == "serve"
    }


def probes(container: Json) -> Iterator[tuple[str, Json]]:
    """Kinds and probes of a container."""
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if kind in container:
            yield kind, container[kind]


def port_number(container: Json, port: int | str) -> int:
    """The number of a port that a probe or a Service names."""
    if isinstance(port, int):
        return port
    return next(int(entry["containerPort"]) for entry in container["ports"] if entry["name"] == port)


def matches(selector: Json, labels: Json) -> bool:
    """Whether labels have all of a selector's, which is not empty."""
    return bool(selector) and selector.items() <= labels.items()
