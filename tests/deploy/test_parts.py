"""Tests of the manifests of a model in parts: valid, alone and with components, and consistent.

test_kubernetes.py checks the base, which the routers use.
"""

import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import blocks

from embedserve import __version__
from embedserve.commands.planning.pod_patch import BASE, S3, PodOptions, pod_figures
from embedserve.commands.planning.shard_manifests import READY_S_MIN, shard_manifests
from embedserve.config_checks import check_device, check_settings
from embedserve.shard_client.discovery import DNS_S, PART, DnsShards, parse_shards

from .conftest import KUBERNETES, Rendered, kustomize_text, manifests_of
from .parts_overlay import (
    GIB,
    PAGE,
    PARTS_COMPONENTS,
    ROWS,
    Shard,
    applied_by,
    parts_kustomization,
    printed_shards,
    render_each,
    render_parts,
    render_with,
    run_documented_update,
    shards_of,
)
from .test_components import by_name, in_order, secrets
from .test_kubernetes import CUSTOM, LABELS, check_schema_of, container_ports

ALL = PARTS_COMPONENTS
CASES: list[tuple[int, tuple[str, ...]]] = [
    (2, ()),
    (16, ()),
    *((2, (name,)) for name in ALL),
    (2, ALL),
    (16, ALL),
]
SHUFFLED = [tuple(random.Random(seed).sample(ALL, len(ALL))) for seed in range(3)]
TOGETHER = [
    *CASES,
    *((2, components) for components in (*SHUFFLED, ("gpu",), ("s3", "monitoring"))),
]
"""Numbers of parts, and components, that are rendered together."""
DNS_CACHE_S = 30
"""Seconds that clients may cache a name from CoreDNS, in kubeadm's configuration."""
MIB = 1 << 20


@cache
def rendered_together() -> dict[tuple[int, tuple[str, ...]], Rendered]:
    shards = [(printed_shards(count, components), components) for count, components in TOGETHER]
    return dict(zip(TOGETHER, render_each(shards), strict=True))


def render_parts_once(count: int, *components: str) -> Rendered:
    return rendered_together()[count, components]


@pytest.fixture(params=CASES, ids=lambda case: "+".join([str(case[0]), *case[1]]))
def parts(request: pytest.FixtureRequest) -> Rendered:
    count, components = request.param
    return render_parts_once(count, *components)


def labels(part: int) -> dict[str, str]:
    return {"app.kubernetes.io/name": "embedserve-shard", "embedserve/part": str(part)}


def source(rendered: Rendered) -> DnsShards:
    found = parse_shards(rendered.settings.shards)
    assert isinstance(found, DnsShards)
    return found


def quantity(text: str) -> int:
    units = {"Mi": MIB, "Gi": GIB}
    return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)


def test_manifests_match_the_kubernetes_schema(parts: Rendered) -> None:
    for manifest in parts.manifests:
        if manifest["kind"] not in CUSTOM:  # checked by test_crds.py
            check_schema_of(manifest)


@pytest.mark.parametrize("count", [2, 16])
def test_each_part_has_its_resources(count: int) -> None:
    rendered = render_parts_once(count)
    names = [f"embedserve-part-{part}" for part in range(count)]
    for kind, others in (
        ("StatefulSet", []),
        ("PodDisruptionBudget", ["embedserve"]),
        ("Service", ["embedserve", "embedserve-headless", "embedserve-shards"]),
    ):
        found = [one["metadata"]["name"] for one in rendered.named(kind)]
        assert sorted(found) == sorted(names + others)
    assert len(rendered.named("Deployment")) == 1
    assert len(rendered.named("PersistentVolumeClaim")) == 1


def test_routers_resolve_the_rendered_shard_services(parts: Rendered) -> None:
    dns = source(parts)
    for shard in shards_of(parts):
        service = parts.one("Service", dns.name.replace(PART, str(shard.part)))
        spec = service["spec"]
        assert spec["clusterIP"] == "None"
        assert "publishNotReadyAddresses" not in spec
        assert spec["selector"] == labels(shard.part)
        (port,) = spec["ports"]
        assert port["port"] == dns.port == container_ports(shard)[port["targetPort"]]
        assert port["targetPort"] == "grpc"
        assert dns.port == shard.settings.grpc_port
        has_tls = bool(shard.settings.tls_cert)
        assert port["appProtocol"] == ("https" if has_tls else "kubernetes.io/h2c")
    names = {one["metadata"]["name"] for one in parts.named("Service")}
    assert dns.name.replace(PART, str(len(shards_of(parts)))) not in names


def test_labels_select_the_pods_of_one_part(parts: Rendered) -> None:
    for shard in shards_of(parts):
        one, spec = labels(shard.part), shard.stateful_set["spec"]
        assert spec["template"]["metadata"]["labels"] == one
        assert spec["selector"] == {"matchLabels": one}
        assert spec["serviceName"] == shard.stateful_set["metadata"]["name"]
        budget = parts.one("PodDisruptionBudget", spec["serviceName"])["spec"]
        assert budget["selector"] == {"matchLabels": one}
        assert budget["maxUnavailable"] == 1
        assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_callers_reach_routers_only(parts: Rendered) -> None:
    for name in ("embedserve", "embedserve-headless"):
        assert parts.one("Service", name)["spec"]["selector"] == LABELS
    assert parts.one("Deployment")["spec"]["template"]["metadata"]["labels"] == LABELS
    assert not LABELS.items() <= labels(0).items()


def test_replicas_are_on_different_hosts_and_if_possible_zones(parts: Rendered) -> None:
    for shard in shards_of(parts):
        apart = shard.pod["affinity"]["podAntiAffinity"]
        (host,) = apart["requiredDuringSchedulingIgnoredDuringExecution"]
        (zone,) = apart["preferredDuringSchedulingIgnoredDuringExecution"]
        keys = (host["topologyKey"], zone["podAffinityTerm"]["topologyKey"])
        assert keys == ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
        for term in (host, zone["podAffinityTerm"]):
            assert term["labelSelector"] == {"matchLabels": labels(shard.part)}
        assert "topologySpreadConstraints" not in shard.pod


def test_a_part_replaces_one_replica_at_a_time(parts: Rendered) -> None:
    for shard in shards_of(parts):
        spec = shard.stateful_set["spec"]
        assert spec["replicas"] == 2
        assert spec["podManagementPolicy"] == "Parallel"
        assert spec["updateStrategy"] == {"type": "RollingUpdate"}
        assert spec["minReadySeconds"] == READY_S_MIN > DNS_CACHE_S + DNS_S


def common_pod_fields(pod: dict[str, Any]) -> dict[str, Any]:
    """Returns what the pods of shards and of routers have in common."""
    pod = {key: value for key, value in pod.items() if not re.match("affinity|topology", key)}
    (container,) = pod["containers"]
    mounts = [one for one in container["volumeMounts"] if one["name"] != "shard-token"]
    kept = {key: value for key, value in container.items() if key not in ("env", "resources")}
    pod["containers"] = [kept | {"volumeMounts": mounts}]
    pod["volumes"] = [
        {**one, "emptyDir": {}} if one["name"] == "cache" else one
        for one in pod["volumes"]
        if one["name"] != "shard-token"
    ]
    alike: dict[str, Any] = in_order(pod)
    return alike


def test_shards_and_routers_have_the_same_pod_fields(parts: Rendered) -> None:
    """Checks that every component changes both."""
    for shard in shards_of(parts):
        assert common_pod_fields(shard.pod) == common_pod_fields(parts.pod)
    assert parts.pod["automountServiceAccountToken"] is False
    assert parts.container["image"] == f"embedserve:{__version__}-cpu"


def test_servers_accept_their_settings(parts: Rendered) -> None:
    count = len(shards_of(parts))
    for one in (parts, *shards_of(parts)):
        check_settings(one.settings)
        check_device(one.settings, "cpu")
        assert one.settings.follow == "latest"
    assert parts.settings.part == ""
    for shard in shards_of(parts):
        settings = shard.settings
        assert (settings.part, settings.shards) == (f"{shard.part}/{count}", "")
        assert settings.model == ("shop",)
        assert settings.limits.connection_age_s_max == 0
        ports = {"http": settings.http_port, "grpc": settings.grpc_port}
        if settings.management_port >= 0:
            ports["management"] = settings.management_port
        assert container_ports(shard) == ports


def test_routers_have_the_credentials_that_shards_require(parts: Rendered) -> None:
    router, (shard, *_) = parts.settings, shards_of(parts)
    assert bool(router.shard_ca) == bool(shard.settings.tls_cert)
    assert bool(router.shard_cert) == bool(shard.settings.tls_client_ca)
    assert bool(router.shard_token) == bool(shard.settings.tokens)
    mounts = {one["mountPath"] for one in parts.container["volumeMounts"]}
    for path in (router.shard_ca, router.shard_cert, router.shard_key, router.shard_token):
        assert not path or path.rpartition("/")[0] in mounts
    volumes = by_name(parts.pod["volumes"])
    assert sorted(volumes) == sorted(one["name"] for one in parts.container["volumeMounts"])


def test_policies_allow_routers_and_prometheus_to_reach_shards(parts: Rendered) -> None:
    spec = parts.one("NetworkPolicy", "embedserve-shard")["spec"]
    assert spec["podSelector"]["matchLabels"].items() <= labels(0).items()
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    routers, prometheus = spec["ingress"]
    assert routers == {
        "from": [{"podSelector": {"matchLabels": LABELS}}],
        "ports": [{"protocol": "TCP", "port": "grpc"}],
    }
    base = parts.one("NetworkPolicy", "embedserve")["spec"]
    assert prometheus == base["ingress"][1]
    assert spec["egress"] == base["egress"]


def test_policies_allow_routers_to_reach_shards_and_dns(parts: Rendered) -> None:
    spec = parts.one("NetworkPolicy", "embedserve-router")["spec"]
    assert spec["podSelector"] == {"matchLabels": LABELS}
    assert spec["policyTypes"] == ["Egress"]
    shards, names = spec["egress"]
    shard = parts.one("NetworkPolicy", "embedserve-shard")["spec"]["podSelector"]
    assert shards["to"] == [{"podSelector": shard}]
    assert shards["ports"] == [{"protocol": "TCP", "port": source(parts).port}]
    assert [(one["protocol"], one["port"]) for one in names["ports"]] == [("UDP", 53), ("TCP", 53)]


def test_pods_are_scraped_once_and_shards_have_their_own_job(parts: Rendered) -> None:
    for monitor in parts.named("ServiceMonitor"):
        spec = monitor["spec"]
        (expression,) = spec["selector"]["matchExpressions"]
        assert expression["operator"] == "In"
        (endpoint,) = spec["endpoints"]
        found = [
            (one["metadata"]["labels"][spec["jobLabel"]], one["spec"]["selector"])
            for one in parts.named("Service")
            if one["metadata"]["labels"].get(expression["key"]) in expression["values"]
            and endpoint["port"] in [port["name"] for port in one["spec"]["ports"]]
        ]
        pods = {"app.kubernetes.io/name": "embedserve-shard"}
        assert sorted(found, key=str) == [("embedserve", LABELS), ("embedserve-shard", pods)]


def test_the_management_port_of_shards_has_a_service() -> None:
    names = [one["metadata"]["name"] for one in render_parts_once(2).named("Service")]
    assert "embedserve-shards-management" not in names
    with_port = render_parts_once(2, "management-port")
    (port,) = with_port.one("Service", "embedserve-shards-management")["spec"]["ports"]
    assert port["port"] == container_ports(shards_of(with_port)[0])[port["targetPort"]]


def test_autoscaler_uses_queue_wait_and_cpu() -> None:
    (wait, processor) = render_parts_once(2).one("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert wait["pods"]["metric"]["name"] == "embedserve_queue_wait_p99_milliseconds"
    assert processor["resource"]["name"] == "cpu"


@pytest.mark.parametrize("shuffled", SHUFFLED)
def test_components_combine_in_any_order(shuffled: tuple[str, ...]) -> None:
    assert in_order(render_parts_once(2, *shuffled).manifests) == in_order(
        render_parts_once(2, *ALL).manifests
    )


def test_overlays_render_alone_as_they_do_together() -> None:
    alone = kustomize_text(parts_kustomization(ALL), {"parts.yaml": printed_shards(2, ALL)})
    assert manifests_of(alone) == render_parts_once(2, *ALL).manifests


def resources(shard: Shard) -> dict[tuple[str, str], int]:
    return {
        (kind, name): quantity(amount)
        for kind, amounts in shard.container["resources"].items()
        for name, amount in amounts.items()
    }


@pytest.mark.parametrize("components", [(), ("s3",)])
@pytest.mark.parametrize("gigabytes", [0.001, 30])
def test_shard_resources_cover_their_needs_and_the_base(
    components: tuple[str, ...], gigabytes: float
) -> None:
    is_pulled = bool(components)
    rows = replace(ROWS, mapped=int(gigabytes * GIB), is_pulled=is_pulled)
    rendered = render_parts(2, *components, rows=rows)
    needed = pod_figures(rows, PodOptions(part="0/2"))
    manifests = S3 if is_pulled else BASE
    for shard in shards_of(rendered):
        found = resources(shard)
        for kind in ("requests", "limits"):
            for name, amount in needed[kind].items():
                least = max(amount, manifests[kind][name]) if amount else 0
                assert least <= found.get((kind, name), 0) < least + MIB
        if is_pulled:
            cache_bytes = max(needed["cache"]["sizeLimit"], S3["cache"]["sizeLimit"])
            size = by_name(shard.pod["volumes"])["cache"]["emptyDir"]["sizeLimit"]
            assert cache_bytes <= quantity(size) < cache_bytes + MIB


def test_shards_printed_for_a_local_store_get_the_disk_of_the_s3_component() -> None:
    printed = shard_manifests(2, ROWS, PodOptions())
    for shard in shards_of(render_with(printed, "s3")):
        assert resources(shard)["limits", "ephemeral-storage"] == S3["limits"]["ephemeral-storage"]
        assert by_name(shard.pod["volumes"])["cache"]["emptyDir"] == {"sizeLimit": "20Gi"}


def test_routers_reject_gpus() -> None:
    with pytest.raises(ValueError, match="devices is 'cuda', but shards is"):
        check_settings(render_parts_once(2, "gpu").settings)


def test_documented_update_applies_parts_in_turn_and_routers_last(
    parts: Rendered, tmp_path: Path
) -> None:
    """Checks that each part is ready before the next manifests are applied."""
    shards = shards_of(parts)
    first, *steps, last = run_documented_update(tmp_path, len(shards))
    before = applied_by(first, parts.manifests)
    kinds = {one["kind"] for one in parts.manifests} - {"Deployment", "StatefulSet"}
    assert {one["kind"] for one in before} == kinds
    assert len(before) == len(parts.manifests) - 1 - len(shards)
    for shard, apply, wait in zip(shards, steps[::2], steps[1::2], strict=True):
        assert applied_by(apply, parts.manifests) == [shard.stateful_set]
        name = shard.stateful_set["metadata"]["name"]
        assert wait[:3] == ["rollout", "status", f"statefulset/{name}"]
    assert applied_by(last, parts.manifests) == parts.manifests


@pytest.mark.parametrize("failing_part", [0, 1])
def test_documented_update_ends_at_a_part_that_fails(tmp_path: Path, failing_part: int) -> None:
    manifests = render_parts_once(2).manifests
    calls = run_documented_update(tmp_path, 2, failing_part)
    assert calls[-1][2] == f"statefulset/embedserve-part-{failing_part}"
    for call in calls:
        applied = applied_by(call, manifests) if call[0] == "apply" else []
        assert "Deployment" not in [one["kind"] for one in applied]
    assert len(calls) == 1 + 2 * (failing_part + 1)


def test_overlay_of_the_page_renders_with_its_changes() -> None:
    overlay, aliases = (one.text for one in blocks(PAGE) if one.language == "yaml")
    kustomization = yaml.safe_load(overlay)
    kustomization["patches"] += yaml.safe_load(aliases)
    changed = yaml.safe_dump(kustomization).replace("../embedserve/deploy/kubernetes", "KUBERNETES")
    printed = shard_manifests(2, replace(ROWS, is_pulled=True), PodOptions())
    components = tuple(one.rpartition("/")[2] for one in kustomization["components"])
    manifests = manifests_of(kustomize_text(changed, {"parts.yaml": printed}))
    ours = Rendered("ours", manifests, components)
    plain = render_parts_once(2, *components)
    assert [one["kind"] for one in ours.manifests] == [one["kind"] for one in plain.manifests]
    for one in (ours, *shards_of(ours)):
        assert one.container["image"] == f"registry.example/embedserve:{__version__}-cpu"
        assert one.settings.store == "s3://recommendations/embeddings"
    assert (ours.settings.model, ours.settings.follow) == (("shop@stable",), "alias")
    for shard in shards_of(ours):
        assert (shard.settings.model, shard.settings.follow) == (("shop",), "latest")


def test_readme_names_every_secret(parts: Rendered) -> None:
    page = (KUBERNETES.parent / "README.md").read_text()
    for name in set().union(*(secrets(manifest) for manifest in parts.manifests)):
        assert f"`{name}`" in page
