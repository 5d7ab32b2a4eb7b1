"""Tests of what a person sees of a pod that cannot serve: events, state and log."""

import pytest
from interop.cluster.kubectl import Start
from interop.cluster.manifests import Manifest, container_of

pytestmark = pytest.mark.cluster

INSUFFICIENT_MEMORY = "64Mi"
"""Memory limit below what Python and PyTorch take before they load a model."""


def test_container_without_memory_is_reported_as_oom_killed(start: Start) -> None:
    def limit(manifests: dict[str, Manifest]) -> None:
        memory = {"memory": INSUFFICIENT_MEMORY}
        container_of(manifests)["resources"] = {"limits": memory, "requests": memory}

    small = start("small", change=limit)
    small.wait_for("OOMKilled", "describe", "pods")
    small.wait_for("CrashLoopBackOff", "get", "pods")
    small.run("set", "resources", "deployment/embedserve", "--limits=memory=2Gi")
    small.wait_until_ready(1)


@pytest.mark.parametrize(
    ("component", "name", "reason"),
    [
        ("tls", "embedserve-tls", "FailedMount"),
        ("tokens", "embedserve-tokens", "FailedMount"),
        ("s3", "embedserve-s3", "Failed"),
    ],
)
def test_missing_secret_is_named_in_the_events(
    start: Start, component: str, name: str, reason: str
) -> None:
    pod = start(f"missing-{component}", component)
    described = pod.wait_for(f'secret "{name}" not found', "describe", "pods")
    (line, *_) = (one for one in described.splitlines() if f'secret "{name}" not found' in one)
    assert reason in line.split()


@pytest.mark.parametrize(
    ("component", "files", "named_path"),
    [
        ("tls", {"tls.crt": "-----BEGIN CERTIFICATE-----\nMIIB", "tls.key": ""}, "/tls/tls."),
        ("tokens", {"tokens": '{"name": "ranker", "sha'}, "/tokens/tokens"),
    ],
)
def test_truncated_secret_file_is_named_in_the_log(
    start: Start, component: str, files: dict[str, str], named_path: str
) -> None:
    pod = start(f"half-{component}", component, secrets={f"embedserve-{component}": files})
    log = pod.wait_for_log(named_path)
    assert "Traceback" not in log
    pod.wait_for("CrashLoopBackOff", "get", "pods")
