"""`embedserve plan --kubernetes`: a pod's requests and limits, out of a model's bytes."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from documents import ROOT
from typer.testing import CliRunner, Result

from embedserve.batching.batcher import AT_ONCE
from embedserve.commands.cli import app
from embedserve.commands.planning.pod_patch import CUDA_BYTES, PodOptions, PodRows, pod_patch
from embedserve.config import DEFAULT_LIMITS
from embedserve.processes.memory_bounds import PROCESS_BYTES, WORK_BYTES, memory_bytes_max

GIB = 1 << 30
LARGE = PodRows("dlrm@3 of store", 100 * GIB)


def quantity(text: str) -> int:
    assert text.endswith("Mi")
    return int(text[:-2]) << 20


def patch(rows: PodRows, options: PodOptions | None = None, gpus: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(pod_patch(rows, options or PodOptions(), gpus))
    return made


def container(made: dict[str, Any]) -> dict[str, Any]:
    (one,) = made["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def memory(made: dict[str, Any]) -> tuple[int, int]:
    """(request, limit) in bytes."""
    resources = container(made)["resources"]
    return quantity(resources["requests"]["memory"]), quantity(resources["limits"]["memory"])


def test_mapped_rows_and_what_the_processes_take() -> None:
    request, limit = memory(patch(LARGE))
    assert request == 100 * GIB + PROCESS_BYTES + WORK_BYTES
    bound = memory_bytes_max(DEFAULT_LIMITS)
    assert 0 <= limit - (100 * GIB + PROCESS_BYTES + bound) < 1 << 20


def test_only_mapped_rows_may_stay_on_the_disk() -> None:
    request, _ = memory(patch(LARGE, PodOptions(hot=0.25)))
    assert request == 25 * GIB + PROCESS_BYTES + WORK_BYTES
    with pytest.raises(ValueError, match="resident ones are held whole"):
        PodOptions(tables="resident", hot=0.25)


def test_each_worker_has_its_own_and_rows_are_shared() -> None:
    options = PodOptions(workers=4, tables="resident")
    request, limit = memory(patch(replace(LARGE, copied=GIB), options))
    assert request == (100 + 4) * GIB + 4 * PROCESS_BYTES + WORK_BYTES
    assert limit > request + 3 * memory_bytes_max(DEFAULT_LIMITS)
    assert container(patch(LARGE, options))["resources"]["requests"]["cpu"] == "4"


def test_following_holds_two_versions() -> None:
    request, _ = memory(patch(LARGE, PodOptions(follow="latest")))
    assert request == 200 * GIB + PROCESS_BYTES + WORK_BYTES


def test_a_pulled_version_has_its_room_on_the_disk() -> None:
    made = patch(replace(LARGE, is_pulled=True))
    (volume,) = made["spec"]["template"]["spec"]["volumes"]
    assert volume["name"] == "cache"
    cache = quantity(volume["emptyDir"]["sizeLimit"])
    assert cache == 3 * 100 * GIB
    for kind in ("requests", "limits"):
        assert quantity(container(made)["resources"][kind]["ephemeral-storage"]) > cache + GIB
    assert "volumes" not in patch(LARGE)["spec"]["template"]["spec"]


def test_gpus_are_the_plans_ranks() -> None:
    made = patch(LARGE, gpus=8)
    assert container(made)["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert memory(made)[0] == PROCESS_BYTES + WORK_BYTES + CUDA_BYTES
    of_one = AT_ONCE * 2 * DEFAULT_LIMITS.request_output_bytes_max  # values, and those in order
    assert memory(made)[1] > memory(patch(LARGE, gpus=1))[1] + 7 * of_one
    with pytest.raises(ValueError, match="workers is 4, but the tables go to GPUs"):
        patch(LARGE, PodOptions(workers=4), gpus=8)


def test_the_rollout_waits_for_all_bytes() -> None:
    deadline_s = patch(LARGE)["spec"]["progressDeadlineSeconds"]
    assert 100 * GIB / 50e6 < deadline_s < 3600


def test_the_variables_say_what_was_worked_out() -> None:
    options = PodOptions(workers=2, tables="mapped", follow="alias")
    variables = {one["name"]: one["value"] for one in container(patch(LARGE, options))["env"]}
    assert variables == {
        "EMBEDSERVE_WORKERS": "2",
        "EMBEDSERVE_TABLES": "mapped",
        "EMBEDSERVE_FOLLOW": "alias",
    }


def test_variables_that_nobody_asked_for_stay_as_they_are() -> None:
    """A variable beats the overlay's ConfigMap: "none" would switch its following off."""
    (variable,) = container(patch(LARGE, PodOptions(workers=2)))["env"]
    assert variable == {"name": "EMBEDSERVE_WORKERS", "value": "2"}
    assert "env" not in container(patch(LARGE))
    pulled = replace(LARGE, is_pulled=True)
    assert memory(patch(pulled)) == memory(patch(pulled, PodOptions(follow="latest")))


def test_what_stands_in_a_name_ends_no_comment() -> None:
    made = patch(replace(LARGE, name="a\nspec: {}\n# b"))
    assert made == patch(LARGE)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.mark.parametrize("overlay", ["cpu", "s3"])
def test_kustomize_takes_the_patch(store: Path, tmp_path: Path, overlay: str) -> None:
    """Of a published version; over an overlay it changes what it says, and nothing else."""
    done = run(store, "shop", "--kubernetes", "--workers", "3")
    assert done.exit_code == 0, done.stderr
    shutil.copytree(ROOT / "deploy" / "kubernetes", tmp_path / "kubernetes")
    ours = tmp_path / "kubernetes" / "ours"
    ours.mkdir()
    (ours / "pod.yaml").write_text(done.stdout)
    kustomization = {"resources": [f"../overlays/{overlay}"], "patches": [{"path": "pod.yaml"}]}
    (ours / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    command = ["kubectl", "kustomize", str(ours)]
    rendered = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert rendered.returncode == 0, rendered.stderr
    manifests = list(yaml.safe_load_all(rendered.stdout))
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    kubernetes_validate.validate(deployment, "1.34", strict=True)
    pod = container(deployment)
    wanted = container(yaml.safe_load(done.stdout))
    for kind, amounts in wanted["resources"].items():
        assert amounts.items() <= pod["resources"][kind].items()
    assert {"name": "EMBEDSERVE_WORKERS", "value": "3"} in pod["env"]
    assert pod["readinessProbe"]["httpGet"]["path"] == "/health/ready"


def test_tables_that_are_not_published_yet(tmp_path: Path) -> None:
    table = "{name: t, num_embeddings: 1000, embedding_dim: 64, feature_names: [t], pooling: sum}"
    (tmp_path / "tables.yaml").write_text(f"tables: [{table}]")
    done = run(tmp_path / "tables.yaml", "--kubernetes")
    assert done.exit_code == 0, done.stderr
    request, _ = memory(yaml.safe_load(done.stdout))
    assert 256_000 < request - PROCESS_BYTES - WORK_BYTES < 2 << 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tables", "none"), "tables is 'none', expected one of mapped, resident"),
        (("--follow", "me"), "follow is 'me', expected one of none, alias, latest"),
        (
            ("--follow", "latest", "--workers", "2", "--tables", "resident"),
            "a version that comes while workers run",
        ),
    ],
)
def test_what_would_not_start_is_refused(
    store: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(store, "shop", "--kubernetes", *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
