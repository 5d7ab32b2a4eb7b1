"""Fixtures of the tests on a Kubernetes node: the node, and what the tests start on it."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from interop.cluster.host import prepare
from interop.cluster.images import save_images
from interop.cluster.kubectl import Kubectl, Namespaced, Publish, Start
from interop.cluster.manifests import Manifest, persistent_volume, publishing_job, render, secret
from interop.cluster.node import running_node
from interop.lookups import MODEL
from interop.pods import has_way_out

from embedserve_proto import __version__

IMAGE = f"localhost/embedserve:{__version__}-cpu"
FAULT_KINDS = ("ConfigMap", "PersistentVolumeClaim", "Deployment")
"""Kinds of objects that a test of a fault applies; they make one pod."""


@pytest.fixture(scope="session")
def folder() -> Path:
    """Returns a folder that is removed with the namespaces of in_namespace.sh."""
    if has_way_out():
        pytest.fail("packets could leave this host: run make cluster-test", pytrace=False)
    return Path(os.environ["NAMESPACE_FOLDER"])


@pytest.fixture(scope="session")
def volume(folder: Path, store: Path) -> Path:
    """Makes a folder of the node with the store."""
    return readable_copy(store, folder / "store")


def readable_copy(source: Path, target: Path) -> Path:
    """Copies a folder, readable by the image's user, and returns ``target``."""
    shutil.copytree(source, target)
    for one in (target, *target.rglob("*")):
        one.chmod(0o755 if one.is_dir() else 0o644)
    return target


@pytest.fixture(scope="session")
def publish(kubectl: Kubectl, folder: Path, store: Path) -> Publish:
    """Returns a function that starts a Job, which publishes the checkpoint of ``store``."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for name in ("model.safetensors", "tables.yaml"):
        shutil.copyfile(store.parent / name, checkpoint / name)

    def start(namespace: Namespaced) -> None:
        kubectl.apply(publishing_job(namespace.name, checkpoint, IMAGE, MODEL))

    return start


@pytest.fixture(scope="session")
def kubectl(folder: Path) -> Iterator[Kubectl]:
    begin = time.monotonic()
    archive, node = folder / "images.tar", folder / "node"
    node.mkdir()
    save_images(archive, IMAGE)
    prepare(folder / "sysctls")
    with running_node(node, archive) as kubectl:
        print(f"\nthe node is Ready after {time.monotonic() - begin:.0f} s", end=" ")
        yield kubectl


@pytest.fixture
def start(kubectl: Kubectl, volume: Path, tmp_path: Path) -> Iterator[Start]:
    """Returns a function that starts one pod in a namespace, which is deleted after the test."""
    with ExitStack() as ends:

        def start(
            name: str,
            *components: str,
            change: Callable[[dict[str, Manifest]], None] | None = None,
            secrets: dict[str, dict[str, str]] | None = None,
            store: Path = volume,
        ) -> Namespaced:
            """Starts overlays/cpu with ``components``.

            Args:
                change: changes the manifests in place.
                secrets: files by the name of their Secret.
                store: another folder of the node for the claim.
            """
            manifests = render(tmp_path, name, *components)
            if change is not None:
                change(manifests)
            kubectl.apply(manifests["Namespace"], persistent_volume(name, store))
            ends.callback(kubectl.try_run, "delete", "namespace", name, "--wait=false")
            files = [secret(name, *one) for one in (secrets or {}).items()]
            kubectl.apply(*files, *(manifests[one] for one in FAULT_KINDS if one in manifests))
            return kubectl.in_namespace(name)

        yield start
