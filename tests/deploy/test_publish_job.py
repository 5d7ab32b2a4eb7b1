"""The publishing Job writes where the servers read, by a command line that publish takes."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
from typer.testing import CliRunner

from embedserve.commands.cli import app

from .conftest import Rendered
from .test_kubernetes import SCHEMAS


@pytest.fixture
def job(publish: Rendered) -> dict[str, Any]:
    (job,) = publish.manifests
    kubernetes_validate.validate(job, SCHEMAS, strict=True)
    assert job["kind"] == "Job"
    spec: dict[str, Any] = job["spec"]
    return spec


def container(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = job["template"]["spec"]["containers"]
    return found


def test_it_writes_to_the_claim_that_servers_read(job: dict[str, Any], cpu: Rendered) -> None:
    pod = job["template"]["spec"]
    mounts = {one["mountPath"]: one for one in container(job)["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert set(mounts) == {"/store", "/checkpoint", "/cache", "/tmp"}
    assert "readOnly" not in mounts["/store"]
    assert mounts["/checkpoint"]["readOnly"] is True
    claim = volumes[mounts["/store"]["name"]]["persistentVolumeClaim"]["claimName"]
    assert claim == cpu.one("PersistentVolumeClaim")["metadata"]["name"]
    writer, reader = pod["securityContext"], cpu.pod["securityContext"]
    assert reader.items() <= writer.items()  # what it writes the servers' user reads
    assert container(job)["securityContext"] == cpu.container["securityContext"]
    assert container(job)["image"] == cpu.container["image"]


def test_a_version_for_a_bucket_is_staged_on_a_volume_of_its_own(job: dict[str, Any]) -> None:
    (cache,) = (one["value"] for one in container(job)["env"] if one["name"] == "XDG_CACHE_HOME")
    (mount,) = (one for one in container(job)["volumeMounts"] if one["mountPath"] == cache)
    volumes = {one["name"]: one for one in job["template"]["spec"]["volumes"]}
    assert volumes[mount["name"]]["emptyDir"] == {}  # no limit that would evict the pod


def test_publish_takes_its_arguments(job: dict[str, Any]) -> None:
    """They are understood: what is missing here is the checkpoint."""
    done = CliRunner().invoke(app, container(job)["args"])
    assert done.exit_code == 1, done.output
    assert "/checkpoint" in done.stderr
    assert "option" not in done.stderr


def test_a_pod_that_fails_is_tried_again_and_not_for_ever(job: dict[str, Any]) -> None:
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["backoffLimit"] > 0
    assert job["activeDeadlineSeconds"] > 0


def test_no_other_selects_its_pods(job: dict[str, Any], cpu: Rendered) -> None:
    labels = job["template"]["metadata"]["labels"]
    selector = cpu.one("Service", "embedserve")["spec"]["selector"]
    assert not selector.items() <= labels.items()
