"""Tests of a loaded part: a version with some of the whole version's rows; no other rows are
read."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from store.parts.conftest import PARTS, publish_hosts
from torchrec import EmbeddingCollection, EmbeddingConfig
from writable import writable

from embedserve_store import (
    IdRule,
    ModelStore,
    ModelVersion,
    StoreError,
    copy_versions,
    publish,
    verify,
)
from embedserve_store.errors import NoSuchPartError
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.manifest_checksum import sealed_json
from embedserve_store.goldens.parity import check_answers
from embedserve_store.goldens.reference_pooling import pool_stored
from embedserve_store.parts.part import NO_ROWS, Part
from embedserve_store.parts.part_manifest import part_manifest


def load(store: Path, number: int | None = None, count: int = PARTS) -> ModelVersion:
    selection = None if number is None else Part(number, count)
    return ModelStore(store, selection=selection).load("m")


def hosts_of(version: ModelVersion) -> dict[str, tuple[int, ...]]:
    assert version.plan.hosts is not None
    return dict(version.plan.hosts.rows)


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    """Returns a copy of ``store`` that a test may damage."""
    return writable(shutil.copytree(store, tmp_path / "store"))


@pytest.mark.parametrize("number", range(PARTS))
def test_part_has_its_rows_of_the_whole_version(store: Path, number: int) -> None:
    whole, part = load(store), load(store, number)
    for name, bounds in hosts_of(whole).items():
        expected = whole.tables.rows(name)[bounds[number] : bounds[number + 1]]
        if not len(expected):
            assert name not in part.tables.tables
            continue
        found = part.tables.rows(name)
        np.testing.assert_array_equal(found, expected)
        spec = next(table for table in part.manifest.tables if table.name == name)
        assert spec.num_embeddings == len(expected)
        assert spec.sha256 == hashlib.sha256(expected.tobytes()).hexdigest()
        assert whole.manifest.part_checksums[name][number] == spec.sha256


def test_part_bytes_add_up_to_the_whole_version(store: Path) -> None:
    parts = [load(store, number) for number in range(PARTS)]
    assert sum(part.tables.nbytes for part in parts) == load(store).tables.nbytes
    assert sum(part.manifest.nbytes for part in parts) == load(store).manifest.nbytes
    for part in parts:
        assert sum(stop - start for start, stop in part.tables.spans) == part.tables.nbytes


def test_part_manifest_describes_the_part_and_keeps_the_whole(store: Path) -> None:
    whole, part = load(store), load(store, 1)
    assert part.part == Part(1, PARTS)
    assert part.whole == whole.manifest == whole.whole
    assert part.whole.fingerprint == whole.manifest.fingerprint
    assert part.path == whole.path
    assert (part.manifest.model, part.manifest.version) == ("m", 1)
    assert part.manifest.source == whole.manifest.source
    assert part.manifest.features == whole.manifest.features
    assert part.manifest.keys == whole.manifest.keys
    assert {table.pooling for table in part.manifest.tables} == {"sum"}
    assert {table.ids for table in part.manifest.tables} == {IdRule()}
    assert part.id_maps == {}
    assert whole.plan.hosts is not None
    assert part.manifest == part_manifest(whole.manifest, whole.plan.hosts, 1)
    assert part.plan.hosts is None
    assert whole.part is None


@pytest.mark.parametrize("is_weighted", [False, True])
def test_part_goldens_match_the_rows_of_the_part(tmp_path: Path, is_weighted: bool) -> None:
    publish_hosts(tmp_path, is_weighted=is_weighted)
    part = load(tmp_path, 2)
    goldens = part.goldens()
    bags = goldens.bags
    assert (bags.weights is not None) == part.manifest.is_weighted == is_weighted
    for at, rows in enumerate(part.manifest.rows_per_feature):
        ids = bags.ids[bags.span(at)]
        assert {0, rows - 1} <= set(ids)
        assert 24 < len(ids) < 120
    results = pool_stored(part.manifest, bags, bags.ids, part.tables)
    check_answers(results, goldens, bags.ids, part.manifest, part.tables, "here")
    np.testing.assert_array_equal(bags.ids, load(tmp_path, 2).goldens().bags.ids)


def test_parts_of_unpooled_tables_stay_unpooled(tmp_path: Path) -> None:
    tables = [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=8, feature_names=[name])
        for name, rows in (("a", 90), ("b", 60))
    ]
    publish(EmbeddingCollection(tables=tables), tmp_path, model="m", hosts=PARTS)
    whole, part = load(tmp_path), load(tmp_path, 1)
    assert not part.manifest.is_pooled
    np.testing.assert_array_equal(part.tables.rows("a"), whole.tables.rows("a")[30:60])
    goldens = part.goldens()
    assert goldens.stored_answers.shape == (len(goldens.bags.ids), 8)


def test_sums_over_parts_equal_sums_over_the_whole_version(store: Path) -> None:
    whole = load(store)
    table = next(one for one in whole.manifest.tables if one.name == "nibbles")
    numbers = np.arange(0, table.num_embeddings, 7)
    bounds = hosts_of(whole)["nibbles"]
    found = np.zeros(table.embedding_dim, np.float32)
    for number in range(PARTS):
        part = load(store, number)
        own = numbers[(numbers >= bounds[number]) & (numbers < bounds[number + 1])]
        found += _values(part, own - bounds[number]).sum(axis=0)
    np.testing.assert_allclose(found, _values(whole, numbers).sum(axis=0), rtol=1e-4, atol=1e-5)


def _values(version: ModelVersion, numbers: np.ndarray) -> np.ndarray:
    from embedserve_store.goldens.reference_pooling import stored_rows

    return stored_rows(version.tables, version.tables.tables["nibbles"], numbers)


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise", "auto"])
def test_part_plan_has_the_world_size_of_the_version(tmp_path: Path, sharding: str) -> None:
    publish_hosts(tmp_path, sharding=sharding, world_size=4)
    for number in range(PARTS):
        part = load(tmp_path, number)
        assert part.plan.world_size == 4
        part.plan.check(part.manifest.tables, "here")


def test_part_of_a_version_without_host_plan_is_rejected(tmp_path: Path) -> None:
    published = publish_hosts(tmp_path, hosts=1)
    assert published.plan.hosts is None
    assert published.manifest.part_checksums == {}
    assert "parts_sha256" not in (published.path / "manifest.json").read_text()
    assert "hosts" not in (published.path / "plan.json").read_text()
    for selection in (Part(0, 2), NO_ROWS):
        with pytest.raises(NoSuchPartError, match=r"m/1: was published without --hosts"):
            ModelStore(tmp_path, selection=selection).load("m")


def test_part_count_other_than_the_versions_is_rejected(store: Path) -> None:
    with pytest.raises(
        NoSuchPartError, match="m/1: part 1/4 was requested, but the version has 3 part"
    ):
        load(store, 1, 4)


def test_missing_part_checksums_are_rejected(own_store: Path) -> None:
    path = own_store / "m" / "1" / "manifest.json"
    manifest = json.loads(path.read_bytes())
    for checksums in manifest["parts_sha256"].values():
        checksums.pop()
    path.write_bytes(sealed_json(manifest))
    with pytest.raises(StoreError, match="the manifest has checksums of 2 parts, expected 3"):
        load(own_store, 1)
    del manifest["parts_sha256"]
    path.write_bytes(sealed_json(manifest))
    with pytest.raises(StoreError, match="the manifest has checksums of 0 parts, expected 3"):
        load(own_store, 1)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], r"parts_sha256 is \[\], expected lists by table"),
        ({"halves": ["0"]}, r"parts_sha256: 'halves' is \['0'\], expected sha256s"),
        ({"halves": "0"}, "parts_sha256: 'halves' is '0', expected sha256s"),
        ({"halves": ["0" * 64]}, "parts_sha256: 'bytes' is missing"),
    ],
)
def test_malformed_part_checksums_are_rejected(store: Path, parts: object, message: str) -> None:
    data = load(store).manifest.to_json() | {"parts_sha256": parts}
    with pytest.raises(StoreError, match=f"here: {message}"):
        Manifest.from_json(data, "here")


def test_tables_with_unequal_part_checksum_counts_are_rejected(store: Path) -> None:
    manifest = load(store).manifest
    checksums = {**manifest.part_checksums, "halves": ("0" * 64,)}
    with pytest.raises(StoreError, match="parts_sha256: the tables have checksums of"):
        Manifest.from_json(replace(manifest, part_checksums=checksums).to_json(), "here")


def test_fingerprint_depends_on_manifest_content(store: Path) -> None:
    manifest = load(store).manifest
    data = json.loads(json.dumps(manifest.to_json()))
    assert Manifest.from_json(data, "here").fingerprint == manifest.fingerprint
    assert len(manifest.fingerprint) == 64
    assert replace(manifest, version=2).fingerprint != manifest.fingerprint


def test_flipped_bit_fails_verification_of_its_part_only(own_store: Path) -> None:
    for number in range(PARTS):
        verify(load(own_store, number))
    part = load(own_store, 1)
    assert part.tables.file_offsets is not None
    path = own_store / "m" / "1" / "tables.safetensors"
    data = bytearray(path.read_bytes())
    data[part.tables.file_offsets["nibbles"]] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="table 'nibbles': sha256 is"):
        verify(load(own_store, 1))
    verify(load(own_store, 0))
    verify(load(own_store, 2))
    with pytest.raises(StoreError, match="table 'nibbles': sha256 is"):
        verify(load(own_store))


def test_part_verification_progress_covers_only_its_bytes(store: Path) -> None:
    part = load(store, 1)
    reports: list[tuple[str, int, int, int]] = []
    verify(part, lambda *report: reports.append(report))
    assert reports[-1][3] == part.tables.nbytes
    assert {name for name, *_ in reports} == {*part.tables.tables}


def test_loading_no_rows_does_not_need_the_tables_file(own_store: Path) -> None:
    (own_store / "m" / "1" / "tables.safetensors").unlink()
    version = ModelStore(own_store, selection=NO_ROWS).load("m")
    assert version.part is None
    assert version.selection == NO_ROWS
    assert version.manifest == version.whole
    assert version.manifest.part_checksums
    assert version.plan.hosts is not None
    assert {*version.id_maps} == {"halves"}
    assert len(version.goldens().bags.ids)
    assert (version.tables.nbytes, version.tables.is_mapped) == (0, False)
    version.tables.check_unchanged()
    verify(version)
    with pytest.raises(StoreError, match=r"tables\.safetensors"):
        load(own_store, 1)


def test_part_accepts_only_its_own_row_numbers_as_ids(store: Path) -> None:
    part = load(store, 1)
    rows = part.manifest.rows_per_feature[0]
    counts = np.array([2, *[0] * (len(part.manifest.features) - 1)])
    found = part.translator.translate(np.array([rows - 1, rows]), counts)
    assert found.unknown is not None
    assert found.unknown.tolist() == [False, True]


def test_tables_file_does_not_depend_on_hosts(tmp_path: Path) -> None:
    whole, divided = (publish_hosts(tmp_path / str(hosts), hosts=hosts) for hosts in (1, 3))
    assert whole.manifest.tables == divided.manifest.tables
    files = [one.path / "tables.safetensors" for one in (whole, divided)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_part_checksums_of_tables_of_many_blocks_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embedserve_store.publishing import version_writer

    monkeypatch.setattr(version_writer, "BLOCK_BYTES", 1000)
    publish_hosts(tmp_path)
    for number in range(PARTS):
        verify(load(tmp_path, number))


def test_if_changed_compares_the_host_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert publish_hosts(tmp_path).is_new
    assert not publish_hosts(tmp_path, if_changed=True).is_new
    assert publish_hosts(tmp_path, if_changed=True, hosts=2).is_new


def test_copied_version_has_the_same_parts(store: Path, tmp_path: Path) -> None:
    copy_versions(store, tmp_path / "copy", "m")
    for number in range(PARTS):
        part = load(tmp_path / "copy", number)
        verify(part)
        assert part.whole.fingerprint == load(store).manifest.fingerprint
