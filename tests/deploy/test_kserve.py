"""Tests of KServe's resources: valid Kubernetes parts, and arguments that the server accepts.

KServe's own schemas are not in the repository; test_crds.py uses them if they are available.
"""

from typing import Any

import kubernetes_validate
import pytest

from embedserve.processes.supervisor import KILL_AFTER_S

from .conftest import Rendered
from .test_kubernetes import SCHEMAS
from .test_settings import KNOWN

KSERVE_FIELDS = {"minReplicas", "maxReplicas", "deploymentStrategy", "model"}
"""Fields of a predictor that a PodSpec lacks."""
MODEL_FIELDS = {"modelFormat", "protocolVersion", "runtime", "storageUri"}


@pytest.fixture
def runtime(kserve: Rendered) -> dict[str, Any]:
    spec: dict[str, Any] = kserve.one("ServingRuntime")["spec"]
    return spec


@pytest.fixture
def container(runtime: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = runtime["containers"]
    return found


@pytest.fixture
def service(kserve: Rendered) -> dict[str, Any]:
    return kserve.one("InferenceService")


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}


def test_containers_and_predictor_form_a_valid_pod(
    runtime: dict[str, Any], service: dict[str, Any]
) -> None:
    predictor = service["spec"]["predictor"]
    assert set(predictor) & KSERVE_FIELDS == KSERVE_FIELDS - {"maxReplicas"}
    own = {name: value for name, value in predictor.items() if name not in KSERVE_FIELDS}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one"},
        "spec": {"containers": runtime["containers"], "volumes": runtime["volumes"], **own},
    }
    kubernetes_validate.validate(pod, SCHEMAS, strict=True)
    assert set(predictor["model"]) == MODEL_FIELDS


def test_inference_service_uses_the_serving_runtime(
    kserve: Rendered, runtime: dict[str, Any], service: dict[str, Any]
) -> None:
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == kserve.one("ServingRuntime")["metadata"]["name"]
    formats = [(one["name"], one["version"]) for one in runtime["supportedModelFormats"]]
    assert formats == [(model["modelFormat"]["name"], model["modelFormat"]["version"])]
    assert model["protocolVersion"] in runtime["protocolVersions"]


def test_container_follows_kserve_conventions_for_name_store_and_ports(
    container: dict[str, Any],
) -> None:
    assert container["name"] == "kserve-container"
    assert container["args"] == ["serve", "/mnt/models", "--model", "{{.Name}}"]
    values = environment(container)
    assert set(values) <= KNOWN
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {
        "http1": int(values["EMBEDSERVE_HTTP_PORT"]),
        "grpc": int(values["EMBEDSERVE_GRPC_PORT"]),
    }
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == ports["http1"]


def test_container_runs_like_that_of_the_deployment(
    container: dict[str, Any], cpu: Rendered
) -> None:
    assert container["image"] == cpu.container["image"]
    assert container["lifecycle"] == cpu.container["lifecycle"]
    assert container["resources"] == cpu.container["resources"]
    assert cpu.container["securityContext"].items() <= container["securityContext"].items()


def test_termination_grace_period_exceeds_the_drain(
    container: dict[str, Any], service: dict[str, Any]
) -> None:
    _, seconds = container["lifecycle"]["preStop"]["exec"]["command"]
    drain_s = float(environment(container)["EMBEDSERVE_DRAIN_S"])
    predictor = service["spec"]["predictor"]
    assert predictor["terminationGracePeriodSeconds"] > int(seconds) + drain_s + KILL_AFTER_S
    assert predictor["enableServiceLinks"] is False
