"""The Serve configuration and the KubeRay manifest fit the schemas of what reads them, and agree with each other.

KubeRay's schema comes from its own CustomResourceDefinition, which no package carries: the file
helm-chart/kuberay-operator/crds/ray.io_rayservices.yaml of https://github.com/ray-project/kuberay, tag v1.7.0. The test
takes its path from KUBERAY_CRD.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.cloud.ray.config import parse_config
from tests.e2e.harness import ROOT

FOLDER = ROOT / "deploy/cloud/ray"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs requirements/ray.txt")


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


@pytest.fixture
def ray_service() -> dict[str, Any]:
    [found] = [document for document in documents("rayservice.yaml") if document["kind"] == "RayService"]
    return found


def containers(ray_service: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def test_the_manifest_serves_what_the_configuration_serves_and_its_arguments_are_valid(
    ray_service: dict[str, Any],
) -> None:
    [config] = documents("serve.yaml")
    for application in config["applications"]:
        assert parse_config(application["args"]).model == application["name"]
        assert application["import_path"] == "deploy.cloud.ray.app:build"
        variables = application.pop("runtime_env")["env_vars"]
        for container in containers(ray_service):
            environment = {entry["name"]: entry["value"] for entry in container["env"]}
            assert variables.items() <= environment.items()
    assert yaml.safe_load(ray_service["spec"]["serveConfigV2"]) == config


def test_a_worker_that_is_removed_may_finish(ray_service: dict[str, Any]) -> None:
    config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    drain_s = max(parse_config(application["args"]).drain_s for application in config["applications"])
    for group in ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > drain_s


def test_the_service_selects_the_workers_and_their_port(ray_service: dict[str, Any]) -> None:
    [service] = [document for document in documents("rayservice.yaml") if document["kind"] == "Service"]
    config = yaml.safe_load(ray_service["spec"]["serveConfigV2"])
    [group] = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    template = group["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    [port] = template["spec"]["containers"][0]["ports"]
    assert port["containerPort"] == config["http_options"]["port"] == service["spec"]["ports"][0]["port"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]


@needs_ray
@pytest.mark.deploy
@pytest.mark.filterwarnings("ignore")
def test_ray_accepts_the_configuration(ray_service: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    for config in (*documents("serve.yaml"), yaml.safe_load(ray_service["spec"]["serveConfigV2"])):
        ServeDeploySchema.model_validate(config)


@pytest.mark.deploy
def test_the_manifest_fits_the_schema_of_kuberay(ray_service: dict[str, Any]) -> None:
    if not (path := os.environ.get("KUBERAY_CRD")):
        pytest.skip("KUBERAY_CRD is not set: the path of KubeRay's ray.io_rayservices.yaml")
    definition = yaml.load(Path(path).read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [schema] = [each["schema"] for each in definition["spec"]["versions"] if each["name"] == "v1"]
    jsonschema.validate(ray_service, closed(schema["openAPIV3Schema"]))


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not name, which the API server would drop."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: closed(each) for name, each in schema.items()}
    is_open = "additionalProperties" in schema or "x-kubernetes-preserve-unknown-fields" in schema
    if schema.get("type") == "object" and schema.get("properties") and not is_open:
        schema["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        schema["type"] = ["integer", "string"]
        schema.pop("anyOf", None)
    return schema
