"""Tests of pulling one part: its ranges are verified and written into a sparse file."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import s3fs
import torch
from code_forker import CodeForker
from pooled import collection
from store.remote.conftest import Place
from store.remote.conftest import pulled_files as files
from torchrec import PoolingType
from writable import writable

from embedserve_store import ModelStore, ModelVersion, StoreError, publish, verify
from embedserve_store.errors import UnreachableError
from embedserve_store.parts.part import NO_ROWS, Part, RowSelection
from embedserve_store.remote.upload import upload_version
from embedserve_store.transfer import sparse_file

PARTS = 4
PART = Part(1, PARTS)
ROWS = {"a": 40_000, "b": 10_001, "tiny": 3}
TABLES = "tables.safetensors"
MARGIN_BYTES = 64 << 10

PULL = """
import os, sys
from embedserve_store import ModelStore
from embedserve_store.parts.part import Part
from embedserve_store.remote import remote_files

remote_files.PART_BYTES = 100_000
url, cache, share = sys.argv[1:]

def progress(file, bytes_done, bytes_total):
    if file == "tables.safetensors" and bytes_done >= bytes_total * float(share):
        os.kill(os.getpid(), 9)

ModelStore(url, cache, progress, selection=Part(1, 4)).load("m")
"""


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store with version 1 of "m" in PARTS parts, with a vocabulary; not to be
    changed."""
    store = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    ebc = collection([(name, rows, 64, [name], PoolingType.SUM) for name, rows in ROWS.items()])
    publish(ebc, store, model="m", hosts=PARTS, vocabularies={"b": range(ROWS["b"])})
    return store


@pytest.fixture
def source(published: Path, tmp_path: Path) -> Path:
    """Returns a copy of ``published`` that a test may damage."""
    return writable(shutil.copytree(published, tmp_path / "source"))


def pull(where: str | Path, cache: Path, selection: RowSelection = PART) -> ModelVersion:
    url = f"file://{where}" if isinstance(where, Path) else where
    return ModelStore(url, cache, selection=selection).load("m")


@pytest.mark.parametrize("kind", ["file", "s3"])
@pytest.mark.parametrize("number", [0, 3])
def test_only_row_ranges_of_the_part_are_read(
    published: Path,
    place: Place,
    tmp_path: Path,
    read_bytes: dict[str, int],
    kind: str,
    number: int,
) -> None:
    where = place(kind, "store")
    upload_version(published / "m" / "1", where)
    read_bytes.clear()
    version = pull(where, tmp_path / "cache", Part(number, PARTS))
    assert read_bytes[TABLES] == version.tables.nbytes
    assert sum(read_bytes.values()) <= 1.01 * version.tables.nbytes
    file = version.path / TABLES
    assert file.stat().st_size == (published / "m" / "1" / TABLES).stat().st_size
    assert file.stat().st_blocks * 512 < version.tables.nbytes + 32_768
    own = ModelStore(published, selection=Part(number, PARTS)).load("m")
    for name in own.tables.tables:
        np.testing.assert_array_equal(version.tables.rows(name), own.tables.rows(name))
    verify(version)
    assert version.whole.fingerprint == own.whole.fingerprint
    assert files(version.path) == ["goldens.safetensors", "manifest.json", "plan.json", TABLES]


def test_each_part_is_cached_in_its_own_folder(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    suffixes: dict[RowSelection, str] = {
        Part(1, PARTS): "-part-1-of-4",
        Part(2, PARTS): "-part-2-of-4",
        NO_ROWS: "-no-rows",
        None: "",
    }
    names = []
    for selection, suffix in suffixes.items():
        version = pull(source, cache, selection)
        folder = version.path.parent.parent
        assert folder.name.endswith(suffix)
        names.append(folder.name.removesuffix(suffix))
        again = ModelStore(folder, selection=selection).load("m", 1)
        assert again.path == version.path
        assert again.manifest == version.manifest
        assert len(again.goldens().bags.ids)
        verify(again)
    assert len(set(names)) == 1
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 4


def test_no_row_is_read_without_rows(
    source: Path, tmp_path: Path, read_bytes: dict[str, int]
) -> None:
    (source / "m" / "1" / TABLES).unlink()
    version = pull(source, tmp_path / "cache", NO_ROWS)
    assert TABLES not in read_bytes
    assert files(version.path) == [
        "goldens.safetensors",
        "ids.safetensors",
        "manifest.json",
        "plan.json",
    ]
    assert {*version.id_maps} == {"b"}
    assert version.tables.nbytes == 0
    with pytest.raises(StoreError, match=f"{TABLES}: does not exist"):
        pull(source, tmp_path / "cache")


def flip(path: Path, table: str, part: ModelVersion) -> None:
    """Flips a bit of the first row of a table of a part, in a file of rows."""
    assert part.tables.file_offsets is not None
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(part.tables.file_offsets[table])
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_flipped_bit_is_detected_only_by_its_part(source: Path, tmp_path: Path) -> None:
    flip(source / "m" / "1" / TABLES, "a", ModelStore(source, selection=PART).load("m"))
    with pytest.raises(StoreError, match=f"m/1/{TABLES}: table 'a': sha256 is "):
        pull(source, tmp_path / "cache")
    assert files(tmp_path / "cache") == []
    verify(pull(source, tmp_path / "cache", Part(2, PARTS)))


def test_flipped_bit_in_the_cache_is_detected_by_verify(source: Path, tmp_path: Path) -> None:
    version = pull(source, tmp_path / "cache")
    flip(version.path / TABLES, "b", version)
    with pytest.raises(StoreError, match="table 'b': sha256 is "):
        verify(version)


def test_damaged_plan_is_detected_before_rows_are_read(
    source: Path, tmp_path: Path, read_bytes: dict[str, int]
) -> None:
    path = source / "m" / "1" / "plan.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(StoreError, match=r"m/1/plan\.json: sha256 is "):
        pull(source, tmp_path / "cache")
    assert TABLES not in read_bytes


@pytest.mark.parametrize("number", [0, 2])
def test_other_part_count_is_rejected(source: Path, tmp_path: Path, number: int) -> None:
    with pytest.raises(StoreError, match=rf"m/1: part {number}/3 was requested, .* has 4 parts"):
        pull(source, tmp_path / "cache", Part(number, 3))
    assert files(tmp_path / "cache") == []


def killed_pull(forking: CodeForker, url: str, cache: Path, share: float) -> Path:
    """Pulls the part, killed once ``share`` of its rows has arrived; returns the file of rows."""
    assert forking.run(PULL, url, cache, share) == -signal.SIGKILL
    (path,) = cache.rglob(TABLES)
    return path


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.9, 1])
def test_killed_pull_leaves_nothing_visible_and_continues(
    published: Path,
    url: str,
    tmp_path: Path,
    read_bytes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    forking: CodeForker,
    share: float,
) -> None:
    monkeypatch.setattr(sparse_file, "MARGIN_BYTES", MARGIN_BYTES)
    upload_version(published / "m" / "1", url)
    cache = tmp_path / "cache"
    killed_pull(forking, url, cache, share)
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    assert ModelStore(folder).models() == []
    progress: list[tuple[int, int]] = []

    def report(file: str, bytes_done: int, bytes_total: int) -> None:
        if file == TABLES:
            progress.append((bytes_done, bytes_total))

    read_bytes.clear()
    version = ModelStore(url, cache, report, selection=PART).load("m")
    nbytes = version.tables.nbytes
    assert read_bytes.get(TABLES, 0) <= nbytes - share * nbytes + MARGIN_BYTES
    assert progress[-1] == (nbytes, nbytes)
    assert files(cache) == files(version.path)
    own = ModelStore(published, selection=PART).load("m")
    for name in own.tables.tables:
        np.testing.assert_array_equal(version.tables.rows(name), own.tables.rows(name))
    verify(version)
    file = version.path / TABLES
    assert file.stat().st_blocks * 512 < nbytes + 32_768


def test_leftovers_of_a_killed_pull_are_verified(
    published: Path, url: str, tmp_path: Path, read_bytes: dict[str, int], forking: CodeForker
) -> None:
    upload_version(published / "m" / "1", url)
    cache = tmp_path / "cache"
    left = killed_pull(forking, url, cache, 1)
    own = ModelStore(published, selection=PART).load("m")
    flip(left, "a", own)
    read_bytes.clear()
    version = pull(url, cache)
    assert 0 < read_bytes[TABLES] < own.tables.nbytes
    verify(version)


@pytest.mark.parametrize("error", [UnreachableError("the store is gone"), KeyboardInterrupt()])
def test_pull_continues_after_a_lost_store_or_interrupt(
    source: Path, tmp_path: Path, read_bytes: dict[str, int], error: BaseException
) -> None:
    def fail(file: str, bytes_done: int, bytes_total: int) -> None:
        if file == TABLES and bytes_done == bytes_total:
            raise error

    cache = tmp_path / "cache"
    with pytest.raises(type(error)):
        ModelStore(f"file://{source}", cache, fail, selection=PART).load("m")
    read_bytes.clear()
    version = pull(source, cache)
    assert TABLES not in read_bytes
    verify(version)


def test_pull_of_another_version_removes_leftovers_of_a_killed_pull(
    published: Path, url: str, tmp_path: Path, forking: CodeForker
) -> None:
    upload_version(published / "m" / "1", url)
    cache = tmp_path / "cache"
    left = killed_pull(forking, url, cache, 0.5)
    upload_version(published / "m" / "1", url, 2)
    version = ModelStore(url, cache, selection=PART).load("m", 2)
    assert version.manifest.version == 2
    assert not left.exists()
    assert files(cache) == files(version.path)


def test_only_the_part_needs_disk_space(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = ModelStore(source, selection=Part(1, PARTS)).load("m").tables.nbytes
    small = sum(path.stat().st_size for path in (source / "m" / "1").iterdir())
    small -= sum((source / "m" / "1" / name).stat().st_size for name in (TABLES, "ids.safetensors"))
    free = shutil.disk_usage(tmp_path)._replace(free=nbytes + small - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(StoreError, match=f"needs {nbytes + small:,} bytes, the disk has "):
        pull(source, tmp_path / "cache")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=nbytes + small))
    pull(source, tmp_path / "cache")


def test_progress_counts_only_the_part(source: Path, tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    url = f"file://{source}"
    store = ModelStore(url, tmp_path, lambda *report: reports.append(report), Part(1, PARTS))
    nbytes = store.load("m").tables.nbytes
    assert [report for report in reports if report[0] == TABLES][-1] == (TABLES, nbytes, nbytes)


def test_old_parts_are_removed_from_the_cache(
    published: Path, url: str, objects: s3fs.S3FileSystem, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        upload_version(published / "m" / "1", url, number)
        version = pull(url, tmp_path / "cache")
        del version
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert sorted(path.name for path in (folder / "m").iterdir() if path.is_dir()) == ["2", "3"]


def test_cached_part_is_opened_without_the_store(source: Path, tmp_path: Path) -> None:
    first = pull(source, tmp_path / "cache")
    again = pull(source, tmp_path / "cache")
    assert again.path == first.path


def test_pulled_large_part_leaves_no_pages_in_memory(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_file, "DIRECT_BYTES_MIN", 1)
    monkeypatch.setattr(sparse_file, "SYNC_BYTES", 100_000)
    verify(pull(source, tmp_path / "cache"))
