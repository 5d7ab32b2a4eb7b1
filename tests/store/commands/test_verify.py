"""Tests of `embedserve verify`: it prints a line for each intact table, or one error line and exits
with 1."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from store.commands import conftest
from store.commands.conftest import error_of
from writable import writable

from embedserve_store import ModelStore, TableSpec, publish
from embedserve_store.format.tables_file import header_bytes
from embedserve_store.parts.part import Part

PARTS = 2


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    """Returns a copy of the store that a test may damage."""
    return writable(shutil.copytree(store, tmp_path / "store"))


def run(*arguments: str | Path) -> tuple[int, str, list[str]]:
    """Returns the exit status, stdout and the lines of stderr."""
    code, stdout, stderr = conftest.run("verify", *arguments)
    return code, stdout, stderr.splitlines()


def test_intact_version_is_verified(own_store: Path) -> None:
    for arguments in (("shop",), ("shop", "1")):
        status, _, lines = run(own_store, *arguments)
        assert status == 0
        assert "t_user: 7 rows of 4 float32, 112 B: as published" in lines
        assert lines[-1] == f"shop version 1 is as it was published, in {own_store}/shop/1"


def test_flipped_bit_is_reported_with_its_table(own_store: Path) -> None:
    path = own_store / "shop" / "1" / "tables.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    status, stdout, lines = run(own_store, "shop")
    assert (status, stdout) == (1, "")
    assert lines[-1].startswith(f"embedserve: {path}: table 't_user': sha256 is ")


def test_store_at_a_url_is_verified_in_the_cache(own_store: Path, tmp_path: Path) -> None:
    status, _, lines = run(f"file://{own_store}", "shop", "--cache", tmp_path / "cache")
    assert status == 0, lines
    assert lines[-1].startswith(f"shop version 1 is as it was published, in {tmp_path}/cache/")


def test_missing_credentials_are_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    status, stdout, lines = run("s3://bucket/store", "shop", "--cache", tmp_path)
    assert (status, stdout) == (3, "")
    (line,) = lines
    url = "s3://bucket/store/shop"
    assert line.startswith(f"embedserve: no access to the store: {url}: the remote store says: ")
    assert "credentials" in line


@pytest.fixture
def parts_store(tmp_path: Path) -> Path:
    """Returns a store with version 1 of "m": 64 rows on each of two parts, and a small table on
    one."""
    folder = tmp_path / "parts"
    tables = [
        TableSpec("wide", 128, 16, ("wide",), "sum", "float32"),
        TableSpec("tiny", 3, 16, ("tiny",), "sum", "float32"),
    ]
    weights = {
        f"embedding_bags.{one.name}.weight": torch.randn(one.num_embeddings, one.embedding_dim)
        for one in tables
    }
    publish(weights, folder, model="m", tables=tables, hosts=PARTS)
    return writable(folder)


def rows_on(store: Path, part: int) -> int:
    """Returns the number of rows of the table "wide" on a part."""
    tables = ModelStore(store, selection=Part(part, PARTS)).load("m").manifest.tables
    (wide,) = [table for table in tables if table.name == "wide"]
    return wide.num_embeddings


def flip_bit(store: Path, row: int) -> Path:
    """Flips a bit of a row of the table "wide"; returns the file."""
    version = ModelStore(store).load("m")
    start = len(header_bytes(version.manifest.tables)) + version.tables.offsets["wide"]
    at = start + row * version.tables.tables["wide"].row_bytes
    path = version.path / "tables.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("part", range(PARTS))
def test_intact_part_is_verified(parts_store: Path, part: int) -> None:
    rows = rows_on(parts_store, part)
    assert 0 < rows < 128
    for arguments in (("m",), ("m", "1")):
        status, _, lines = run(parts_store, *arguments, "--part", f"{part}/{PARTS}")
        assert status == 0, lines
        assert any(line.startswith(f"wide: {rows} rows of 16 float32, ") for line in lines)
        where = f"{parts_store}/m/1"
        assert lines[-1] == f"part {part}/2 of m version 1 is as it was published, in {where}"


def test_flipped_bit_is_reported_only_in_its_part(parts_store: Path) -> None:
    path = flip_bit(parts_store, rows_on(parts_store, 0))  # the first row of part 1
    status, _, lines = run(parts_store, "m", "--part", "0/2")
    assert status == 0, lines
    status, stdout, lines = run(parts_store, "m", "--part", "1/2")
    assert (status, stdout) == (1, "")
    assert lines[-1].startswith(f"embedserve: {path}: table 'wide': sha256 is ")


def test_only_the_requested_part_is_downloaded_from_a_url(
    parts_store: Path, tmp_path: Path
) -> None:
    url, cache = f"file://{parts_store}", ("--cache", tmp_path / "cache")
    path = flip_bit(parts_store, 0)
    status, _, lines = run(url, "m", "--part", "1/2", *cache)
    assert status == 0, lines
    assert "-part-1-of-2" in lines[-1]
    status, stdout, lines = run(url, "m", "--part", "0/2", *cache)
    assert (status, stdout) == (1, "")
    assert f"{path}: table 'wide': sha256 is " in lines[-1]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("2/2", "part is 2/2, expected a number from 0 to 1"),
        ("1", "part is '1', expected NUMBER/COUNT"),
        ("-1/2", "part is '-1/2', expected NUMBER/COUNT"),
        ("0/3", "part 0/3 was requested, but the version has 2 parts"),
    ],
)
def test_unknown_or_malformed_part_is_a_one_line_error(
    parts_store: Path, part: str, words: str
) -> None:
    assert words in error_of("verify", parts_store, "m", "--part", part)


def test_part_of_a_version_without_parts_is_a_one_line_error(store: Path) -> None:
    error = error_of("verify", store, "shop", "--part", "0/2")
    assert "was published without --hosts, so it has no parts" in error
