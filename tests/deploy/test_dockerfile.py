"""Tests of the Dockerfile: it matches the tree, the project's metadata and the Deployment."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from embedserve.commands.cli import app

from .conftest import DEPLOY, ROOT, Rendered

Instructions = list[list[str]]


def arguments(dockerfile: Instructions, name: str) -> list[list[str]]:
    return [line[1:] for line in dockerfile if line[0] == name]


def sources(dockerfile: Instructions) -> list[str]:
    """Returns the paths that COPY takes from the tree, not from another stage."""
    copies = [words for words in arguments(dockerfile, "COPY") if words[0][:2] != "--"]
    return [source for words in copies for source in words[:-1]]


def runtime(dockerfile: Instructions) -> Instructions:
    start = dockerfile.index(["FROM", "base-${VARIANT}", "AS", "runtime"])
    return dockerfile[start:]


def test_base_images_are_pinned_by_release_and_digest(dockerfile: Instructions) -> None:
    defaults = dict(
        words[0].split("=", 1) for words in arguments(dockerfile, "ARG") if "=" in words[0]
    )
    images = [value for name, value in defaults.items() if name.endswith("_IMAGE")]
    assert len(images) == 2
    for image in images:
        assert re.search(r":\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}$", image), image
    assert "latest" not in json.dumps(dockerfile)


def test_every_variant_of_the_script_has_a_base_stage(
    dockerfile: Instructions, tmp_path: Path
) -> None:
    stages = {words[2]: words[0] for words in arguments(dockerfile, "FROM")}
    assert stages == {
        "base-cpu": "${CPU_IMAGE}",
        "base-cuda": "${CUDA_IMAGE}",
        "build": "base-${VARIANT}",
        "sbom": "scratch",
        "runtime": "base-${VARIANT}",
    }
    for stage in ("base-cpu", "base-cuda"):
        script, env = DEPLOY / "build-image-env.sh", tmp_path / "env"
        command = [str(script), "--dry-run", stage[5:], str(env), str(ROOT)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)


def test_image_build_runs_the_tested_script(dockerfile: Instructions) -> None:
    (mount, *words), *_ = arguments(dockerfile, "RUN")
    assert mount.startswith("--mount=type=cache")
    assert words == ["deploy/build-image-env.sh", '"$VARIANT"', "/opt/embedserve", "/source"]
    assert ["--from=build", "/opt/embedserve", "/opt/embedserve"] in arguments(dockerfile, "COPY")


def test_copied_sources_exist_and_are_not_docker_ignored(dockerfile: Instructions) -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in ignore
    for source in sources(dockerfile):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore, source


def test_all_sources_of_the_wheels_are_copied(
    dockerfile: Instructions, pyproject: dict[str, Any]
) -> None:
    project = pyproject["project"]
    packages = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    required = {"pyproject.toml", "hatch_build.py", project["readme"], *project["license-files"]}
    required |= {"clients", "proto", *(package.split("/")[0] for package in packages)}
    assert required <= set(sources(dockerfile))


def test_image_user_equals_the_user_of_the_deployment(
    dockerfile: Instructions, cpu: Rendered
) -> None:
    (user,) = arguments(runtime(dockerfile), "USER")
    security = cpu.pod["securityContext"]
    assert user == [f"{security['runAsUser']}:{security['runAsGroup']}"]
    assert security["runAsUser"] > 0
    (useradd,) = [words for words in arguments(dockerfile, "RUN") if words[0] == "useradd"]
    assert useradd[useradd.index("--uid") + 1] == str(security["runAsUser"])


def test_image_command_equals_the_command_of_the_deployment(
    dockerfile: Instructions, cpu: Rendered, pyproject: dict[str, Any]
) -> None:
    (entrypoint,) = arguments(dockerfile, "ENTRYPOINT")
    (command,) = arguments(dockerfile, "CMD")
    assert json.loads(" ".join(entrypoint)) == list(pyproject["project"]["scripts"])
    assert json.loads(" ".join(command)) == [*cpu.container["args"], "/store"]


def test_healthcheck_runs_an_existing_embedserve_command(dockerfile: Instructions) -> None:
    (check,) = arguments(runtime(dockerfile), "HEALTHCHECK")
    program, command = json.loads(" ".join(check[check.index("CMD") + 1 :]))
    assert program == "embedserve"
    assert CliRunner().invoke(app, [command, "--help"]).exit_code == 0


def test_sbom_is_copied_from_the_build_environment(dockerfile: Instructions) -> None:
    script = (DEPLOY / "build-image-env.sh").read_text()
    assert ["--from=build", "/opt/embedserve/sbom.cdx.json", "/"] in arguments(dockerfile, "COPY")
    assert '"$prefix/sbom.cdx.json"' in script


def test_exposed_ports_equal_the_ports_of_the_deployment(
    dockerfile: Instructions, cpu: Rendered
) -> None:
    (exposed,) = arguments(dockerfile, "EXPOSE")
    assert exposed == [str(port["containerPort"]) for port in cpu.container["ports"]]
