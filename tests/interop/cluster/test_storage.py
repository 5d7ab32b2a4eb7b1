"""Tests of stores and caches on volumes: published by the Job, read-only, full, or shared."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interop.cluster.host import NODE
from interop.cluster.kubectl import Publish, Start
from interop.cluster.manifests import Manifest, container_of, pod_of
from interop.tools import run_tool
from store.remote.s3_server import environment, serve_s3

pytestmark = pytest.mark.cluster

CREDENTIALS = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
JOB_LOG = ("logs", "job/embedserve-publish", "--tail=-1")
FULL = "64k"
"""Size of a volume, smaller than the tables of the store."""


@pytest.fixture(scope="module")
def bucket(folder: Path, store: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Yields the Secret for the store that the component names, s3://bucket/store."""
    shutil.copytree(store, folder / "s3" / "bucket" / "store")
    with serve_s3(folder / "s3", host=NODE) as endpoint:
        found = environment(endpoint)
        yield {"embedserve-s3": {name: found[name] for name in CREDENTIALS}}


@pytest.fixture
def disk(folder: Path, tmp_path: Path) -> Path:
    """Makes an empty folder of the node that every user may write to."""
    path = folder / tmp_path.name
    path.mkdir()
    path.chmod(0o777)
    return path


def cache_in(path: Path, *, replicas: int = 1, is_read_only: bool = False) -> Callable[..., None]:
    """Returns a change of manifests that puts the cache of pods into one folder of the node."""

    def change(manifests: dict[str, Manifest]) -> None:
        manifests["Deployment"]["spec"]["replicas"] = replicas
        (cache,) = (one for one in pod_of(manifests)["volumes"] if one["name"] == "cache")
        del cache["emptyDir"]
        cache["hostPath"] = {"path": str(path), "type": "Directory"}
        (mount,) = (
            one for one in container_of(manifests)["volumeMounts"] if one["name"] == "cache"
        )
        mount["readOnly"] = is_read_only
        del container_of(manifests)["resources"]["limits"]["ephemeral-storage"]

    return change


def no_pods(manifests: dict[str, Manifest]) -> None:
    manifests["Deployment"]["spec"]["replicas"] = 0


def test_pod_waits_for_the_publishing_job(start: Start, publish: Publish, disk: Path) -> None:
    pod = start("empty", store=disk)
    pod.wait_for_log("waiting")
    pod.wait_for("0/1", "get", "pods")
    publish(pod)
    pod.wait_until_ready(1)
    pod.wait_for("1/1", "get", "job", "embedserve-publish")


def test_publishing_job_names_a_full_volume(start: Start, publish: Publish, disk: Path) -> None:
    run_tool("mount", "-t", "tmpfs", "-o", f"size={FULL},mode=777", "tmpfs", disk)
    namespace = start("full-store", change=no_pods, store=disk)
    publish(namespace)
    namespace.wait_for("/store/shop: the version needs ", *JOB_LOG)
    assert not [path for path in disk.rglob("*") if path.is_file()]


def test_publishing_job_names_a_read_only_volume(
    start: Start, publish: Publish, disk: Path
) -> None:
    run_tool("mount", "--bind", "--options", "ro", disk, disk)
    namespace = start("read-only-store", change=no_pods, store=disk)
    publish(namespace)
    namespace.wait_for("/store/shop: cannot be written", *JOB_LOG)


def test_two_pods_share_one_cache(
    start: Start, bucket: dict[str, dict[str, str]], disk: Path
) -> None:
    pods = start("shared-cache", "s3", change=cache_in(disk, replicas=2), secrets=bucket)
    pods.wait_until_ready(2)


def test_full_cache_is_named_in_the_log(
    start: Start, bucket: dict[str, dict[str, str]], disk: Path
) -> None:
    run_tool("mount", "-t", "tmpfs", "-o", f"size={FULL},mode=777", "tmpfs", disk)
    pod = start("full-cache", "s3", change=cache_in(disk), secrets=bucket)
    assert "/cache/s3-bucket-store-" in pod.wait_for_log("the version needs ")


def test_read_only_cache_is_named_in_the_log(
    start: Start, bucket: dict[str, dict[str, str]], disk: Path
) -> None:
    pod = start("read-only", "s3", change=cache_in(disk, is_read_only=True), secrets=bucket)
    assert "/cache/s3-bucket-store-" in pod.wait_for_log("cannot be written: ")
