"""build-image-env.sh builds the wheel and names what each variant needs, outside Docker.

The real run leaves the dependencies out; it takes hatchling from pip's index.
"""

import os
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from .conftest import DEPLOY, ROOT

SCRIPT = DEPLOY / "build-image-env.sh"


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    prefix = tmp_path_factory.mktemp("image") / "env"
    done = run("cpu", prefix, ROOT, WITH_DEPENDENCIES="no")
    assert done.returncode == 0, done.stderr
    (found,) = prefix.glob("lib/python3.*/site-packages/embedserve-*.dist-info")
    return Distribution.at(found)


@pytest.fixture(scope="module")
def files(installed: Distribution) -> set[str]:
    assert installed.files is not None
    return {str(file) for file in installed.files if "__pycache__" not in file.parts}


def source_files(package: Path) -> set[str]:
    found = (path for path in package.rglob("*") if path.is_file())
    kept = (path for path in found if "__pycache__" not in path.parts)
    return {path.relative_to(package.parent).as_posix() for path in kept}


def test_the_wheel_holds_every_file_of_the_packages(
    files: set[str], pyproject: dict[str, Any]
) -> None:
    packages = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    expected = set().union(*(source_files(ROOT / package) for package in packages))
    metadata = {file for file in files if ".dist-info/" in file or file.startswith("..")}
    assert files - metadata == expected


def test_the_wheel_holds_what_is_not_python(files: set[str]) -> None:
    assert {
        "embedserve_proto/embedding.proto",
        "embedserve_store/demo/data/ratings.tsv.gz",
        "embedserve_store/demo/data/movies.tsv.gz",
    } <= files


@pytest.mark.parametrize(
    "package", ["embedserve", "embedserve_store", "embedserve_client", "embedserve_proto"]
)
def test_the_packages_say_that_they_are_typed(files: set[str], package: str) -> None:
    assert {f"{package}/__init__.py", f"{package}/py.typed"} <= files


def test_the_command_is_installed(installed: Distribution, pyproject: dict[str, Any]) -> None:
    scripts = installed.entry_points.select(group="console_scripts")
    assert {script.name: script.value for script in scripts} == pyproject["project"]["scripts"]
    assert installed.version == pyproject["project"]["version"]
    command = Path(str(installed.locate_file(""))).parents[2] / "bin" / "embedserve"
    assert os.access(command, os.X_OK)


def test_the_variants_install_their_extras(tmp_path: Path, pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    (torchrec,) = [need for need in extras["cuda"] if need.startswith("torchrec")]
    cpu = run("--dry-run", "cpu", tmp_path / "env", ROOT).stdout
    assert f"pip install {ROOT}\\[server\\,remote\\,cpu\\]" in cpu
    assert f"pip install --no-deps {torchrec}\n" in cpu.replace(" \n", "\n")
    cuda = run("--dry-run", "cuda", tmp_path / "env", ROOT).stdout
    assert f"pip install {ROOT}\\[server\\,remote\\,cuda\\]" in cuda
    assert "--no-deps" not in cuda


def test_a_dry_run_makes_nothing(tmp_path: Path) -> None:
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
def test_wrong_arguments_are_refused(
    tmp_path: Path, variant: str, prefix: str, source: Path, message: str
) -> None:
    done = run(variant, tmp_path / prefix, source, WITH_DEPENDENCIES="no")
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_missing_argument_is_refused() -> None:
    done = run("cpu")
    assert done.returncode == 2
    assert "got 1 arguments; usage:" in done.stderr


def test_an_unknown_with_dependencies_is_refused(tmp_path: Path) -> None:
    done = run("cpu", tmp_path / "env", ROOT, WITH_DEPENDENCIES="maybe")
    assert done.returncode == 2
    assert 'WITH_DEPENDENCIES is "maybe"' in done.stderr
    assert list(tmp_path.iterdir()) == []
