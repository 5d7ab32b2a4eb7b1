"""Tests of the wheels and sdists of `make dist`: reproducible, complete, and installable alone.

The build tools and the dependencies come from pip's index, without PyTorch and TorchRec.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib.metadata import Distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from embedserve import __version__

from .conftest import DEPLOY, ROOT

RUN_S_MAX = 600
SOURCES = ("server", "model_store", "clients", "proto", "deploy")
FILES = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore")
PACKAGES = {
    "embedserve": ("server/embedserve", "model_store/embedserve_store"),
    "embedserve_client": ("clients/embedserve_client", "proto/embedserve_proto"),
}
"""Packages of each distribution."""


def build(tree: Path, folder: Path) -> dict[str, bytes]:
    """Returns the built files by name."""
    done = subprocess.run(
        [tree / DEPLOY.relative_to(ROOT) / "build-dist.sh", folder],
        env={**os.environ, "PYTHON": sys.executable, "SOURCE_DATE_EPOCH": "1750000000"},
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("PASSED") == 4  # by twine check
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder)
    return folder


def test_builds_of_equal_source_trees_are_byte_identical(folder: Path, tmp_path: Path) -> None:
    tree = tmp_path / "elsewhere"
    caches = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=caches, copy_function=shutil.copy)
    for name in FILES:
        shutil.copy(ROOT / name, tree / name)
    (tree / "README.md").chmod(0o600)
    built = build(tree, tmp_path / "dist")
    assert built.keys() == {path.name for path in folder.iterdir()}
    for name, content in built.items():
        assert content == (folder / name).read_bytes(), name


def source_files(package: str) -> set[str]:
    root = (ROOT / package).parent
    found = (path for path in (ROOT / package).rglob("*") if path.is_file())
    return {str(one.relative_to(root)) for one in found if "__pycache__" not in one.parts}


@pytest.mark.parametrize("name", PACKAGES)
def test_wheel_contains_exactly_the_files_of_its_packages(folder: Path, name: str) -> None:
    (wheel,) = folder.glob(f"{name}-{__version__}-py3-none-any.whl")
    files = {file for file in ZipFile(wheel).namelist() if ".dist-info/" not in file}
    assert files == set().union(*(source_files(package) for package in PACKAGES[name]))
    for package in PACKAGES[name]:
        assert f"{Path(package).name}/py.typed" in files


@pytest.mark.parametrize("name", PACKAGES)
def test_sdist_contains_license_and_build_files(folder: Path, name: str) -> None:
    """Checks files; build-dist.sh builds each wheel from its sdist alone."""
    with tarfile.open(folder / f"{name}-{__version__}.tar.gz") as archive:
        files = {file.name.partition("/")[2] for file in archive.getmembers() if file.isfile()}
    assert {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml", "hatch_build.py"} <= files


def test_server_and_client_have_the_same_license() -> None:
    """Checks copies, since a link would lead out of the client's sdist."""
    assert (ROOT / "clients/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def install(name: str, prefix: Path, folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(prefix / "bin" / "python"), "install"]
    options = ["--quiet", "--no-compile", "--find-links", str(folder)]
    done = subprocess.run([*pip, *options, name], capture_output=True, text=True, timeout=RUN_S_MAX)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def client_prefix(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("env")
    venv.create(prefix)
    install("embedserve-client", prefix, folder)
    return prefix


@pytest.fixture(scope="module", params=PACKAGES)
def installed(
    request: pytest.FixtureRequest,
    folder: Path,
    client_prefix: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path]:
    """Returns the name of a distribution, and an environment with only it and its dependencies.

    The server's starts as a copy of the client's, since the server requires the client.
    """
    name = canonicalize_name(request.param)
    if name == "embedserve-client":
        return name, client_prefix
    prefix = tmp_path_factory.mktemp("env") / "copy"
    shutil.copytree(client_prefix, prefix, symlinks=True)
    install(name, prefix, folder)
    return name, prefix


def test_installation_has_no_torch_and_fastapi_only_for_the_server(
    installed: tuple[str, Path],
) -> None:
    name, prefix = installed
    (site,) = prefix.glob("lib/python3.*/site-packages")
    distributions = Distribution.discover(path=[str(site)])
    found = {canonicalize_name(one.metadata["Name"]) for one in distributions}
    assert not found & {"torch", "torchrec", "fbgemm-gpu", "pytest"}
    assert ("fastapi" in found) == (name == "embedserve")
    assert "embedserve-client" in found


def test_installed_packages_import_and_commands_run(
    installed: tuple[str, Path], tmp_path: Path
) -> None:
    name, prefix = installed

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        bare = {one: text for one, text in os.environ.items() if not one.startswith("PYTHON")}
        return subprocess.run(
            [str(prefix / "bin" / words[0]), *words[1:]],
            cwd=tmp_path,
            env=bare,
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
        )

    code = "import embedserve_client, embedserve_proto.embedding_pb2_grpc"
    assert run("python", "-c", code).returncode == 0
    command = prefix / "bin" / "embedserve"
    assert command.exists() == (name == "embedserve")
    if name == "embedserve":
        assert run("embedserve", "--help").returncode == 0
        assert run("embedserve", "--version").stdout.startswith(
            f"embedserve {__version__}\nPython 3."
        )
        result = run("embedserve", "serve", "store")
        assert result.stderr.startswith("embedserve: torch is not installed: on a CPU pip install")
        result = run("embedserve", "inspect", "s3://bucket/store")
        (line,) = result.stderr.splitlines()
        assert "pip install 'embedserve[remote]'" in line


def test_the_server_requires_the_client_of_its_version(folder: Path) -> None:
    with ZipFile(folder / f"embedserve-{__version__}-py3-none-any.whl") as wheel:
        metadata = wheel.read(f"embedserve-{__version__}.dist-info/METADATA").decode()
    needs = [line[15:] for line in metadata.splitlines() if line.startswith("Requires-Dist: ")]
    assert f"embedserve-client=={__version__}" in needs
    plain = {Requirement(need).name for need in needs if "extra ==" not in need}
    assert not plain & {"torch", "torchrec", "fbgemm-gpu"}
