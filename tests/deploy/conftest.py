"""Renders the kustomizations for the tests, and reads the files to compare them with.

Needs kubectl (deploy/install-debian-packages.sh), and never talks to a cluster.
"""

import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any

import kubernetes_validate.utils
import pytest
import yaml
from typer.main import get_command

from embedserve.commands.cli import app
from embedserve.config import ServeSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
COMPONENTS = (
    *("tls", "mtls", "tokens", "s3"),
    *("monitoring", "gpu", "management-port", "shared-memory"),
)
"""Components that an overlay may list, in any order."""
PAIRS = tuple(combinations(COMPONENTS, 2))
COMBINATIONS = ((), *((name,) for name in COMPONENTS), *PAIRS, COMPONENTS)
COMMAND = get_command(app)
# Otherwise it reads its schemas for each manifest.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


@dataclass(frozen=True)
class Rendered:
    """The manifests that a kustomization renders to, and the components that it lists."""

    name: str
    manifests: list[dict[str, Any]]
    components: tuple[str, ...] = ()

    def named(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """Returns all manifests of that kind, or only those of that name."""
        return [
            manifest
            for manifest in self.manifests
            if manifest["kind"] == kind and name in ("", manifest["metadata"]["name"])
        ]

    def one(self, kind: str, name: str = "") -> dict[str, Any]:
        """Returns the only manifest of that kind, or of that kind and name."""
        (found,) = self.named(kind, name)
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

    @property
    def variables(self) -> dict[str, str]:
        """Returns the container's EMBEDSERVE_* variables: the ConfigMap's, then its own.

        The container's own variables win.
        """
        data: dict[str, str] = self.one("ConfigMap")["data"]
        return data | {one["name"]: one["value"] for one in self.container.get("env", [])}

    @cached_property
    def settings(self) -> ServeSettings:
        """Returns the settings that `embedserve serve` reads from the container."""
        served: list[ServeSettings] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("embedserve.processes.serve.serve", served.append)
            # The real check reads the metadata of all installed packages.
            patch.setattr("embedserve.commands.server_commands.check_engine", lambda: None)
            for name, value in self.variables.items():
                patch.setenv(name, value)
            COMMAND.main(self.container["args"], standalone_mode=False)
        (settings,) = served
        return settings

    @property
    def is_reachable(self) -> bool:
        """Returns whether other pods reach the server's ports."""
        return "shared-memory" not in self.components


MadeOnce = Callable[[str, Callable[[Path], None]], Path]
Compose = Callable[..., Rendered]


def kustomize(folder: Path) -> str:
    """Renders a kustomization to YAML; kubectl must not print a warning."""
    if shutil.which("kubectl") is None:
        pytest.fail("kubectl is missing: run deploy/install-debian-packages.sh", pytrace=False)
    command = ["kubectl", "kustomize", str(folder)]
    # kubectl ends before garbage matters; collecting it takes a quarter of the CPU time.
    environment = os.environ | {"GOGC": "off"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def kustomize_text(text: str, files: Mapping[str, str] = MappingProxyType({})) -> str:
    """Renders the text of a kustomization, with ``files`` next to it.

    The text names deploy/kubernetes as ``KUBERNETES``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        ours = os.path.relpath(KUBERNETES, folder)
        (folder / "kustomization.yaml").write_text(text.replace("KUBERNETES", ours))
        for file, content in files.items():
            (folder / file).write_text(content)
        return kustomize(folder)


def manifests_of(text: str) -> list[dict[str, Any]]:
    return list(yaml.load_all(text, yaml.CSafeLoader))


@cache
def render(name: str) -> Rendered:
    return Rendered(name, manifests_of(kustomize(KUBERNETES / name)))


@pytest.fixture(scope="session")
def compose(made_once: MadeOnce) -> Compose:
    """Returns a function: ``compose("tls", "s3")`` is the base with components, in that order.

    Each is rendered once for all processes.
    """

    def write(folder: Path, components: tuple[str, ...]) -> None:
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["KUBERNETES/base"],
            "components": [f"KUBERNETES/components/{name}" for name in components],
        }
        (folder / "all.yaml").write_text(kustomize_text(yaml.safe_dump(kustomization)))

    def composed(*components: str) -> Rendered:
        name = "+".join(components) or "base"
        folder = made_once(f"rendered-{name}", lambda folder: write(folder, components))
        return Rendered(name, manifests_of((folder / "all.yaml").read_text()), components)

    return cache(composed)


@pytest.fixture(scope="session")
def cpu() -> Rendered:
    return render("overlays/cpu")


@pytest.fixture(scope="session")
def gpu(compose: Compose) -> Rendered:
    return compose("gpu")


@pytest.fixture(scope="session")
def s3(compose: Compose) -> Rendered:
    return compose("s3")


@pytest.fixture(scope="session")
def tls(compose: Compose) -> Rendered:
    return compose("tls")


@pytest.fixture(scope="session")
def mtls(compose: Compose) -> Rendered:
    return compose("mtls")


@pytest.fixture(scope="session")
def kserve() -> Rendered:
    return render("overlays/kserve")


@pytest.fixture(scope="session")
def publish() -> Rendered:
    return render("publish")


@pytest.fixture(params=COMBINATIONS, ids=lambda names: "+".join(names) or "base")
def rendered(request: pytest.FixtureRequest, compose: Compose) -> Rendered:
    """Returns the base with no component, each one, each pair, and all of them."""
    return compose(*request.param)


@pytest.fixture(scope="session")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="session")
def dockerfile() -> list[list[str]]:
    """Returns the Dockerfile's instructions, each as its words: [["FROM", "image"], …]."""
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n", " ", text)
    return [line.split() for line in joined.splitlines() if line.strip()]
