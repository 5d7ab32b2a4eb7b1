"""Renders the kustomizations for the tests, and reads the files to compare them with.

Needs kubectl (deploy/install-debian-packages.sh), and never talks to a cluster.
"""

import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
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
SHUFFLED = tuple(
    tuple(random.Random(seed).sample(COMPONENTS, len(COMPONENTS))) for seed in range(5)
)
ORDERS = (*COMBINATIONS, *((second, first) for first, second in PAIRS), *SHUFFLED)
"""Components of overlays that are rendered together, in their order."""
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
    # Go's default collects garbage more often, which takes a quarter of the CPU time.
    environment = os.environ | {"GOGC": "400"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def write_kustomization(folder: Path, text: str, files: Mapping[str, str]) -> None:
    """Writes a kustomization whose text names deploy/kubernetes as ``KUBERNETES``."""
    ours = os.path.relpath(KUBERNETES, folder)
    (folder / "kustomization.yaml").write_text(text.replace("KUBERNETES", ours))
    for file, content in files.items():
        (folder / file).write_text(content)


def kustomize_text(text: str, files: Mapping[str, str] = MappingProxyType({})) -> str:
    """Renders the text of a kustomization, with ``files`` next to it.

    The text names deploy/kubernetes as ``KUBERNETES``.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        write_kustomization(folder, text, files)
        return kustomize(folder)


def render_together(
    kustomizations: Sequence[str], files: Sequence[Mapping[str, str]]
) -> list[list[dict[str, Any]]]:
    """Renders kustomizations, given as to ``kustomize_text``, in one process.

    A process for each takes three times as long. Each kustomization gets a namespace, which keeps
    manifests of the same name apart, and is removed from the result.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for number, (text, own_files) in enumerate(zip(kustomizations, files, strict=True)):
            (folder / str(number)).mkdir()
            write_kustomization(folder / str(number), f"{text}\nnamespace: n{number}\n", own_files)
        numbers = [str(number) for number in range(len(kustomizations))]
        (folder / "kustomization.yaml").write_text(yaml.safe_dump({"resources": numbers}))
        rendered: list[list[dict[str, Any]]] = [[] for _ in numbers]
        for manifest in manifests_of(kustomize(folder)):
            rendered[int(manifest["metadata"].pop("namespace")[1:])].append(manifest)
    return rendered


def manifests_of(text: str) -> list[dict[str, Any]]:
    return list(yaml.load_all(text, yaml.CSafeLoader))


@cache
def render(name: str) -> Rendered:
    return Rendered(name, manifests_of(kustomize(KUBERNETES / name)))


def readme_yaml(heading: str) -> str:
    """Returns the first YAML under a heading of the README, with ``KUBERNETES`` in paths."""
    _, _, page = (DEPLOY / "README.md").read_text().partition(f"\n{heading}\n")
    text = textwrap.dedent(page.partition("```yaml\n")[2].partition("```")[0])
    return text.replace("../embedserve/deploy/kubernetes", "KUBERNETES")


def kustomization_of(components: Sequence[str], *resources: str) -> str:
    """Returns the text of a kustomization with ``components``, in that order."""
    return yaml.safe_dump(
        {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": list(resources),
            "components": [f"KUBERNETES/components/{name}" for name in components],
        }
    )


def overlay_name(components: Sequence[str]) -> str:
    return "+".join(components) or "base"


@pytest.fixture(scope="session")
def compose(made_once: MadeOnce) -> Compose:
    """Returns a function: ``compose("tls", "s3")`` is the base with components, in that order.

    Each is rendered once for all processes.
    """

    def write(folder: Path, orders: Sequence[tuple[str, ...]]) -> None:
        texts = [kustomization_of(order, "KUBERNETES/base") for order in orders]
        for order, manifests in zip(orders, render_together(texts, [{}] * len(texts)), strict=True):
            (folder / f"{overlay_name(order)}.json").write_text(json.dumps(manifests))

    def composed(*components: str) -> Rendered:
        name = overlay_name(components)
        orders = ORDERS if components in ORDERS else (components,)
        made = "rendered" if components in ORDERS else f"rendered-{name}"
        folder = made_once(made, lambda folder: write(folder, orders))
        manifests = json.loads((folder / f"{name}.json").read_text())
        return Rendered(name, manifests, components)

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
