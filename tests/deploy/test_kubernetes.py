"""Tests of the manifests of the base, each component, each pair and all at once: all are valid.

They also agree with each other and with the settings that the server reads from them.
"""

import json
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml

from embedserve import __version__
from embedserve.commands.health import TIMEOUT_S
from embedserve.config_checks import check_device, check_settings
from embedserve.processes.supervisor import KILL_AFTER_S

from .conftest import DEPLOY, Rendered

SCHEMAS = "1.37"
"""Version of Kubernetes: the newest that kubernetes-validate supports."""
LABELS = {"app.kubernetes.io/name": "embedserve"}
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
"""Resources of the Prometheus Operator."""


def container_ports(rendered: Rendered) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in rendered.container["ports"]}


@cache
def check_schema(manifest: str) -> None:
    """Validates the JSON of a manifest, once for all combinations that contain it."""
    kubernetes_validate.validate(json.loads(manifest), SCHEMAS, strict=True)


def check_schema_of(manifest: dict[str, Any]) -> None:
    check_schema(json.dumps(manifest, sort_keys=True))


@cache
def monitoring(name: str) -> Any:
    """Reads a file of deploy/monitoring."""
    return yaml.safe_load((DEPLOY / "monitoring" / name).read_text())


def services(rendered: Rendered) -> list[str]:
    """Returns the names of the Services."""
    if not rendered.is_reachable:
        return []
    more = ["embedserve-management"] if "management-port" in rendered.components else []
    return ["embedserve", "embedserve-headless", *more]


def test_exactly_the_expected_kinds_are_rendered(rendered: Rendered) -> None:
    claims = [] if "s3" in rendered.components else ["PersistentVolumeClaim"]
    is_scraped = "monitoring" in rendered.components and rendered.is_reachable
    assert sorted(manifest["kind"] for manifest in rendered.manifests) == [
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        *claims,
        "PodDisruptionBudget",
        *(["PrometheusRule"] if is_scraped else []),
        *["Service" for _ in services(rendered)],
        *(["ServiceMonitor"] if is_scraped else []),
    ]
    assert [one["metadata"]["name"] for one in rendered.named("Service")] == services(rendered)


def test_manifests_match_the_kubernetes_schema(rendered: Rendered) -> None:
    for manifest in rendered.manifests:
        if manifest["kind"] not in CUSTOM:  # checked by test_crds.py
            check_schema_of(manifest)


def test_schema_validation_rejects_an_unknown_field(cpu: Rendered) -> None:
    service = cpu.one("Service", "embedserve")
    wrong = {**service, "spec": {**service["spec"], "port": 8000}}
    with pytest.raises(kubernetes_validate.ValidationError, match="port"):
        kubernetes_validate.validate(wrong, SCHEMAS, strict=True)


def test_no_manifest_names_a_namespace(rendered: Rendered) -> None:
    assert [m["kind"] for m in rendered.manifests if "namespace" in m["metadata"]] == []


def test_selectors_match_the_labels(rendered: Rendered) -> None:
    deployment = rendered.one("Deployment")
    assert deployment["spec"]["template"]["metadata"]["labels"] == LABELS
    assert deployment["spec"]["selector"] == {"matchLabels": LABELS}
    for service in rendered.named("Service"):
        assert service["spec"]["selector"] == LABELS
    assert rendered.one("PodDisruptionBudget")["spec"]["selector"] == {"matchLabels": LABELS}
    assert rendered.one("NetworkPolicy")["spec"]["podSelector"] == {"matchLabels": LABELS}
    spread = {one["topologyKey"]: one for one in rendered.pod["topologySpreadConstraints"]}
    assert set(spread) == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    for one in spread.values():
        assert one["labelSelector"] == {"matchLabels": LABELS}


def test_the_server_accepts_the_settings(rendered: Rendered) -> None:
    settings = rendered.settings
    check_settings(settings)
    check_device(settings, "cuda" if "gpu" in rendered.components else "cpu")


def test_services_target_the_ports_of_the_server(rendered: Rendered) -> None:
    settings = rendered.settings
    has_tls = bool(settings.tls_cert)
    protocols = {
        "http": "https" if has_tls else "http",
        "grpc": "https" if has_tls else "kubernetes.io/h2c",
        "management": "https" if has_tls else "http",
    }
    for service in rendered.named("Service"):
        for port in service["spec"]["ports"]:
            assert port["port"] == container_ports(rendered)[port["targetPort"]]
            assert port["name"] == port["targetPort"]
            assert port["appProtocol"] == protocols[port["name"]]
    for name in services(rendered):
        ports = [port["name"] for port in rendered.one("Service", name)["spec"]["ports"]]
        assert ports == (["management"] if name == "embedserve-management" else ["http", "grpc"])


def test_server_listens_on_the_ports_of_the_container(rendered: Rendered) -> None:
    settings = rendered.settings
    ports = {"http": settings.http_port, "grpc": settings.grpc_port}
    if settings.management_port >= 0:
        ports["management"] = settings.management_port
    assert container_ports(rendered) == ports
    hosts = {settings.host} | ({settings.management_host} if "management" in ports else set())
    assert hosts == {"0.0.0.0" if rendered.is_reachable else "127.0.0.1"}


def test_headless_service_resolves_to_pod_addresses(rendered: Rendered) -> None:
    for service in rendered.named("Service", "embedserve-headless"):
        spec = service["spec"]
        assert spec["clusterIP"] == "None"
        assert not spec.get("publishNotReadyAddresses")
        assert spec["ports"] == rendered.one("Service", "embedserve")["spec"]["ports"]
    assert rendered.settings.limits.connection_age_s_max > 0


def test_service_monitor_matches_the_metrics_endpoint(rendered: Rendered) -> None:
    settings = rendered.settings
    for monitor in rendered.named("ServiceMonitor"):
        assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["path"] == "/metrics"
        assert endpoint["port"] == ("management" if settings.management_port >= 0 else "http")
        assert endpoint["scheme"] == ("https" if settings.tls_cert else "http")
        assert ("authorization" in endpoint) == bool(settings.tokens)
        config = endpoint["tlsConfig"]
        expected = {"serverName", "ca"} if settings.tls_cert else set()
        assert set(config) == expected | (
            {"cert", "keySecret"} if settings.tls_client_ca else set()
        )


def test_pods_are_scraped_once_under_the_job_name_of_the_rules(rendered: Rendered) -> None:
    (scraped,) = monitoring("prometheus.yaml")["scrape_configs"]
    for monitor in rendered.named("ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        port = monitor["spec"]["endpoints"][0]["port"]
        (service,) = [
            one
            for one in rendered.named("Service")
            if selector <= one["metadata"]["labels"].items()
            and port in [each["name"] for each in one["spec"]["ports"]]
        ]
        job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
        assert job == scraped["job_name"]


def test_prometheus_rule_contains_the_rules_file(rendered: Rendered) -> None:
    for resource in rendered.named("PrometheusRule"):
        assert resource["apiVersion"] == "monitoring.coreos.com/v1"
        assert resource["spec"] == monitoring("rules.yaml")
        assert "annotations" not in resource["metadata"]


def test_network_policy_allows_ingress_of_callers_and_prometheus(rendered: Rendered) -> None:
    spec = rendered.one("NetworkPolicy")["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    callers, prometheus = spec["ingress"]
    assert callers["from"] == [{"podSelector": {}}]
    assert [port["port"] for port in callers["ports"]] == ["http", "grpc"]
    (peer,) = prometheus["from"]
    namespace = peer["namespaceSelector"]["matchLabels"]
    assert namespace == {"kubernetes.io/metadata.name": "monitoring"}
    ports = [port["port"] for port in prometheus["ports"]]
    assert ports == ["management" if "management" in container_ports(rendered) else "http"]


def test_network_policy_allows_egress_only_to_buckets_and_dns(rendered: Rendered) -> None:
    egress = rendered.one("NetworkPolicy")["spec"]["egress"]
    if "s3" not in rendered.components:
        assert egress == []
        return
    (rule,) = egress
    assert set(rule) == {"ports"}  # a node's DNS cache has no pod labels
    ports = [(port["protocol"], port["port"]) for port in rule["ports"]]
    assert ports == [("TCP", 443), ("UDP", 53), ("TCP", 53)]


def test_container_environment_comes_from_the_config_map(rendered: Rendered) -> None:
    name = rendered.one("ConfigMap")["metadata"]["name"]
    assert name.startswith("embedserve-")  # the generator appends a hash
    secrets = [{"secretRef": {"name": "embedserve-s3"}}] if "s3" in rendered.components else []
    assert rendered.container["envFrom"] == [{"configMapRef": {"name": name}}, *secrets]


def test_container_runs_serve(rendered: Rendered) -> None:
    assert rendered.container["args"] == ["serve"]


def test_service_links_are_disabled(rendered: Rendered) -> None:
    assert rendered.pod["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("probe", "path"),
    [
        ("startupProbe", "/health/live"),
        ("livenessProbe", "/health/live"),
        ("readinessProbe", "/health/ready"),
    ],
)
def test_probes_reach_the_server(rendered: Rendered, probe: str, path: str) -> None:
    """Checks the probes: kubelet has no client certificate, and connects to the pod's address."""
    settings, found = rendered.settings, rendered.container[probe]
    if settings.tls_client_ca or not rendered.is_reachable:
        more = ["--ready"] if path == "/health/ready" else []
        assert found["exec"] == {"command": ["embedserve", "health", *more]}
        assert "httpGet" not in found
        assert found["timeoutSeconds"] > TIMEOUT_S  # the command's own timeout
        assert settings.http_uds.startswith("/tmp/")
        return
    scheme = {"scheme": "HTTPS"} if settings.tls_cert else {}
    assert found["httpGet"] == {"path": path, "port": "http", **scheme}
    assert "exec" not in found


def test_termination_grace_period_exceeds_the_drain(rendered: Rendered) -> None:
    command, seconds = rendered.container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert int(seconds) > 0
    grace_s = rendered.pod["terminationGracePeriodSeconds"]
    assert grace_s > int(seconds) + rendered.settings.drain_s + KILL_AFTER_S


def test_rollout_keeps_all_replicas_available(rendered: Rendered) -> None:
    spec = rendered.one("Deployment")["spec"]
    assert "replicas" not in spec  # each apply would undo the autoscaler
    assert rendered.one("HorizontalPodAutoscaler")["spec"]["minReplicas"] == 2
    assert spec["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }
    budget = rendered.one("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_container_runs_without_unneeded_privileges(rendered: Rendered) -> None:
    assert rendered.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    pod = rendered.pod
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False


def test_resources_limit_memory_but_not_cpu(rendered: Rendered) -> None:
    resources = rendered.container["resources"]
    disk = {"ephemeral-storage"} if "s3" in rendered.components else set()
    gpus = {"nvidia.com/gpu"} if "gpu" in rendered.components else set()
    assert set(resources["requests"]) == {"cpu", "memory"} | disk
    assert set(resources["limits"]) == {"memory"} | disk | gpus
    assert resources["limits"]["memory"] == resources["requests"]["memory"]


def test_image_tag_is_the_current_version(rendered: Rendered) -> None:
    variant = "cuda" if "gpu" in rendered.components else "cpu"
    assert rendered.container["image"] == f"embedserve:{__version__}-{variant}"


def test_server_waits_for_a_store_without_models(rendered: Rendered) -> None:
    assert rendered.settings.wait is True
    # No probe may end a pod that waits, pulls or loads for hours: test_probes_reach_the_server.
