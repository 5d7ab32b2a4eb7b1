"""Tests of what a person sees of a pod that cannot serve: events, state and log."""

from __future__ import annotations

import pytest
from interop.cluster.kubectl import Start
from interop.cluster.manifests import Manifest, container_of

pytestmark = pytest.mark.cluster

TOO_LITTLE = "64Mi"
"""Memory limit below what Python and PyTorch take before they load a model."""


def test_a_container_without_memory_is_killed_and_said_to_be(start: Start) -> None:
    def limit(manifests: dict[str, Manifest]) -> None:
        memory = {"memory": TOO_LITTLE}
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
def test_a_missing_secret_is_named(start: Start, component: str, name: str, reason: str) -> None:
    pod = start(f"missing-{component}", component)
    described = pod.wait_for(f'secret "{name}" not found', "describe", "pods")
    (line, *_) = (one for one in described.splitlines() if f'secret "{name}" not found' in one)
    assert reason in line.split()


@pytest.mark.parametrize(
    ("component", "files", "named"),
    [
        ("tls", {"tls.crt": "-----BEGIN CERTIFICATE-----\nMIIB", "tls.key": ""}, "/tls/tls."),
        ("tokens", {"tokens": '{"name": "ranker", "sha'}, "/tokens/tokens"),
    ],
)
def test_a_half_written_secret_is_named(
    start: Start, component: str, files: dict[str, str], named: str
) -> None:
    pod = start(f"half-{component}", component, secrets={f"embedserve-{component}": files})
    log = pod.wait_for_log(named)
    assert "Traceback" not in log
    pod.wait_for("CrashLoopBackOff", "get", "pods")
