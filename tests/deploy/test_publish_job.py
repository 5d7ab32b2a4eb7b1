"""Tests of the publishing Job: it writes where the servers read, by arguments that publish accepts.

The shell is the same Job, asleep.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from store.remote.s3_server import environment, serve_s3
from typer.testing import CliRunner

from embedserve.commands.cli import app

from .conftest import Rendered, kustomize_text, manifests_of, readme_yaml, render
from .test_kubernetes import SCHEMAS


@pytest.fixture
def job(publish: Rendered) -> dict[str, Any]:
    return spec_of(publish)


@pytest.fixture
def shell() -> dict[str, Any]:
    rendered = render("shell")
    assert rendered.one("Job")["metadata"]["name"] == "embedserve-shell"
    return spec_of(rendered)


def spec_of(rendered: Rendered) -> dict[str, Any]:
    (job,) = rendered.manifests
    kubernetes_validate.validate(job, SCHEMAS, strict=True)
    assert job["kind"] == "Job"
    spec: dict[str, Any] = job["spec"]
    return spec


def container(job: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = job["template"]["spec"]["containers"]
    return found


def test_job_writes_to_the_claim_that_servers_read(job: dict[str, Any], cpu: Rendered) -> None:
    pod = job["template"]["spec"]
    mounts = {one["mountPath"]: one for one in container(job)["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert set(mounts) == {"/store", "/checkpoint", "/description", "/cache", "/tmp"}
    assert "readOnly" not in mounts["/store"]
    assert mounts["/checkpoint"]["readOnly"] is True
    claim = volumes[mounts["/store"]["name"]]["persistentVolumeClaim"]["claimName"]
    assert claim == cpu.one("PersistentVolumeClaim")["metadata"]["name"]
    writer, reader = pod["securityContext"], cpu.pod["securityContext"]
    assert reader.items() <= writer.items()  # the servers' user can read its files
    assert container(job)["securityContext"] == cpu.container["securityContext"]
    assert container(job)["image"] == cpu.container["image"]


def test_versions_for_a_bucket_are_staged_on_a_separate_volume(job: dict[str, Any]) -> None:
    (cache,) = (one["value"] for one in container(job)["env"] if one["name"] == "XDG_CACHE_HOME")
    (mount,) = (one for one in container(job)["volumeMounts"] if one["mountPath"] == cache)
    volumes = {one["name"]: one for one in job["template"]["spec"]["volumes"]}
    assert volumes[mount["name"]]["emptyDir"] == {}  # no limit that would evict the pod


def test_publish_accepts_the_arguments_of_the_job(job: dict[str, Any]) -> None:
    """Checks that the command parses its arguments: only the description is missing."""
    done = CliRunner().invoke(app, container(job)["args"])
    assert done.exit_code == 1, done.output
    assert "/description/tables.yaml" in done.stderr
    assert "option" not in done.stderr


def test_failed_pods_are_retried_a_limited_number_of_times(job: dict[str, Any]) -> None:
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert job["backoffLimit"] > 0
    assert job["activeDeadlineSeconds"] > 0


def test_server_service_does_not_select_the_pods_of_jobs(
    job: dict[str, Any], shell: dict[str, Any], cpu: Rendered
) -> None:
    selector = cpu.one("Service", "embedserve")["spec"]["selector"]
    for spec in (job, shell):
        assert not selector.items() <= spec["template"]["metadata"]["labels"].items()


def test_shell_sleeps_with_store_and_checkpoint_mounted(
    job: dict[str, Any], shell: dict[str, Any]
) -> None:
    """Checks the shell, which starts without a description, and ends by itself."""
    ours, theirs = (container(one) for one in (shell, job))
    assert ours["command"] == ["sleep", str(shell["activeDeadlineSeconds"])]
    assert "args" not in ours
    mounts = [one for one in theirs["volumeMounts"] if one["name"] != "description"]
    assert ours["volumeMounts"] == mounts
    volumes = [one for one in job["template"]["spec"]["volumes"] if one["name"] != "description"]
    assert shell["template"]["spec"]["volumes"] == volumes


def test_compact_job_has_the_pod_of_the_publish_job(job: dict[str, Any]) -> None:
    (compact,) = render("compact").manifests
    kubernetes_validate.validate(compact, SCHEMAS, strict=True)
    ours = compact["spec"]["jobTemplate"]["spec"]
    assert container(ours)["image"] == container(job)["image"]
    assert container(ours)["securityContext"] == container(job)["securityContext"]
    mine, theirs = (one["template"]["spec"] for one in (ours, job))
    assert mine["securityContext"] == theirs["securityContext"]
    shared = [one for one in theirs["volumes"] if one["name"] not in ("checkpoint", "description")]
    assert mine["volumes"] == shared


@pytest.mark.parametrize("folder", ["publish", "shell", "compact"])
def test_jobs_for_a_bucket_need_no_claim_for_the_store(folder: str) -> None:
    kustomization = f"resources: [KUBERNETES/{folder}]\ncomponents: [KUBERNETES/publish/s3]\n"
    (job,) = manifests_of(kustomize_text(kustomization))
    kubernetes_validate.validate(job, SCHEMAS, strict=True)
    spec = job["spec"]["jobTemplate"]["spec"] if job["kind"] == "CronJob" else job["spec"]
    names = {one["name"] for one in spec["template"]["spec"]["volumes"]}
    assert "store" not in names
    assert {one["name"] for one in container(spec)["volumeMounts"]} == names


def test_readme_overlay_publishes_to_a_bucket(job: dict[str, Any]) -> None:
    ours = spec_of(Rendered("ours", manifests_of(kustomize_text(readme_yaml("## Publish")))))
    assert container(ours)["image"].startswith("registry.example/embedserve:")
    assert container(ours)["args"][1] == "/checkpoint/step-1000"
    assert container(ours)["args"][3] == "s3://recommendations/embeddings"
    volumes = {one["name"]: one for one in ours["template"]["spec"]["volumes"]}
    names = {one["name"] for one in job["template"]["spec"]["volumes"]}
    assert set(volumes) == names - {"store"}
    assert volumes["checkpoint"]["persistentVolumeClaim"] == {"claimName": "training"}
    assert {one["name"] for one in container(ours)["volumeMounts"]} == set(volumes)


@pytest.mark.parametrize("heading", ["## Publish", "## A shell in the cluster"])
def test_a_checkpoint_in_a_bucket_is_fetched_first(job: dict[str, Any], heading: str) -> None:
    overlay = yaml.safe_load(readme_yaml(heading))
    overlay["patches"] += yaml.safe_load(readme_yaml("### A checkpoint in a bucket"))
    ours = spec_of(Rendered("ours", manifests_of(kustomize_text(yaml.safe_dump(overlay)))))
    (fetch,) = ours["template"]["spec"]["initContainers"]
    assert fetch["image"] == container(ours)["image"]
    assert fetch["securityContext"] == container(job)["securityContext"]
    volumes = {one["name"]: one for one in ours["template"]["spec"]["volumes"]}
    assert volumes["checkpoint"] == {"name": "checkpoint", "emptyDir": {}}


def test_fetch_container_copies_the_whole_checkpoint(tmp_path: Path) -> None:
    (patch,) = yaml.safe_load(readme_yaml("### A checkpoint in a bucket"))
    pod = yaml.safe_load(patch["patch"])["spec"]["template"]["spec"]
    _, *command = pod["initContainers"][0]["command"]
    source, target = pod["initContainers"][0]["args"]
    files = {".metadata": b"meta", "__0_0.distcp": b"rows", "more/a.txt": b"a"}
    for name, content in files.items():
        path = tmp_path / "s3" / source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "checkpoint").mkdir()
    with serve_s3(tmp_path / "s3") as endpoint:
        subprocess.run(
            [sys.executable, *command, source, f"{tmp_path}{target}"],
            env=os.environ | environment(endpoint),
            check=True,
            timeout=120,
        )
    folder = tmp_path / target.lstrip("/")
    found = [one for one in folder.rglob("*") if one.is_file()]
    assert {str(one.relative_to(folder)): one.read_bytes() for one in found} == files


def test_readme_overlay_compacts_in_a_bucket() -> None:
    (compact,) = manifests_of(kustomize_text(readme_yaml("### Compact every night")))
    kubernetes_validate.validate(compact, SCHEMAS, strict=True)
    ours = compact["spec"]["jobTemplate"]["spec"]
    assert container(ours)["image"].startswith("registry.example/embedserve:")
    assert container(ours)["args"] == ["s3://recommendations/embeddings", "dlrm", "5"]
    variables = {one["name"]: one["value"] for one in container(ours)["env"]}
    (key,) = (one for one in container(ours)["volumeMounts"] if one["name"] == "delta-key")
    assert variables["EMBEDSERVE_DELTA_KEY"] == f"{key['mountPath']}/delta.pub"
    names = {one["name"] for one in ours["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container(ours)["volumeMounts"]} == names


@pytest.mark.parametrize("folder", ["publish", "shell", "compact"])
def test_publisher_credentials_override_server_credentials(folder: str, s3: Rendered) -> None:
    (job,) = render(folder).manifests
    spec = job["spec"]["jobTemplate"]["spec"] if job["kind"] == "CronJob" else job["spec"]
    sources = [one["secretRef"]["name"] for one in container(spec)["envFrom"]]
    assert sources == ["embedserve-s3", "embedserve-s3-publisher"]  # the last one wins
    assert "embedserve-s3-publisher" not in str(s3.manifests)
