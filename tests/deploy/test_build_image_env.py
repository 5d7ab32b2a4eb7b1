"""Tests of build-image-env.sh, which builds the wheel and installs the locks' packages.

The real run omits the dependencies, and gets hatchling and cyclonedx-py from pip's index. With all
dependencies it takes minutes: -m soak.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import httpx
import pytest
from delta_keys import key_pair
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from running_servers import free_port
from store.remote.s3_server import environment, serve_s3

from embedserve import __version__

from .conftest import DEPLOY, ROOT

SCRIPT = DEPLOY / "build-image-env.sh"
LOCKS = DEPLOY / "locks"
NOT_IN_THE_IMAGE = {"cpu", "cuda", "ray"}
"""Extras of one variant, and of clusters that start shards on their own nodes.

All others are in the image, because a pod with a setting that needs one cannot install it."""
BUILD_S_MAX = 1200
WHOLE_S_MAX = 1800


def run(
    *arguments: str | Path, timeout_s: float = BUILD_S_MAX, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the environment's packages. It is made by a Python without pip, as
    Debian's is."""
    folder = tmp_path_factory.mktemp("image")
    prefix, debian = folder / "env", folder / "python"
    venv.create(debian, with_pip=False)
    python = str(debian / "bin/python")
    done = run("cpu", prefix, ROOT, WITH_DEPENDENCIES="no", PYTHON=python)
    assert done.returncode == 0, done.stderr
    (site,) = prefix.glob("lib/python3.*/site-packages")
    return site


@pytest.fixture(scope="module")
def installed(site: Path) -> Distribution:
    (found,) = site.glob("embedserve-*.dist-info")
    return Distribution.at(found)


@pytest.mark.parametrize(
    "package", ["embedserve", "embedserve_store", "embedserve_client", "embedserve_proto"]
)
def test_the_packages_are_installed(site: Path, package: str) -> None:
    """Checks a file of each package; test_distributions.py checks the contents of each wheel."""
    assert (site / package / "py.typed").is_file()


def test_sbom_lists_embedserve_packages_and_not_pip(site: Path) -> None:
    prefix = site.parents[2]
    listed = json.loads((prefix / "sbom.cdx.json").read_text())
    assert listed["bomFormat"] == "CycloneDX"
    purls = {one["purl"] for one in listed["components"]}
    assert {
        f"pkg:pypi/{name}@{__version__}" for name in ("embedserve", "embedserve-client")
    } <= purls
    assert not any(purl.startswith("pkg:pypi/pip@") for purl in purls)
    assert not (site / "pip").exists()


def test_the_command_is_installed(
    installed: Distribution, site: Path, pyproject: dict[str, Any]
) -> None:
    scripts = installed.entry_points.select(group="console_scripts")
    assert {script.name: script.value for script in scripts} == pyproject["project"]["scripts"]
    assert installed.version == __version__
    command = site.parents[2] / "bin" / "embedserve"
    assert os.access(command, os.X_OK)


def pinned(lock: str) -> dict[str, str]:
    """Returns the versions by package; every package must have a hash."""
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=\w)", (LOCKS / f"{lock}.txt").read_text())[1:]:
        name, version = entry.split()[0].split("==")
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), name
        found[canonicalize_name(name)] = version
    return found


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_locks_satisfy_the_requirements_of_the_project(
    variant: str, pyproject: dict[str, Any]
) -> None:
    """Fails if a pyproject.toml has changed without ``make lock``."""
    extras = pyproject["project"]["optional-dependencies"]
    versions = pinned(variant)
    server = pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]["dependencies"]
    client = tomllib.loads((ROOT / "clients/pyproject.toml").read_text())["project"]["dependencies"]
    requirements = [*server, *client, *extras[variant]]
    for name in extras.keys() - NOT_IN_THE_IMAGE:
        requirements += extras[name]
    for line in requirements:
        need = Requirement(line)
        assert need.specifier.contains(versions[canonicalize_name(need.name)]), line
    assert versions["torchrec"] == "1.8.0"
    assert versions["torch"].endswith("+cpu") == (variant == "cpu")
    assert ("fbgemm-gpu" in versions) == (variant == "cuda")


def test_locks_contain_no_url_or_index() -> None:
    for lock in LOCKS.glob("*.txt"):
        assert "//" not in lock.read_text()
        assert "index" not in lock.read_text()


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_each_variant_installs_its_lock(variant: str, tmp_path: Path) -> None:
    steps = run("--dry-run", variant, tmp_path / "env", ROOT).stdout
    assert f"pip install --no-deps --require-hashes --requirement {LOCKS}/{variant}.txt" in steps
    assert f"--require-hashes --requirement {LOCKS}/build.txt" in steps
    assert "cyclonedx-py environment" in steps


def test_dry_run_creates_no_files(tmp_path: Path) -> None:
    done = run("--dry-run", "cpu", tmp_path / "env", ROOT)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variant", "prefix", "source", "message"),
    [
        ("rocm", "new", ROOT, 'VARIANT is "rocm"'),
        ("cpu", ".", ROOT, "exists"),
        ("cpu", "new", DEPLOY, "holds no pyproject.toml"),
    ],
)
def test_invalid_arguments_are_rejected(
    tmp_path: Path, variant: str, prefix: str, source: Path, message: str
) -> None:
    done = run(variant, tmp_path / prefix, source, WITH_DEPENDENCIES="no")
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_missing_argument_is_rejected() -> None:
    done = run("cpu")
    assert done.returncode == 2
    assert "got 1 arguments; usage:" in done.stderr


def test_invalid_with_dependencies_value_is_rejected(tmp_path: Path) -> None:
    done = run("cpu", tmp_path / "env", ROOT, WITH_DEPENDENCIES="maybe")
    assert done.returncode == 2
    assert 'WITH_DEPENDENCIES is "maybe"' in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_the_whole_environment_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks all packages of the lock, without the files that slim removes."""
    prefix = tmp_path / "env"
    done = run("cpu", prefix, ROOT, timeout_s=WHOLE_S_MAX)
    assert done.returncode == 0, done.stderr
    nbytes = sum(path.lstat().st_size for path in prefix.rglob("*"))
    assert nbytes < 0.95e9, nbytes
    listed = json.loads((prefix / "sbom.cdx.json").read_text())
    versions = {canonicalize_name(one["name"]): one["version"] for one in listed["components"]}
    assert pinned("cpu").items() <= versions.items()

    serve_demo(prefix, tmp_path / "demo")
    serve_signed_deltas_from_s3(prefix, tmp_path, monkeypatch)


def embedserve(prefix: Path, *words: object) -> None:
    command = [str(prefix / "bin" / "embedserve"), *map(str, words)]
    subprocess.run(command, check=True, timeout=WHOLE_S_MAX)


@contextmanager
def serving(prefix: Path, *words: object) -> Iterator[int]:
    """Runs `embedserve serve …` of the environment, and yields its HTTP port once it is ready."""
    port = free_port()
    ports = ("--http-port", str(port), "--grpc-port", "0")
    health = ("health", "--ready", "--http-port", str(port))
    command = [str(prefix / "bin" / "embedserve"), "serve", *map(str, words), *ports]
    with subprocess.Popen(command) as server:
        try:
            while subprocess.run([command[0], *health], timeout=WHOLE_S_MAX).returncode:
                assert server.poll() is None
            yield port
        finally:
            server.terminate()
        assert server.wait(60) == 0


def serve_demo(prefix: Path, store: Path) -> None:
    embedserve(prefix, "demo", store)
    with serving(prefix, store):
        pass


PUSH = """
import sys
import numpy as np, torch
from embedserve_store import DeltaWriter, TableSpec, publish

store, key = sys.argv[1:]
tables = [TableSpec("user", 7, 4, ("user",), "sum", "float32")]
state = {"embedding_bags.user.weight": torch.zeros(7, 4)}
publish(state, store, model="dlrm", tables=tables)
with DeltaWriter(store, model="dlrm", key=key) as writer:
    for value in (7.0, 8.0):
        writer.push_rows({"user": ([1], np.full((1, 4), value, np.float32))})
"""


def serve_signed_deltas_from_s3(
    prefix: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, store = key_pair(folder), folder / "store"
    push = [str(prefix / "bin" / "python"), "-c", PUSH, str(store), str(key.private)]
    subprocess.run(push, check=True, timeout=WHOLE_S_MAX)
    embedserve(prefix, "deltas", "compact", store, "dlrm", "--seq", 1, "--key", key.public)
    (folder / "s3" / "bucket").mkdir(parents=True)
    with serve_s3(folder / "s3") as endpoint:
        for name, value in environment(endpoint).items():
            monkeypatch.setenv(name, value)
        url = "s3://bucket/store"
        embedserve(prefix, "copy", store, url, "dlrm")
        deltas = ("--deltas", "follow", "--delta-key", key.public, "--cache", folder / "cache")
        with serving(prefix, url, "--model", "dlrm@2", *deltas) as port:
            request = {"features": {"user": [[1]]}, "min_seq": 2}
            response = httpx.post(f"http://127.0.0.1:{port}/embed", json=request, timeout=60)
    assert response.json()["values"] == [[8.0] * 4]
