"""Tests of components: they combine in any order, and each makes its changes.

test_kubernetes.py checks each combination as a whole.
"""

import textwrap
from pathlib import PurePosixPath
from typing import Any

import pytest
import yaml

from embedserve import __version__

from .conftest import (
    COMPONENTS,
    DEPLOY,
    KUBERNETES,
    PAIRS,
    SHUFFLED,
    Compose,
    Rendered,
    kustomization_of,
    kustomize_text,
    manifests_of,
    readme_yaml,
    render,
)
from .test_kubernetes import check_schema_of

ALERTS = DEPLOY.parent / "docs" / "alerts.md"
NESTED = {"exec-probes"}
"""Components that only other components include."""
DEPRECATED = {
    *("bases", "commonLabels", "imageTags", "patchesJson6902", "patchesStrategicMerge", "vars"),
}
"""Fields that `kustomize edit fix` replaces."""


def in_order(value: Any) -> Any:
    """Returns the value with all lists sorted.

    The order of volumes or variables is the order of the components.
    """
    if isinstance(value, dict):
        return {key: in_order(one) for key, one in value.items()}
    if isinstance(value, list):
        return sorted((in_order(one) for one in value), key=str)
    return value


def by_name(items: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in items}


def secrets(value: Any) -> set[str]:
    """Returns the names of the Secrets that a manifest refers to."""
    if isinstance(value, list):
        return set().union(*map(secrets, value))
    if not isinstance(value, dict):
        return set()
    own = {one for key, one in value.items() if key == "secretName"}
    for key in ("secretRef", "secret", "keySecret", "credentials"):
        if key in value and "name" in value[key]:
            own.add(value[key]["name"])
    return own.union(*map(secrets, value.values()))


def test_components_folder_contains_all_listed_components() -> None:
    folders = {path.name for path in (KUBERNETES / "components").iterdir()}
    assert folders == {*COMPONENTS, *NESTED}


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_components_combine_in_either_order(compose: Compose, first: str, second: str) -> None:
    rendered = in_order(compose(first, second).manifests)
    assert in_order(compose(second, first).manifests) == rendered


@pytest.mark.parametrize("shuffled", SHUFFLED)
def test_all_components_combine_in_any_order(compose: Compose, shuffled: tuple[str, ...]) -> None:
    assert in_order(compose(*shuffled).manifests) == in_order(compose(*COMPONENTS).manifests)


def test_components_named_twice_change_nothing(compose: Compose) -> None:
    """Checks an overlay of an overlay, which may list the same components again."""
    twice = compose(*COMPONENTS, *COMPONENTS).manifests
    assert in_order(twice) == in_order(compose(*COMPONENTS).manifests)


def test_no_kustomization_uses_deprecated_fields() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        assert not DEPRECATED & set(yaml.safe_load(path.read_text())), path


@pytest.mark.parametrize("name", ["cpu", "gpu", "s3"])
def test_overlays_equal_their_components(compose: Compose, name: str) -> None:
    components = () if name == "cpu" else (name,)
    assert render(f"overlays/{name}").manifests == compose(*components).manifests


def test_overlays_render_alone_as_they_do_together(compose: Compose) -> None:
    alone = kustomize_text(kustomization_of(COMPONENTS, "KUBERNETES/base"))
    assert manifests_of(alone) == compose(*COMPONENTS).manifests


def test_every_mount_has_a_volume_and_every_volume_a_mount(rendered: Rendered) -> None:
    volumes = by_name(rendered.pod["volumes"])
    mounts = rendered.container["volumeMounts"]
    assert sorted(volumes) == sorted(mount["name"] for mount in mounts)
    claims = {one["metadata"]["name"] for one in rendered.named("PersistentVolumeClaim")}
    for volume in volumes.values():
        (kind,) = set(volume) - {"name"}
        assert kind in ("emptyDir", "persistentVolumeClaim", "secret")
        if kind == "persistentVolumeClaim":
            assert volume[kind]["claimName"] in claims
    for mount in mounts:
        is_written = "emptyDir" in volumes[mount["name"]]
        assert mount.get("readOnly", False) is not is_written


def test_paths_in_settings_are_inside_mounted_volumes(rendered: Rendered) -> None:
    settings = rendered.settings
    mounts = {mount["mountPath"]: mount["name"] for mount in rendered.container["volumeMounts"]}
    files = (settings.tls_cert, settings.tls_key, settings.tls_client_ca, settings.tokens)
    for path in map(PurePosixPath, filter(None, (*files, settings.http_uds))):
        assert mounts[str(path.parent)] == path.parent.name
    assert {PurePosixPath(one).name for one in files if one} <= {
        *("tls.crt", "tls.key", "ca.crt", "tokens"),
    }
    if settings.store.startswith("s3://"):
        assert mounts[settings.cache] == "cache"
        assert "/store" not in mounts
    else:
        assert mounts[settings.store] == "store"
    assert ("/dev/shm" in mounts) == bool(settings.shared_memory)


def test_documents_name_the_secrets_that_users_create(rendered: Rendered) -> None:
    page = (DEPLOY / "README.md").read_text()
    named = set().union(*(secrets(manifest) for manifest in rendered.manifests))
    comments = "".join(
        (KUBERNETES / "components" / name / "kustomization.yaml").read_text()
        for name in (*rendered.components, "tls", "tokens")
    )
    for name in named:
        assert name.startswith("embedserve-")
        assert f"`{name}`" in page
        assert name in comments


def test_each_component_changes_its_settings(compose: Compose) -> None:
    base = compose().variables
    more = {name: dict(compose(name).variables.items() - base.items()) for name in COMPONENTS}
    tls = {"EMBEDSERVE_TLS_CERT": "/tls/tls.crt", "EMBEDSERVE_TLS_KEY": "/tls/tls.key"}
    probes = {"EMBEDSERVE_HTTP_UDS": "/tmp/http.sock"}
    tokens = {"EMBEDSERVE_TOKENS": "/tokens/tokens"}
    assert more == {
        "tls": tls,
        "mtls": {**tls, **probes, "EMBEDSERVE_TLS_CLIENT_CA": "/tls/ca.crt"},
        "tokens": tokens,
        "s3": {
            "EMBEDSERVE_STORE": "s3://bucket/store",
            "EMBEDSERVE_CACHE": "/cache",
            "EMBEDSERVE_FOLLOW": "latest",
        },
        "monitoring": {},
        "gpu": {"EMBEDSERVE_DEVICES": "cuda", "EMBEDSERVE_FOLLOW": "none"},
        "management-port": {
            **tokens,
            "EMBEDSERVE_MANAGEMENT_HOST": "0.0.0.0",
            "EMBEDSERVE_MANAGEMENT_PORT": "8002",
        },
        "shared-memory": {
            **probes,
            "EMBEDSERVE_HOST": "127.0.0.1",
            "EMBEDSERVE_MANAGEMENT_HOST": "127.0.0.1",
            "EMBEDSERVE_SHARED_MEMORY": "/embedserve-",
        },
    }


def test_gpus_do_not_follow_a_bucket(compose: Compose) -> None:
    """Checks that following is off: with GPUs the server would not start."""
    assert compose("s3").settings.follow == "latest"
    for order in (("s3", "gpu"), ("gpu", "s3")):
        assert compose(*order).settings.follow == "none"


def test_only_gpu_pods_request_gpus(cpu: Rendered, gpu: Rendered) -> None:
    assert gpu.container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert [toleration["key"] for toleration in gpu.pod["tolerations"]] == ["nvidia.com/gpu"]
    assert "nvidia.com/gpu" not in cpu.container["resources"]["limits"]
    assert "tolerations" not in cpu.pod


def test_prometheus_verifies_and_presents_certificates(compose: Compose) -> None:
    (endpoint,) = compose("mtls", "monitoring").one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["tlsConfig"] == {
        "serverName": "embedserve",
        "ca": {"secret": {"name": "embedserve-tls", "key": "ca.crt"}},
        "cert": {"secret": {"name": "embedserve-prometheus-tls", "key": "tls.crt"}},
        "keySecret": {"name": "embedserve-prometheus-tls", "key": "tls.key"},
    }
    volumes = by_name(compose("mtls").pod["volumes"])
    assert volumes["tls"]["secret"] == {"secretName": "embedserve-tls"}


def test_prometheus_sends_its_token(compose: Compose) -> None:
    (endpoint,) = compose("monitoring", "tokens").one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "embedserve-prometheus-token", "key": "token"},
    }
    volumes = by_name(compose("tokens").pod["volumes"])
    assert volumes["tokens"]["secret"] == {"secretName": "embedserve-tokens"}


def test_shared_memory_is_a_bounded_volume_in_memory(compose: Compose) -> None:
    volumes = by_name(compose("shared-memory").pod["volumes"])
    assert volumes["shared-memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def test_overlay_settings_override_component_settings() -> None:
    text = (KUBERNETES / "overlays" / "s3" / "kustomization.yaml").read_text()
    text = text.replace("../..", "KUBERNETES").replace("s3://bucket/store", "s3://ours/models")
    assert Rendered("ours", manifests_of(kustomize_text(text))).settings.store == "s3://ours/models"


def test_readme_overlay_renders_with_its_changes(compose: Compose) -> None:
    text = readme_yaml("## An overlay of your own")
    assert "KUBERNETES" in text
    components = tuple(one.rpartition("/")[2] for one in yaml.safe_load(text)["components"])
    assert len(components) == 3
    ours, plain = (
        Rendered("ours", manifests_of(kustomize_text(text)), components),
        compose(*components),
    )
    assert ours.container["image"] == f"registry.example/embedserve:{__version__}-cpu"
    changed = dict(ours.variables.items() - plain.variables.items())
    assert changed == {
        "EMBEDSERVE_STORE": "s3://recommendations/embeddings",
        "EMBEDSERVE_MODEL": "dlrm@stable dlrm@canary",
        "EMBEDSERVE_FOLLOW": "alias",
        "EMBEDSERVE_WORKERS": "2",
    }
    assert ours.settings.model == ("dlrm@stable", "dlrm@canary")
    kinds = [one["kind"] for one in ours.manifests]
    assert kinds == [one["kind"] for one in plain.manifests]


def test_patches_in_the_documents_apply() -> None:
    thresholds = ALERTS.read_text().partition("\n- **Thresholds**")[2]
    patches = (
        readme_yaml("## Monitoring"),
        textwrap.dedent(thresholds.partition("```yaml\n")[2].partition("```")[0]),
        readme_yaml("## Deltas"),
    )
    kustomization: dict[str, Any] = {
        "resources": ["KUBERNETES/base"],
        "components": ["KUBERNETES/components/monitoring"],
        "patches": [one for text in patches for one in yaml.safe_load(text)],
    }
    ours = Rendered("ours", manifests_of(kustomize_text(yaml.safe_dump(kustomization))))
    rules = ours.one("PrometheusRule")
    for one in (rules, ours.one("ServiceMonitor")):
        assert one["metadata"]["labels"]["release"] == "prometheus"
    changed = {one.get("alert"): one["expr"] for one in rules["spec"]["groups"][1]["rules"]}
    assert changed["EmbedserveSlow"].endswith(" > 0.2")
    check_schema_of(ours.one("Deployment"))
    (mount,) = (one for one in ours.container["volumeMounts"] if one["name"] == "delta-key")
    (key,) = (one for one in ours.container["env"] if one["name"] == "EMBEDSERVE_DELTA_KEY")
    assert key["value"] == f"{mount['mountPath']}/delta.pub"


def test_readme_network_policy_matches_the_schema() -> None:
    check_schema_of(yaml.safe_load(readme_yaml("## Network")))
