"""The rendered manifests are valid and agree with each other."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from embedserve import __version__
from embedserve.commands.health import TIMEOUT_S

from .conftest import DEPLOY, Rendered

KUBERNETES = "1.34"
LABELS = {"app.kubernetes.io/name": "embedserve"}
CUSTOM = {"ServiceMonitor", "PrometheusRule"}
"""Resources of the Prometheus Operator."""


def service_ports(rendered: Rendered) -> dict[str, dict[str, Any]]:
    return {port["name"]: port for port in rendered.one("Service", "embedserve")["spec"]["ports"]}


def container_ports(rendered: Rendered) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in rendered.container["ports"]}


def settings(rendered: Rendered) -> dict[str, str]:
    data: dict[str, str] = rendered.one("ConfigMap")["data"]
    return data


def test_every_kind_is_rendered_once_and_services_twice(rendered: Rendered) -> None:
    claims = [] if rendered.name == "overlays/s3" else ["PersistentVolumeClaim"]
    assert sorted(manifest["kind"] for manifest in rendered.manifests) == [
        "ConfigMap",
        "Deployment",
        "HorizontalPodAutoscaler",
        "NetworkPolicy",
        *claims,
        "PodDisruptionBudget",
        "PrometheusRule",
        "Service",
        "Service",
        "ServiceMonitor",
    ]


def test_manifests_follow_the_kubernetes_schema(rendered: Rendered) -> None:
    for manifest in rendered.manifests:
        if manifest["kind"] not in CUSTOM:  # tested below
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_schema_refuses_an_unknown_field(cpu: Rendered) -> None:
    service = cpu.one("Service", "embedserve")
    wrong = {**service, "spec": {**service["spec"], "port": 8000}}
    with pytest.raises(kubernetes_validate.ValidationError, match="port"):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_no_manifest_names_a_namespace(rendered: Rendered) -> None:
    assert [m["kind"] for m in rendered.manifests if "namespace" in m["metadata"]] == []


def test_selectors_match_the_labels(rendered: Rendered) -> None:
    deployment = rendered.one("Deployment")
    assert deployment["spec"]["template"]["metadata"]["labels"] == LABELS
    assert deployment["spec"]["selector"] == {"matchLabels": LABELS}
    assert rendered.one("Service", "embedserve")["spec"]["selector"] == LABELS
    assert rendered.one("PodDisruptionBudget")["spec"]["selector"] == {"matchLabels": LABELS}
    assert rendered.one("NetworkPolicy")["spec"]["podSelector"] == {"matchLabels": LABELS}
    spread = {one["topologyKey"]: one for one in rendered.pod["topologySpreadConstraints"]}
    assert set(spread) == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    for one in spread.values():
        assert one["labelSelector"] == {"matchLabels": LABELS}


def test_service_monitor_scrapes_the_service(rendered: Rendered) -> None:
    monitor = rendered.one("ServiceMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    (endpoint,) = monitor["spec"]["endpoints"]
    assert {"port", "path", "interval"} <= set(endpoint)
    assert endpoint["path"] == "/metrics"
    assert endpoint["port"] == "http"
    assert endpoint["port"] in service_ports(rendered)
    wanted = monitor["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= rendered.one("Service", "embedserve")["metadata"]["labels"].items()
    headless = rendered.one("Service", "embedserve-headless")["metadata"]["labels"]
    assert not wanted.items() & headless.items()  # else every pod is scraped twice


def test_the_operator_gets_the_rules(rendered: Rendered) -> None:
    resource = rendered.one("PrometheusRule")
    assert resource["apiVersion"] == "monitoring.coreos.com/v1"
    rules = yaml.safe_load((DEPLOY / "monitoring" / "rules.yaml").read_text())
    assert resource["spec"] == rules


def test_the_scraped_job_is_named_as_in_the_rules(rendered: Rendered) -> None:
    """The operator names it after the Service."""
    config = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yaml").read_text())
    (scraped,) = config["scrape_configs"]
    assert rendered.one("Service", "embedserve")["metadata"]["name"] == scraped["job_name"]


def test_service_targets_are_the_containers_ports(rendered: Rendered) -> None:
    ports = service_ports(rendered)
    assert {port["targetPort"] for port in ports.values()} == set(container_ports(rendered))
    assert {name: port["port"] for name, port in ports.items()} == container_ports(rendered)
    is_tls = "EMBEDSERVE_TLS_CERT" in settings(rendered)
    assert ports["grpc"]["appProtocol"] == ("https" if is_tls else "kubernetes.io/h2c")


def test_the_server_listens_on_the_containers_ports(rendered: Rendered) -> None:
    values = settings(rendered)
    assert container_ports(rendered) == {
        "http": int(values["EMBEDSERVE_HTTP_PORT"]),
        "grpc": int(values["EMBEDSERVE_GRPC_PORT"]),
    }
    assert values["EMBEDSERVE_HOST"] == "0.0.0.0"


def test_the_config_map_is_the_containers_environment(rendered: Rendered) -> None:
    name = rendered.one("ConfigMap")["metadata"]["name"]
    assert name.startswith("embedserve-")  # the generator's hash follows
    assert rendered.container["envFrom"][0] == {"configMapRef": {"name": name}}


def test_the_container_serves(rendered: Rendered) -> None:
    assert rendered.container["args"] == ["serve"]


def test_the_service_adds_nothing_to_the_environment(rendered: Rendered) -> None:
    assert rendered.pod["enableServiceLinks"] is False


@pytest.mark.parametrize(
    ("probe", "path"),
    [
        ("startupProbe", "/health/live"),
        ("livenessProbe", "/health/live"),
        ("readinessProbe", "/health/ready"),
    ],
)
def test_probes_ask_the_server(rendered: Rendered, probe: str, path: str) -> None:
    if "EMBEDSERVE_TLS_CLIENT_CA" in settings(rendered):
        more = ["--ready"] if path == "/health/ready" else []
        assert rendered.container[probe]["exec"] == {"command": ["embedserve", "health", *more]}
        assert "httpGet" not in rendered.container[probe]
        return
    scheme = {"scheme": "HTTPS"} if "EMBEDSERVE_TLS_CERT" in settings(rendered) else {}
    assert rendered.container[probe]["httpGet"] == {"path": path, "port": "http", **scheme}
    assert "http" in container_ports(rendered)


def test_the_pod_outlives_its_drain(rendered: Rendered) -> None:
    command, seconds = rendered.container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert int(seconds) > 0
    drain_s = float(settings(rendered)["EMBEDSERVE_DRAIN_S"])
    assert rendered.pod["terminationGracePeriodSeconds"] > int(seconds) + drain_s


def test_a_rollout_keeps_every_replica(rendered: Rendered) -> None:
    spec = rendered.one("Deployment")["spec"]
    assert "replicas" not in spec  # applied anew, it would undo what the autoscaler did
    assert rendered.one("HorizontalPodAutoscaler")["spec"]["minReplicas"] == 2
    assert spec["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1},
    }
    budget = rendered.one("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_container_has_no_rights_it_does_not_need(rendered: Rendered) -> None:
    assert rendered.container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    pod = rendered.pod
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("rendered", ["cpu", "gpu", "tls", "mtls"], indirect=True)
def test_the_store_is_the_claim_and_read_only(rendered: Rendered) -> None:
    volumes = {volume["name"]: volume for volume in rendered.pod["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in rendered.container["volumeMounts"]}
    store = settings(rendered)["EMBEDSERVE_STORE"]
    assert mounts[store]["readOnly"] is True
    claim = volumes[mounts[store]["name"]]["persistentVolumeClaim"]["claimName"]
    assert claim == rendered.one("PersistentVolumeClaim")["metadata"]["name"]
    assert "emptyDir" in volumes[mounts["/tmp"]["name"]]


def test_resources_bound_memory_but_not_the_processor(rendered: Rendered) -> None:
    resources = rendered.container["resources"]
    disk = {"ephemeral-storage"} if rendered.name == "overlays/s3" else set()
    assert set(resources["requests"]) == {"cpu", "memory"} | disk
    assert resources["limits"]["memory"] == resources["requests"]["memory"]
    assert "cpu" not in resources["limits"]


def test_images_are_this_version(cpu: Rendered, gpu: Rendered) -> None:
    assert cpu.container["image"] == f"embedserve:{__version__}-cpu"
    assert gpu.container["image"] == f"embedserve:{__version__}-cuda"


def test_the_s3_overlay_follows_a_bucket_and_pulls_to_a_volume(s3: Rendered) -> None:
    values = settings(s3)
    assert values["EMBEDSERVE_STORE"].startswith("s3://")
    assert values["EMBEDSERVE_FOLLOW"] == "latest"
    mounts = {mount["mountPath"]: mount for mount in s3.container["volumeMounts"]}
    assert set(mounts) == {values["EMBEDSERVE_CACHE"], "/tmp"}
    assert "readOnly" not in mounts[values["EMBEDSERVE_CACHE"]]
    volumes = {volume["name"]: set(volume) - {"name"} for volume in s3.pod["volumes"]}
    assert volumes == {mount["name"]: {"emptyDir"} for mount in mounts.values()}


def test_the_s3_overlay_has_its_credentials_from_a_secret(cpu: Rendered, s3: Rendered) -> None:
    secrets = [{"secretRef": {"name": "embedserve-s3"}}]
    assert s3.container["envFrom"][1:] == secrets
    assert cpu.container["envFrom"][1:] == []


def test_only_the_gpu_overlay_asks_for_a_gpu(cpu: Rendered, gpu: Rendered) -> None:
    assert gpu.container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert [toleration["key"] for toleration in gpu.pod["tolerations"]] == ["nvidia.com/gpu"]
    assert "nvidia.com/gpu" not in cpu.container["resources"]["limits"]
    assert "tolerations" not in cpu.pod


def test_the_gpu_overlay_changes_one_setting(cpu: Rendered, gpu: Rendered) -> None:
    assert settings(gpu) == {**settings(cpu), "EMBEDSERVE_DEVICES": "cuda"}


def test_the_headless_service_has_the_pods_own_addresses(rendered: Rendered) -> None:
    spec = rendered.one("Service", "embedserve-headless")["spec"]
    assert spec["clusterIP"] == "None"
    assert not spec.get("publishNotReadyAddresses")
    assert spec["selector"] == LABELS
    own = rendered.one("Service", "embedserve")["spec"]["ports"]
    assert spec["ports"] == own
    assert float(settings(rendered)["EMBEDSERVE_CONNECTION_AGE_S_MAX"]) > 0


def test_a_store_without_models_is_waited_for(rendered: Rendered) -> None:
    assert settings(rendered)["EMBEDSERVE_WAIT"] == "true"
    # Neither may end a pod that waits, or pulls and loads for hours: test_probes_ask_the_server.


def test_the_network_policy_lets_in_the_containers_ports(rendered: Rendered) -> None:
    spec = rendered.one("NetworkPolicy")["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    let_in = {port["port"] for rule in spec["ingress"] for port in rule["ports"]}
    assert let_in == set(container_ports(rendered))
    out = [port["port"] for rule in spec["egress"] for port in rule["ports"]]
    assert out == ([443, 53, 53] if rendered.name == "overlays/s3" else [])


def test_the_tls_overlay_mounts_what_the_server_is_told_of(cpu: Rendered, tls: Rendered) -> None:
    more = settings(tls).items() - settings(cpu).items()
    assert dict(more) == {
        "EMBEDSERVE_TLS_CERT": "/tls/tls.crt",
        "EMBEDSERVE_TLS_KEY": "/tls/tls.key",
    }
    (mount,) = [one for one in tls.container["volumeMounts"] if one["mountPath"] == "/tls"]
    assert mount["readOnly"] is True
    (volume,) = [one for one in tls.pod["volumes"] if one["name"] == mount["name"]]
    assert volume["secret"] == {"secretName": "embedserve-tls"}
    (endpoint,) = tls.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == "embedserve-tls"
    assert endpoint["tlsConfig"]["serverName"] == "embedserve"


def test_the_mtls_overlay_asks_for_certificates_and_probes_from_within(
    tls: Rendered, mtls: Rendered
) -> None:
    more = dict(settings(mtls).items() - settings(tls).items())
    assert more.pop("EMBEDSERVE_TLS_CLIENT_CA") == "/tls/ca.crt"
    (name, path), *others = more.items()
    assert (name, others) == ("EMBEDSERVE_HTTP_UDS", [])
    folders = {mount["mountPath"]: mount for mount in mtls.container["volumeMounts"]}
    assert "readOnly" not in folders[str(Path(path).parent)]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert mtls.container[probe]["timeoutSeconds"] > TIMEOUT_S  # of the command itself
    (endpoint,) = mtls.one("ServiceMonitor")["spec"]["endpoints"]
    config = endpoint["tlsConfig"]
    assert endpoint["scheme"] == "https"
    assert config["cert"]["secret"]["name"] == config["keySecret"]["name"]
    shared = ("serverName", "ca")
    (of_tls,) = tls.one("ServiceMonitor")["spec"]["endpoints"]
    assert [config[key] for key in shared] == [of_tls["tlsConfig"][key] for key in shared]
