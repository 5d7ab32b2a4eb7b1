"""Tests of build-image.sh with stand-ins for its programs: nothing is built."""

import os
import subprocess
from pathlib import Path

import pytest

from embedserve import __version__

from .conftest import DEPLOY


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with an engine and a debootstrap that record their calls."""
    for name, has_image in (("engine", 1), ("debootstrap", 0)):
        program = folder / name
        program.write_text(
            f'#!/bin/sh\necho {name} "$@" >>{folder}/calls\n'
            '[ "$1" != import ] || cat >/dev/null\n'
            f'[ "$1" != image ] || exit {has_image}\n'
            f'for made; do case $made in /*/tmp.*) mkdir -p "$made/etc";; esac; done\n'
        )
        program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        [DEPLOY / "build-image.sh", *arguments],
        env={**os.environ, "PATH": path, "ENGINE": "engine", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_build_uses_the_base_image_of_the_dockerfile(tmp_path: Path, variant: str) -> None:
    done = run(tmp_path, "--network", "host", VARIANT=variant)
    assert done.returncode == 0, done.stderr
    tag = f"localhost/embedserve:{__version__}-{variant}"
    assert calls(tmp_path) == [
        f"engine build --file deploy/Dockerfile --build-arg VARIANT={variant} "
        f"--tag {tag} --network host ."
    ]


def test_base_image_and_image_name_can_be_overridden(tmp_path: Path) -> None:
    run(tmp_path, BASE="mirror/python:3.11", IMAGE="mine:1", VARIANT="cuda")
    (call,) = calls(tmp_path)
    assert "--build-arg CUDA_IMAGE=mirror/python:3.11 --tag mine:1 ." in call


def test_debootstrap_base_is_built_from_debian_packages(tmp_path: Path) -> None:
    done = run(tmp_path, BASE="debootstrap", MIRROR="http://mirror")
    assert done.returncode == 0, done.stderr
    inspected, bootstrapped, imported, built = calls(tmp_path)
    base = "localhost/embedserve-base:bookworm"
    assert inspected == f"engine image inspect {base}"
    assert bootstrapped.startswith("debootstrap --variant=minbase --include=python3,python3-venv,")
    assert bootstrapped.endswith(" http://mirror")
    assert imported.startswith("engine import --change ENV PATH=")  # preStop calls sleep
    assert imported.endswith(f" - {base}")
    assert f"--build-arg CPU_IMAGE={base} " in built
