"""Renders the kustomizations for the tests and reads what they are compared with.

It needs kubectl (deploy/install-debian-packages.sh) and never talks to a cluster.
"""

import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


@dataclass(frozen=True)
class Rendered:
    """The manifests that one kustomization renders to."""

    name: str
    manifests: list[dict[str, Any]]

    def one(self, kind: str, name: str = "") -> dict[str, Any]:
        """The one of that kind, or of these the one of that name."""
        found: dict[str, Any]
        (found,) = [
            manifest
            for manifest in self.manifests
            if manifest["kind"] == kind and name in ("", manifest["metadata"]["name"])
        ]
        return found

    @property
    def pod(self) -> dict[str, Any]:
        pod: dict[str, Any] = self.one("Deployment")["spec"]["template"]["spec"]
        return pod

    @property
    def container(self) -> dict[str, Any]:
        container: dict[str, Any]
        (container,) = self.pod["containers"]
        return container


def render(name: str) -> Rendered:
    if shutil.which("kubectl") is None:
        pytest.fail("kubectl is missing: run deploy/install-debian-packages.sh", pytrace=False)
    folder = DEPLOY / "kubernetes" / name
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return Rendered(name, list(yaml.safe_load_all(done.stdout)))


@pytest.fixture(scope="session")
def cpu() -> Rendered:
    return render("overlays/cpu")


@pytest.fixture(scope="session")
def gpu() -> Rendered:
    return render("overlays/gpu")


@pytest.fixture(scope="session")
def s3() -> Rendered:
    return render("overlays/s3")


@pytest.fixture(scope="session")
def tls() -> Rendered:
    return render("overlays/tls")


@pytest.fixture(scope="session")
def mtls() -> Rendered:
    return render("overlays/mtls")


@pytest.fixture(scope="session")
def kserve() -> Rendered:
    return render("overlays/kserve")


@pytest.fixture(scope="session")
def publish() -> Rendered:
    return render("publish")


@pytest.fixture(params=["cpu", "gpu", "s3", "tls", "mtls"])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    found: Rendered = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def dockerfile() -> list[list[str]]:
    """The Dockerfile's instructions, each as its words: [["FROM", "image"], …]."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", text)
    return [line.split() for line in joined.splitlines() if line.strip()]
