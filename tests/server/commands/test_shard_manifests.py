"""Tests of `embedserve plan --kubernetes` for a plan with parts: it prints the shards.

tests/deploy/test_parts.py renders them with the routers, and validates them as manifests.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from server.commands.test_plan import run

from embedserve.commands.planning.pod_patch import PodOptions, PodRows
from embedserve.commands.planning.shard_manifests import shard_manifests
from embedserve.config import DEFAULT_LIMITS
from embedserve.processes.memory_bounds import PROCESS_BYTES, WORK_BYTES, memory_bytes_max

GIB, MIB = 1 << 30, 1 << 20
LARGE = PodRows("shop@3 of store", 100 * GIB, model="shop")
TABLES = """
tables:
  - {name: user, num_embeddings: 60000000, embedding_dim: 64, feature_names: [user], pooling: sum}
"""
USER_BYTES = 60_000_000 * 64 * 4


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    path = tmp_path / "tables.yaml"
    path.write_text(TABLES)
    return path


def containers(text: str) -> list[dict[str, Any]]:
    """Returns the container of each part."""
    return [
        container
        for one in yaml.safe_load_all(text)
        if one["kind"] == "StatefulSet"
        for container in one["spec"]["template"]["spec"]["containers"]
    ]


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}


def memory(container: dict[str, Any]) -> tuple[int, int]:
    """Returns (request, limit) in bytes."""
    resources = container["resources"]
    request, limit = (resources[kind]["memory"] for kind in ("requests", "limits"))
    assert request.endswith("Mi")
    assert limit.endswith("Mi")
    return int(request[:-2]) * MIB, int(limit[:-2]) * MIB


def test_following_shard_has_memory_for_two_versions() -> None:
    for container in containers(shard_manifests(2, LARGE, PodOptions())):
        request, limit = memory(container)
        assert request == 200 * GIB + PROCESS_BYTES + WORK_BYTES
        most = 200 * GIB + PROCESS_BYTES + memory_bytes_max(DEFAULT_LIMITS, versions=2)
        assert most <= limit < most + MIB


def test_shard_without_following_has_memory_for_one_version() -> None:
    (container, _) = containers(shard_manifests(2, LARGE, PodOptions(follow="none")))
    assert memory(container)[0] == 100 * GIB + PROCESS_BYTES + WORK_BYTES
    assert variables(container)["EMBEDSERVE_FOLLOW"] == "none"


def test_shards_differ_only_in_their_part_number() -> None:
    text = shard_manifests(3, LARGE, PodOptions(workers=4, tables="mapped"))
    for part, container in enumerate(containers(text)):
        assert variables(container) == {
            "EMBEDSERVE_PART": f"{part}/3",
            "EMBEDSERVE_MODEL": "shop",
            "EMBEDSERVE_CONNECTION_AGE_S_MAX": "0",
            "EMBEDSERVE_FOLLOW": "latest",
            "EMBEDSERVE_WORKERS": "4",
            "EMBEDSERVE_TABLES": "mapped",
        }
        assert container["resources"]["requests"]["cpu"] == "4"


def test_manifests_contain_no_yaml_references() -> None:
    assert not any(mark in shard_manifests(2, LARGE, PodOptions()) for mark in ("&id", "*id"))


def test_newline_in_a_model_name_does_not_end_the_comment() -> None:
    text = shard_manifests(2, replace(LARGE, name="a\nspec: {}\n# b"), PodOptions())
    plain = shard_manifests(2, LARGE, PodOptions())
    assert list(yaml.safe_load_all(text)) == list(yaml.safe_load_all(plain))


def test_routers_have_memory_for_the_ids_of_each_version() -> None:
    text = shard_manifests(2, replace(LARGE, ids=3 * GIB), PodOptions())
    assert "memory, of which 6.0 GiB are ids of 2 versions" in text
    text = shard_manifests(2, replace(LARGE, ids=3 * GIB, aliases=2), PodOptions())
    assert "memory, of which 9.0 GiB are ids of 3 versions" in text


def test_routers_have_memory_and_disk_for_unpublished_ids(tmp_path: Path) -> None:
    ids = "ids: {rule: map, vocabulary: ids.txt}, name"
    (tmp_path / "tables.yaml").write_text(TABLES.replace("name", ids, 1))
    options = ("--hosts", "2", "--kubernetes", "--store", "s3://bucket/store")
    done = run(tmp_path / "tables.yaml", *options)
    assert done.exit_code == 0, done.stderr
    assert "memory, of which 1.7 GiB are ids of 2 versions" in done.stdout
    assert "# Its cache takes 3.7 GiB of the disk." in done.stdout
    assert "# Ids are estimated as 886.9 MiB" in done.stdout


def test_options_that_a_shard_would_reject_are_rejected() -> None:
    with pytest.raises(ValueError, match="a version that comes while workers run"):
        shard_manifests(2, LARGE, PodOptions(workers=2, tables="resident"))


def test_shards_are_printed_for_unpublished_tables(tables: Path) -> None:
    done = run(tables, "--hosts", "2", "--kubernetes")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("# Made by embedserve plan --kubernetes: ")
    found = containers(done.stdout)
    assert len(found) == 2
    for container in found:
        assert memory(container)[0] >= USER_BYTES + PROCESS_BYTES + WORK_BYTES  # two halves
        assert "ephemeral-storage" not in container["resources"]["limits"]
        assert "EMBEDSERVE_MODEL" not in variables(container)


def test_shards_of_a_remote_store_have_disk_for_the_cache(tables: Path) -> None:
    options = ("--kubernetes", "--store", "s3://bucket/store")
    done = run(tables, "--hosts", "2", *options)
    assert done.exit_code == 0, done.stderr
    for container in containers(done.stdout):
        disk = container["resources"]["limits"]["ephemeral-storage"]
        assert int(disk[:-2]) * MIB > 4 * USER_BYTES / 2 + GIB


def test_one_host_prints_a_deployment_of_whole_tables(tables: Path) -> None:
    done = run(tables, "--hosts", "1", "--kubernetes")
    assert done.exit_code == 0, done.stderr
    assert yaml.safe_load(done.stdout)["kind"] == "Deployment"


def test_shards_on_gpus_are_rejected(tables: Path) -> None:
    done = run(tables, "--hosts", "2", "--kubernetes", "--device-type", "cuda")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "device_type is 'cuda', but the plan has 2 parts" in done.stderr


def test_shards_of_a_published_version_name_its_model(two_rank_store: Path) -> None:
    done = run(two_rank_store, "shop", "--hosts", "2", "--kubernetes")
    assert done.exit_code == 0, done.stderr
    names = [variables(container)["EMBEDSERVE_MODEL"] for container in containers(done.stdout)]
    assert names == ["shop", "shop"]
