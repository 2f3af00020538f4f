"""Every overlay renders, fits Kubernetes' schemas, and agrees with itself, the settings, the routes and the metrics.

No cluster is at hand: what an API server, a scheduler or a network plugin makes of the manifests is not shown.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.supervision.supervisor import KILL_S
from shared.gpu_builds import BUILDS, INDEX, MIN_DRIVERS, is_served
from shared.settings import Settings
from tests.deploy.cloud.kubernetes.rendered import (
    FOLDER,
    OVERLAYS,
    SERVING,
    containers,
    environment,
    matches,
    of_kind,
    port_number,
    probes,
    render,
    served,
    workloads,
)
from tests.e2e.harness import ROOT
from tests.gateway.conftest import MakeGateway
from workers.tcp_port import OPEN_ROUTES

Json = dict[str, Any]

# The newest version whose schemas the validator has, and the oldest that the manifests are for (sidecar containers and
# the sleep of preStop are stable since 1.33 and 1.34).
VERSIONS = ("1.37", "1.34")
SCHEMA_CONTENTS = cache(kubernetes_validate.utils.schema_contents)
# Validated in test_schemas.py, against schemas of their own.
CUSTOM_RESOURCES = {"ScaledObject"}
# The proxy's own, by its option --healthz.
PROXY_PROBES = {"/endpoints/healthz"}


@pytest.fixture(params=SERVING)
def serving(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def kept_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validator reads its schemas, of some megabytes, anew for each document."""
    monkeypatch.setattr(kubernetes_validate.utils, "schema_contents", SCHEMA_CONTENTS)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_fits_the_schema_of_kubernetes(version: str) -> None:
    """Each once: most documents are the same in several overlays."""
    distinct = {json.dumps(document) for overlay in OVERLAYS for document in render(overlay)}
    for document in map(json.loads, sorted(distinct)):
        if document["kind"] not in CUSTOM_RESOURCES:
            kubernetes_validate.validate(document, version, strict=True)


def test_every_component_is_used_images_have_a_version_and_no_secret_is_in_the_folder() -> None:
    used = {
        (path.parent / name).resolve()
        for path in FOLDER.glob("overlays/**/kustomization.yaml")
        for name in yaml.safe_load(path.read_text()).get("components", ())
    }
    assert used == {path.resolve() for path in (FOLDER / "components").iterdir()}
    for name in OVERLAYS:
        assert not of_kind(name, "Secret")
        images = [container["image"] for _, template in workloads(name) for container in containers(template)]
        assert all(re.search(r":([0-9]+(\.[0-9]+)+|fixed)$", image) for image in images), images
    for path in FOLDER.rglob("*"):
        text = "" if path.is_dir() or path.suffix == ".pyc" else path.read_text()
        assert "PRIVATE KEY" not in text
        # Placeholders, which docs/KUBERNETES.md says to replace.
        assert not re.search(r"[a-z-]+\.(iam\.gserviceaccount\.com|internal)\b", text)


def test_settings_are_known_and_their_values_parse(serving: str) -> None:
    gateway, workers = served(serving)["tercet-gateway"], served(serving)["tercet-workers"]
    assert gateway.container["args"] == ["serve", "--role", "gateway"]
    assert gateway.settings.remote.pool_key is not None
    assert gateway.settings.access.keys is not None
    assert workers.container["args"] == ["serve", "--role", "workers"]
    assert workers.settings.remote.pool_tls_cert is not None
    for template, _, _ in served(serving).values():
        # Kubernetes sets TERCET_GATEWAY_PORT for a Service of that name, and Tercet refuses unknown variables.
        assert template["spec"]["enableServiceLinks"] is False


def test_the_gateway_finds_the_workers(serving: str) -> None:
    gateway, workers = (served(serving)[name].settings for name in ("tercet-gateway", "tercet-workers"))
    [url] = gateway.remote.pool
    service = of_kind(serving, "Service")["tercet-workers"]
    assert url.scheme == "https"
    assert url.host == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert service["spec"]["clusterIP"] == "None"  # the name has the pods' addresses
    # A headless Service forwards nothing: its port is the pods'.
    assert workers.remote.pool_bind is not None
    assert url.port == url.last_port == service["spec"]["ports"][0]["port"] == workers.remote.pool_bind.port
    assert [model.name for model in workers.model.models] == [url.model]
    assert workers.model.models[0].count == 1  # one worker per pod
    assert len(workers.pool.devices) == 1


def test_files_of_settings_are_mounted(serving: str) -> None:
    """Paths from secrets that end in a key of the secret, which root and the pod's group may read."""
    for template, container, settings in served(serving).values():
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        files = (
            settings.access.keys,
            settings.remote.pool_key,
            settings.remote.pool_ca,
            settings.remote.pool_tls_cert,
            settings.remote.pool_tls_key,
        )
        for path in filter(None, files):
            secret = volumes[mounts[str(path.parent)]]["secret"]
            assert secret["defaultMode"] == 0o440
            assert "items" not in secret or path.name in {item["path"] for item in secret["items"]}
        assert str(settings.run_path).startswith("/tmp/")
        assert mounts["/tmp"] in volumes
    assert template["spec"]["securityContext"]["fsGroup"] == 10001


def test_the_grace_of_a_pod_is_longer_than_its_stop_and_a_stopping_gateway_is_not_ready_before_it_closes(
    serving: str,
) -> None:
    """D1: preStop + TERCET_DRAIN_S + TERCET_GRACE_S, and what the supervisor may need to kill what is left."""
    for name, (template, container, settings) in served(serving).items():
        pre_stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        stop_s = pre_stop_s + settings.server.drain_s + settings.server.grace_s + KILL_S
        assert template["spec"]["terminationGracePeriodSeconds"] > stop_s, name
    _, container, settings = served(serving)["tercet-gateway"]
    probe = container["readinessProbe"]
    assert settings.server.drain_s > probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]


def test_a_loading_pod_is_neither_ready_nor_restarted(serving: str) -> None:
    for _, container, _ in served(serving).values():
        kinds = dict(probes(container))
        assert set(kinds) == {"startupProbe", "readinessProbe", "livenessProbe"}
        assert kinds["readinessProbe"]["httpGet"]["path"] == "/health/ready"
        assert kinds["livenessProbe"]["httpGet"]["path"] == "/health/live"
    _, container, settings = served(serving)["tercet-workers"]
    startup = container["startupProbe"]
    assert startup["httpGet"]["path"] == "/health/ready"
    assert startup["periodSeconds"] * startup["failureThreshold"] > settings.pool.load_s


def test_probe_paths_are_routes_of_the_server_at_their_port(serving: str, make_gateway: MakeGateway) -> None:
    app = make_gateway().app
    for name, template in workloads(serving):
        for container in containers(template):
            for _, probe in probes(container):
                path, port = probe["httpGet"]["path"], port_number(container, probe["httpGet"]["port"])
                is_https = probe["httpGet"].get("scheme") == "HTTPS"
                if container["name"] == "gateway":
                    settings = served(serving)[name].settings
                    assert (port, is_https) == (settings.server.bind.port, settings.uses_tls)
                    assert app.router.find(path) is not None
                elif container["name"] == "worker":
                    bind = served(serving)[name].settings.remote.pool_bind
                    assert bind is not None
                    assert (port, is_https) == (bind.port, True)
                    assert path in OPEN_ROUTES
                else:
                    assert f"--listener_port={port}" in container["args"], name
                    assert path in PROXY_PROBES
                    assert f"--healthz={path}" in container["args"]


def test_services_budgets_and_policies_select_pods(serving: str) -> None:
    pods = {name: template["metadata"]["labels"] for name, template in workloads(serving)}
    for name, document in of_kind(serving, "Service").items():
        assert [pod for pod, labels in pods.items() if matches(document["spec"]["selector"], labels)] == [name]
        template = dict(workloads(serving))[name]
        for port in document["spec"]["ports"]:
            numbers = {entry["name"]: entry["containerPort"] for one in containers(template) for entry in one["ports"]}
            assert port["targetPort"] in {*numbers, *numbers.values()}
    for name, document in of_kind(serving, "PodDisruptionBudget").items():
        selector = document["spec"]["selector"]["matchLabels"]
        assert [pod for pod, labels in pods.items() if matches(selector, labels)] == [name]
    assert set(of_kind(serving, "PodDisruptionBudget")) == {"tercet-gateway", "tercet-workers"}
    for name, document in of_kind(serving, "Deployment").items():
        assert matches(document["spec"]["selector"]["matchLabels"], pods[name])
        spread = document["spec"]["template"]["spec"]["topologySpreadConstraints"][0]
        assert matches(spread["labelSelector"]["matchLabels"], pods[name])


def test_only_gateways_reach_workers_and_workers_reach_nothing(serving: str) -> None:
    pods = {name: template["metadata"]["labels"] for name, template in workloads(serving)}
    policies = of_kind(serving, "NetworkPolicy")
    assert policies["tercet-default"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}

    def of_pod(name: str) -> list[Json]:
        return [
            document["spec"]
            for document in policies.values()
            if matches(document["spec"]["podSelector"].get("matchLabels", {}), pods[name])
        ]

    workers = of_pod("tercet-workers")
    outward = [rule for policy in workers for rule in policy.get("egress", ())]
    if serving == "overlays/gke-bucket":  # the sidecar that mounts the bucket
        assert {port["port"] for rule in outward for port in rule["ports"]} == {53, 80, 443, 988}
    else:
        assert not outward
    [rule] = [rule for policy in workers for rule in policy.get("ingress", ())]
    assert [port["port"] for port in rule["ports"]] == ["pool"]
    [source] = rule["from"]
    selector = source["podSelector"]["matchLabels"]
    assert [pod for pod, labels in pods.items() if matches(selector, labels)] == ["tercet-gateway"]
    reached = [
        [pod for pod, labels in pods.items() if matches(target["podSelector"]["matchLabels"], labels)]
        for policy in of_pod("tercet-gateway")
        for rule in policy.get("egress", ())
        for target in rule.get("to", ())
        if "podSelector" in target and "namespaceSelector" not in target
    ]
    assert reached == [["tercet-workers"]]


def test_pods_have_no_privileges(serving: str) -> None:
    """What the Pod Security Standard `restricted` asks for, which the namespace enforces, and a read-only root."""
    [namespace] = of_kind(serving, "Namespace").values()
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for _, template in workloads(serving):
        pod = template["spec"]["securityContext"]
        assert pod["runAsNonRoot"] is True
        assert pod["runAsUser"] == 10001
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
        assert template["spec"]["automountServiceAccountToken"] is False
        for container in containers(template):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_workers_on_gpus_have_one_each() -> None:
    for name in ("overlays/gpu", "overlays/keda", "overlays/hpa", "overlays/gke", "overlays/gke-bucket"):
        template, container, settings = served(name)["tercet-workers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert settings.pool.devices == ("cuda:0",)
        assert "tercet-cuda" in container["image"]
        assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in template["spec"][
            "tolerations"
        ]
        strategy = of_kind(name, "Deployment")["tercet-workers"]["spec"]["strategy"]["rollingUpdate"]
        assert strategy == {"maxSurge": 0, "maxUnavailable": 1}  # there may be no free GPU for a successor
    template = dict(workloads("overlays/gke"))["tercet-workers"]
    assert template["spec"]["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}


def test_autoscalers_agree_and_use_metrics_that_the_gateway_exports(make_gateway: MakeGateway) -> None:
    exported = re.findall(r"^# TYPE (\S+)", make_gateway().metrics.exposition().decode(), re.MULTILINE)
    wanted = {"tercet_slot_in_flight_branches", "tercet_waiting_branches"}
    assert wanted <= set(exported)
    [scaled] = of_kind("overlays/keda", "ScaledObject").values()
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert {name for query in queries for name in re.findall(r"tercet_\w+", query)} == wanted
    autoscaler = of_kind("overlays/hpa", "HorizontalPodAutoscaler")["tercet-workers"]["spec"]
    assert {metric["external"]["metric"]["name"] for metric in autoscaler["metrics"]} == wanted
    adapter = yaml.safe_load((FOLDER / "components/hpa/prometheus_adapter.yaml").read_text())
    names = {rule["seriesQuery"].partition("{")[0]: rule["metricsQuery"] for rule in adapter["rules"]["external"]}
    assert names.keys() == wanted
    for name, query in names.items():
        assert set(re.findall(r"tercet_\w+", query)) == {name}

    thresholds = [int(trigger["metadata"]["threshold"]) for trigger in scaled["spec"]["triggers"]]
    assert thresholds == [int(one["external"]["target"]["averageValue"]) for one in autoscaler["metrics"]]
    assert thresholds[0] < Settings().pool.max_batch  # there is room in the batch
    assert scaled["spec"]["minReplicaCount"] == autoscaler["minReplicas"]
    assert scaled["spec"]["maxReplicaCount"] == autoscaler["maxReplicas"]
    assert scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == autoscaler["behavior"]


def test_a_worker_of_gke_fits_the_smallest_node_with_a_t4_and_runs_on_it_with_gkes_drivers() -> None:
    """GKE reserves 6 % of a node's first core and 1 % of its second, and has pods of its own on each node.

    Source: cloud.google.com/kubernetes-engine/docs/concepts/plan-node-sizes; docs/GPU.md, whose code is
    shared/gpu_builds.py: 7.5 is a T4.
    """
    for name in ("overlays/gke", "overlays/gke-bucket"):
        container = served(name)["tercet-workers"].container
        assert float(container["resources"]["requests"]["cpu"]) <= 2 - 0.06 - 0.01 - 0.5
        assert container["resources"]["requests"]["memory"] == "4Gi"  # of n1-standard-2: 7.5 GB
    build = yaml.safe_load((FOLDER / "cloudbuild.yaml").read_text())
    [step] = [step for step in build["steps"] if step["id"] == "cuda"]
    assert "TORCH_INDEX=${_TORCH_INDEX}" in step["args"]
    tag = build["substitutions"]["_TORCH_INDEX"].removeprefix(f"{INDEX}/")
    [cuda] = [build for build in BUILDS if build.tag == tag]
    assert is_served((7, 5), cuda.architectures)
    assert MIN_DRIVERS[int(cuda.cuda.partition(".")[0])] <= 525


def test_cloud_build_applies_overlays_of_gke_with_the_new_version() -> None:
    build = yaml.safe_load((FOLDER / "cloudbuild.yaml").read_text())
    assert build["substitutions"]["_OVERLAY"] == "gke"
    [apply] = [step["args"][-1] for step in build["steps"] if step["id"] == "apply"]
    assert "gke/kustomization.yaml" in apply
    assert "kubectl apply -k ${_OVERLAY}" in apply
    overlay = yaml.safe_load((FOLDER / "overlays/gke-bucket/kustomization.yaml").read_text())
    assert overlay["resources"] == ["../gke"]  # the images of gke


def test_weights_in_a_bucket_need_neither_a_download_nor_filestore() -> None:
    name = "overlays/gke-bucket"
    assert not of_kind(name, "Job")
    [volume] = of_kind(name, "PersistentVolume").values()
    [claim] = of_kind(name, "PersistentVolumeClaim").values()
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["claimRef"] == {key: claim["metadata"][key] for key in ("name", "namespace")}
    for key in ("storageClassName", "accessModes"):
        assert claim["spec"][key] == volume["spec"][key]
    template, container, settings = served(name)["tercet-workers"]
    assert template["metadata"]["annotations"] == {"gke-gcsfuse/volumes": "true"}
    user = template["spec"]["securityContext"]["runAsUser"]
    assert f"uid={user}" in volume["spec"]["mountOptions"]
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
    source = settings.model.models[0].source
    assert mount["readOnly"]
    assert source is not None
    assert Path(source).is_relative_to(mount["mountPath"])


def test_the_download_has_a_token_of_the_hub_where_there_is_one() -> None:
    [template] = [template for name, template in workloads("overlays/gke") if name == "tercet-models"]
    [container] = template["spec"]["containers"]
    [token] = [entry for entry in container["env"] if entry["name"] == "HF_TOKEN"]
    reference = token["valueFrom"]["secretKeyRef"]
    assert reference == {"name": "tercet-hub-token", "key": "token", "optional": True}
    page = (ROOT / "docs/moving/GKE.md").read_text()
    assert f"create secret generic {reference['name']} --from-file={reference['key']}=" in page


@pytest.mark.parametrize("name", ["overlays/hpa", "overlays/keda", "overlays/gateways", "overlays/gke"])
def test_an_autoscaler_alone_sets_the_number_of_pods(name: str) -> None:
    deployments = of_kind(name, "Deployment")
    targets = [
        document["spec"]["scaleTargetRef"]["name"]
        for document in render(name)
        if document["kind"] in {"HorizontalPodAutoscaler", "ScaledObject"}
    ]
    assert targets
    for target in targets:
        assert "replicas" not in deployments[target]["spec"]


def test_several_gateways_share_a_job_store_and_an_ingress_that_keeps_sessions() -> None:
    settings = served("overlays/gateways")["tercet-gateway"].settings
    assert settings.job_store.startswith("redis://")
    assert of_kind("overlays/gateways", "Service")["tercet-gateway"]["spec"]["sessionAffinity"] == "ClientIP"
    [ingress] = of_kind("overlays/gateways", "Ingress").values()
    [rule] = ingress["spec"]["rules"]
    assert settings.allows_host(rule["host"])
    backend = rule["http"]["paths"][0]["backend"]["service"]
    ports = of_kind("overlays/gateways", "Service")[backend["name"]]["spec"]["ports"]
    assert backend["port"]["name"] in {port["name"] for port in ports}


def test_gke_serves_https_alone_and_ends_before_the_proxy_gives_up() -> None:
    service = of_kind("overlays/gke", "Service")["tercet-gateway"]
    assert [port["port"] for port in service["spec"]["ports"]] == [443]
    template, _, settings = served("overlays/gke")["tercet-gateway"]
    assert settings.limits.timeout_s < 15
    [proxy] = [container for container in containers(template) if container["name"] == "endpoints"]
    assert proxy["restartPolicy"] == "Always"  # a sidecar: it ends after the gateway
    assert f"--backend=http://127.0.0.1:{settings.server.bind.port}" in proxy["args"]
    environ = environment("overlays/gke", template, proxy)
    assert settings.allows_host(environ["ENDPOINTS_SERVICE"])
    for variable in re.findall(r"\$\((\w+)\)", " ".join(proxy["args"])):
        assert variable in environ
