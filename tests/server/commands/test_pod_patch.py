"""Tests of `embedserve plan --kubernetes`: a pod's requests and limits, from a model's bytes."""

import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from documents import ROOT
from server.commands.test_plan import run

from embedserve.batching.batcher import BATCHES_PER_REPLICA
from embedserve.commands.planning.pod_patch import (
    BASE,
    CACHE_SLACK_BYTES,
    CUDA_BYTES,
    S3,
    PodOptions,
    PodRows,
    pod_figures,
    pod_patch,
)
from embedserve.config import DEFAULT_LIMITS
from embedserve.processes.memory_bounds import PROCESS_BYTES, WORK_BYTES, memory_bytes_max
from embedserve_store.format.safetensors_file import PAGE_BYTES
from embedserve_store.ids.id_map import ids_file_bytes
from embedserve_store.publishing.set_alias import set_alias

GIB = 1 << 30
LARGE = PodRows("dlrm@3 of store", 100 * GIB)


def quantity(text: str) -> int:
    assert text.endswith("Mi")
    return int(text[:-2]) << 20


def patch(rows: PodRows, options: PodOptions | None = None, gpus: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(pod_patch(rows, options or PodOptions(), gpus))
    return made


def needed(rows: PodRows, gpus: int = 0) -> dict[str, dict[str, int]]:
    return pod_figures(rows, PodOptions(), gpus)


def container(made: dict[str, Any]) -> dict[str, Any]:
    (one,) = made["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def memory(made: dict[str, Any]) -> tuple[int, int]:
    """Returns (request, limit) in bytes."""
    resources = container(made)["resources"]
    return quantity(resources["requests"]["memory"]), quantity(resources["limits"]["memory"])


def test_memory_counts_mapped_rows_and_process_overhead() -> None:
    request, limit = memory(patch(LARGE))
    assert request == 100 * GIB + PROCESS_BYTES + WORK_BYTES
    bound = memory_bytes_max(DEFAULT_LIMITS)
    assert 0 <= limit - (100 * GIB + PROCESS_BYTES + bound) < 1 << 20


def test_hot_share_reduces_memory_of_mapped_rows_only() -> None:
    request, _ = memory(patch(LARGE, PodOptions(hot=0.25)))
    assert request == 25 * GIB + PROCESS_BYTES + WORK_BYTES
    with pytest.raises(ValueError, match="resident ones are held whole"):
        PodOptions(tables="resident", hot=0.25)


def test_workers_add_private_memory_and_share_rows() -> None:
    options = PodOptions(workers=4, tables="resident")
    request, limit = memory(patch(replace(LARGE, copied=GIB), options))
    assert request == (100 + 4) * GIB + 4 * PROCESS_BYTES + WORK_BYTES
    assert limit > request + 3 * memory_bytes_max(DEFAULT_LIMITS)
    assert container(patch(LARGE, options))["resources"]["requests"]["cpu"] == "4"


def test_following_requests_memory_for_two_versions() -> None:
    request, limit = memory(patch(LARGE, PodOptions(follow="latest")))
    assert request == 200 * GIB + PROCESS_BYTES + WORK_BYTES
    bound = memory_bytes_max(DEFAULT_LIMITS, versions=2)  # the former one drains its queue
    assert 0 <= limit - (200 * GIB + PROCESS_BYTES + bound) < 1 << 20


def test_memory_limit_grows_with_the_number_of_features() -> None:
    _, limit = memory(patch(replace(LARGE, features=1000)))
    bound = memory_bytes_max(DEFAULT_LIMITS, features=1000)
    assert 0 <= limit - (100 * GIB + PROCESS_BYTES + bound) < 1 << 20


def test_memory_counts_a_version_per_alias_and_the_loading_version() -> None:
    """Covers an example: stable serves 8 and canary 9 while 10 is loaded for canary."""
    rows, pulled = replace(LARGE, aliases=2), replace(LARGE, aliases=2, is_pulled=True)
    processes = PROCESS_BYTES + WORK_BYTES
    assert memory(patch(rows, PodOptions(follow="alias")))[0] == 3 * 100 * GIB + processes
    assert memory(patch(pulled))[0] == 3 * 100 * GIB + processes  # s3 follows, either way
    assert memory(patch(pulled, PodOptions(follow="latest")))[0] == 2 * 100 * GIB + processes
    assert "#   300.0 GiB: 3 versions, mapped" in pod_patch(pulled, PodOptions())


def test_memory_counts_a_version_per_alias_without_following() -> None:
    bound = memory_bytes_max(DEFAULT_LIMITS, versions=2)
    for none in (PodOptions(), PodOptions(follow="none")):
        request, limit = memory(patch(replace(LARGE, aliases=2), none))
        assert request == 2 * 100 * GIB + PROCESS_BYTES + WORK_BYTES
        assert 0 <= limit - (2 * 100 * GIB + PROCESS_BYTES + bound) < 1 << 20
        assert memory(patch(replace(LARGE, aliases=1), none)) == memory(patch(LARGE, none))


def test_pulled_version_reserves_disk_for_the_cache() -> None:
    made = patch(replace(LARGE, is_pulled=True))
    (volume,) = made["spec"]["template"]["spec"]["volumes"]
    assert volume["name"] == "cache"
    cache = quantity(volume["emptyDir"]["sizeLimit"])
    assert cache == 4 * 100 * GIB + CACHE_SLACK_BYTES
    for kind in ("requests", "limits"):
        assert quantity(container(made)["resources"][kind]["ephemeral-storage"]) > cache + GIB
    assert "volumes" not in patch(LARGE)["spec"]["template"]["spec"]


@pytest.mark.parametrize(("aliases", "versions"), [(0, 4), (1, 4), (2, 5)])
def test_cache_size_grows_with_further_aliases(aliases: int, versions: int) -> None:
    """Checks the size only; tests/store/remote/test_tidy_cache.py tests that the cache uses it."""
    rows = replace(LARGE, is_pulled=True, aliases=aliases)
    assert needed(rows)["cache"]["sizeLimit"] == versions * 100 * GIB + CACHE_SLACK_BYTES
    text = pod_patch(rows, PodOptions())
    assert f"# Cache: {versions} versions: the two newest, the next, and {versions - 3}" in text
    assert "# Each further alias takes 100.0 GiB." in text
    assert "# Cache" not in pod_patch(LARGE, PodOptions())


def test_cache_size_counts_aliases_of_the_store(store: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(store, tmp_path / "store")
    options = (copy, "shop", "--kubernetes", "--store", "s3://bucket/store")
    assert "# Cache: 4 versions" in run(*options).stdout
    set_alias(copy, "shop", "stable", 1)
    set_alias(copy, "shop", "canary", 1)
    assert "# Cache: 5 versions" in run(*options).stdout


def test_pod_on_gpus_requests_gpus_and_host_memory() -> None:
    made = patch(LARGE, gpus=8)
    assert container(made)["resources"]["limits"]["nvidia.com/gpu"] == "8"
    figures = needed(LARGE, gpus=8)
    assert figures["requests"]["memory"] == PROCESS_BYTES + WORK_BYTES + CUDA_BYTES
    # values, and values in order
    bytes_per_gpu = BATCHES_PER_REPLICA * 2 * DEFAULT_LIMITS.request_output_bytes_max
    limit_of_one_gpu = needed(LARGE, gpus=1)["limits"]["memory"]
    assert figures["limits"]["memory"] > limit_of_one_gpu + 7 * bytes_per_gpu
    for_two_aliases = needed(replace(LARGE, aliases=2), gpus=8)
    assert for_two_aliases["requests"]["memory"] == figures["requests"]["memory"]
    bound = memory_bytes_max(DEFAULT_LIMITS, gpus=8, versions=2)
    assert for_two_aliases["limits"]["memory"] == CUDA_BYTES + PROCESS_BYTES + bound
    with pytest.raises(ValueError, match="workers is 4, but the tables go to GPUs"):
        patch(LARGE, PodOptions(workers=4), gpus=8)


def test_progress_deadline_allows_for_reading_all_bytes() -> None:
    deadline_s = patch(LARGE)["spec"]["progressDeadlineSeconds"]
    assert 100 * GIB / 50e6 < deadline_s < 3600


def test_patch_sets_variables_of_the_given_options() -> None:
    options = PodOptions(workers=2, tables="mapped", follow="alias")
    variables = {one["name"]: one["value"] for one in container(patch(LARGE, options))["env"]}
    assert variables == {
        "EMBEDSERVE_WORKERS": "2",
        "EMBEDSERVE_TABLES": "mapped",
        "EMBEDSERVE_FOLLOW": "alias",
    }


def test_patch_sets_no_variables_without_options() -> None:
    """Checks that the patch sets no variable by default, as "none" would override the overlay's
    ConfigMap and switch off its following."""
    (variable,) = container(patch(LARGE, PodOptions(workers=2)))["env"]
    assert variable == {"name": "EMBEDSERVE_WORKERS", "value": "2"}
    assert "env" not in container(patch(LARGE))
    pulled = replace(LARGE, is_pulled=True)
    assert memory(patch(pulled)) == memory(patch(pulled, PodOptions(follow="latest")))


@pytest.mark.parametrize("name", ["a\nspec: {}\n# b", "a\x1b[2J", "a\udcff"])
def test_unprintable_name_stays_in_its_comment(name: str) -> None:
    made = patch(replace(LARGE, name=name))
    assert made == patch(LARGE)


def amounts(container: dict[str, Any]) -> dict[tuple[str, str], int]:
    """Returns requests and limits in units or bytes."""
    return {
        (kind, name): number(amount)
        for kind, by_name in container["resources"].items()
        for name, amount in by_name.items()
    }


def number(text: str) -> int:
    units = {"Mi": 1 << 20, "Gi": GIB}
    return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)


@cache
def rendered(*, patch: str, component: str) -> dict[str, Any]:
    """Returns the Deployment of an overlay with the component and the patch; "" stands for none."""
    kubernetes = ROOT / "deploy" / "kubernetes"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        ours = os.path.relpath(kubernetes, folder)
        (folder / "pod.yaml").write_text(patch)
        kustomization = {
            "resources": [f"{ours}/base"],
            "components": [f"{ours}/components/{component}"] if component else [],
            "patches": [{"path": "pod.yaml"}] if patch else [],
        }
        (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        command = ["kubectl", "kustomize", name]
        # The process ends before garbage matters, and collecting it takes a quarter of the CPU
        # time.
        environment = os.environ | {"GOGC": "off"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    manifests = yaml.load_all(done.stdout, yaml.CSafeLoader)
    (deployment,) = [one for one in manifests if one["kind"] == "Deployment"]
    kubernetes_validate.validate(deployment, "1.37", strict=True)
    found: dict[str, Any] = deployment
    return found


def cache_bytes(deployment: dict[str, Any]) -> int:
    volumes = {one["name"]: one for one in deployment["spec"]["template"]["spec"]["volumes"]}
    return number(volumes["cache"]["emptyDir"]["sizeLimit"]) if "cache" in volumes else 0


@pytest.mark.parametrize("component", ["", "s3", "gpu"])
@pytest.mark.parametrize("gigabytes", [0.001, 6.9, 100])
def test_patch_never_lowers_values_of_the_manifests(component: str, gigabytes: float) -> None:
    rows = PodRows("dlrm", int(gigabytes * GIB), is_pulled=component == "s3")
    gpus = 1 if component == "gpu" else 0
    before = rendered(patch="", component=component)
    after = rendered(patch=pod_patch(rows, PodOptions(), gpus), component=component)
    figures = amounts(container(after))
    for name, amount in amounts(container(before)).items():
        assert figures[name] >= amount, name
    for kind in ("requests", "limits"):
        for resource, amount in pod_figures(rows, PodOptions(), gpus)[kind].items():
            assert figures.get((kind, resource), 0) >= amount
    assert cache_bytes(after) >= max(cache_bytes(before), 4 * rows.mapped if rows.is_pulled else 0)
    deadline_s = "progressDeadlineSeconds"
    assert after["spec"][deadline_s] >= before["spec"][deadline_s]
    assert container(after).get("env") == container(before).get("env")


@pytest.mark.parametrize(("component", "figures"), [("gpu", BASE), ("s3", S3)])
def test_known_figures_equal_the_manifests(
    component: str, figures: dict[str, dict[str, int]]
) -> None:
    deployment = rendered(patch="", component=component)
    held = amounts(container(deployment)) | {("limits", "nvidia.com/gpu"): 2}
    assert held == {
        (kind, name): amount
        for kind in ("requests", "limits")
        for name, amount in figures[kind].items()
    }
    deadline_s = deployment["spec"]["progressDeadlineSeconds"]
    assert figures["rollout"] == {"progressDeadlineSeconds": deadline_s}
    assert figures.get("cache", {"sizeLimit": 0}) == {"sizeLimit": cache_bytes(deployment)}


def test_values_covered_by_the_manifests_become_comments() -> None:
    text = pod_patch(PodRows("dlrm", GIB), PodOptions(workers=1))
    (env,) = container(yaml.safe_load(text)).pop("env")
    assert env == {"name": "EMBEDSERVE_WORKERS", "value": "1"}
    assert "#   requests cpu 2\n#   requests memory 2024Mi\n#   limits memory " in text


def test_kustomize_accepts_the_patch_of_a_published_version(store: Path) -> None:
    done = run(store, "shop", "--kubernetes", "--workers", "3")
    assert done.exit_code == 0, done.stderr
    deployment = rendered(patch=done.stdout, component="")
    assert {"name": "EMBEDSERVE_WORKERS", "value": "3"} in container(deployment)["env"]
    assert container(deployment)["readinessProbe"]["httpGet"]["path"] == "/health/ready"


def test_cache_is_sized_for_tables_that_are_not_published_yet(tmp_path: Path) -> None:
    """Covers tables for a store behind a URL, which the description does not name."""
    size = "num_embeddings: 200000000, embedding_dim: 64"
    table = f"{{name: t, {size}, feature_names: [t], pooling: sum}}"
    (tmp_path / "tables.yaml").write_text(f"tables: [{table}]")
    arguments = (tmp_path / "tables.yaml", "--kubernetes")
    done = run(*arguments, "--store", "s3://bucket/store")
    assert done.exit_code == 0, done.stderr
    made = yaml.safe_load(done.stdout)
    cache = cache_bytes(made)
    assert cache > 4 * 200_000_000 * 64 * 4
    for kind in ("requests", "limits"):
        assert quantity(container(made)["resources"][kind]["ephemeral-storage"]) > cache + GIB
    mounted = yaml.safe_load(run(*arguments).stdout)
    assert "volumes" not in mounted["spec"]["template"]["spec"]
    assert memory(made)[0] - memory(mounted)[0] > 47 * GIB  # two versions, because it is followed


def test_pod_on_gpus_has_a_cache_for_a_remote_store() -> None:
    """Covers the component gpu, which switches off the following that s3 switches on."""
    figures = needed(replace(LARGE, is_pulled=True), gpus=8)
    assert figures["requests"]["memory"] == needed(LARGE, gpus=8)["requests"]["memory"]
    assert figures["cache"]["sizeLimit"] == 4 * 100 * GIB + CACHE_SLACK_BYTES


def test_patch_for_unpublished_tables_equals_the_patch_for_their_bytes(tmp_path: Path) -> None:
    table = "{name: t, num_embeddings: 1000, embedding_dim: 64, feature_names: [t], pooling: sum}"
    (tmp_path / "tables.yaml").write_text(f"tables: [{table}]")
    done = run(tmp_path / "tables.yaml", "--kubernetes")
    assert done.exit_code == 0, done.stderr
    rows = PodRows("tables.yaml", 256_000 + PAGE_BYTES, features=1)  # with the header of their file
    assert done.stdout == pod_patch(replace(rows, name=str(tmp_path / "tables.yaml")), PodOptions())
    request = needed(rows)["requests"]["memory"]
    assert request == rows.mapped + PROCESS_BYTES + WORK_BYTES


def test_cache_includes_estimated_ids_of_unpublished_vocabularies(tmp_path: Path) -> None:
    """Checks the estimate: in a published version where each row has an id, ids take as many
    bytes."""
    ids = "{rule: map, vocabulary: ids.txt, id_type: string}"
    size = "num_embeddings: 1000000000, embedding_dim: 16, dtype: int8"
    table = f"{{name: t, {size}, feature_names: [t], pooling: sum, ids: {ids}}}"
    (tmp_path / "tables.yaml").write_text(f"tables: [{table}]")
    done = run(tmp_path / "tables.yaml", "--kubernetes", "--store", "s3://bucket/store")
    assert done.exit_code == 0, done.stderr
    ids_bytes = ids_file_bytes({"t": 10**9})
    version = ids_bytes + PAGE_BYTES + 10**9 * (16 + 4)
    least = 4 * version + CACHE_SLACK_BYTES
    assert least <= cache_bytes(yaml.safe_load(done.stdout)) < least + (1 << 20)
    assert "# Ids are estimated as 14.4 GiB: one for each row of a table with a" in done.stdout


@pytest.mark.parametrize(
    "option",
    [
        ("--workers", "4"),
        ("--tables", "mapped"),
        ("--follow", "alias"),
        ("--hot-percent", "30"),
        ("--store", "s3://bucket/store"),
    ],
)
def test_pod_options_require_kubernetes(store: Path, option: tuple[str, str]) -> None:
    result = run(store, "shop", *option)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--workers, --tables, --follow, --hot-percent and --store need" in result.stderr


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
def test_options_that_serve_would_reject_are_rejected(
    store: Path, options: tuple[str, ...], message: str
) -> None:
    result = run(store, "shop", "--kubernetes", *options)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
