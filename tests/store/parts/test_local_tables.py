"""Tests of local tables: a router holds the smallest tables that are whole on one part, and no
other rows."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from store.parts.conftest import PARTS, publish_hosts
from writable import writable

from embedserve_store import ModelStore, StoreError, TableSpec, verify
from embedserve_store.parts.local_tables import local_tables, with_local_part
from embedserve_store.parts.part import LocalTables, Part
from embedserve_store.plans.constraints import TableConstraints
from embedserve_store.plans.host_plan import HostPlan

ANY = LocalTables(1 << 40)


def spec(name: str, rows: int, *features: str) -> TableSpec:
    """Returns a table of 16 bytes a row."""
    return TableSpec(name, rows, 4, features or (name,), "sum", "float32")


TABLES = (
    spec("cut", 3),
    spec("large", 50),
    spec("b", 10, "b", "shared"),
    spec("c", 5, "shared"),
    spec("a", 20),
)
HOSTS = HostPlan(
    2,
    {"cut": (0, 1, 3), "large": (0, 50, 50), "b": (0, 0, 10), "c": (0, 0, 5), "a": (0, 20, 20)},
)


@pytest.mark.parametrize(
    ("bytes_max", "names"),
    [
        (0, ""),
        (239, ""),
        (240, "b c"),  # the two share a feature, so they count as one table
        (559, "b c"),
        (560, "b c a"),
        (1359, "b c a"),
        (1360, "large b c a"),
        (1 << 40, "large b c a"),  # never the divided table, although it is the smallest
    ],
)
def test_smallest_undivided_tables_are_local(bytes_max: int, names: str) -> None:
    found = local_tables(TABLES, HOSTS, bytes_max)
    assert [table.name for table in found] == names.split()


@given(st.integers(0, 1600))
def test_local_tables_stay_within_the_byte_limit(bytes_max: int) -> None:
    local = local_tables(TABLES, HOSTS, bytes_max)
    assert sum(table.nbytes for table in local) <= bytes_max
    hosts = with_local_part(HOSTS, [table.name for table in local])
    assert hosts.parts == 3
    for table in TABLES:
        assert list(hosts.rows[table.name]) == sorted(hosts.rows[table.name])
        counts = [len(hosts.rows_on(table.name, part)) for part in range(3)]
        before = [len(HOSTS.rows_on(table.name, part)) for part in range(2)]
        assert counts == ([0, 0, table.num_embeddings] if table in local else [*before, 0])


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a store whose tables "halves" and "nibbles" are whole on one part; not to be
    changed."""
    store = tmp_path_factory.mktemp("local") / "store"
    whole = TableConstraints(sharding_types=("table_wise",))
    publish_hosts(store, constraints={"halves": whole, "nibbles": whole})
    return store


def test_local_version_has_the_rows_of_the_whole_version(published: Path) -> None:
    whole = ModelStore(published).load("m")
    version = ModelStore(published, selection=ANY).load("m")
    assert {*version.tables.tables} == {"halves", "nibbles"}
    assert version.manifest == version.whole == whole.manifest
    assert version.part is None
    assert {*version.id_maps} == {"halves"}
    local = version.local_version()
    assert local is not None
    assert local.manifest.features == ("halves", "nibbles")
    for table in local.manifest.tables:
        np.testing.assert_array_equal(local.tables.rows(table.name), whole.tables.rows(table.name))
        assert len(table.sha256) == 64
    local.plan.check(local.manifest.tables, "here")
    verify(local)
    verify(version)
    bags = local.goldens().bags
    assert {0, 199} <= set(bags.ids[bags.span(0)])


@pytest.mark.parametrize("selection", [LocalTables(0), LocalTables(10), ANY])
def test_no_local_version_without_local_tables(store: Path, selection: LocalTables) -> None:
    """In this store every table is divided."""
    version = ModelStore(store, selection=selection).load("m")
    assert version.tables.nbytes == 0
    assert version.local_version() is None


def test_local_verification_detects_flipped_bits_in_local_tables_only(
    published: Path, tmp_path: Path
) -> None:
    store = writable(shutil.copytree(published, tmp_path / "store"))
    whole, path = ModelStore(store).load("m"), store / "m" / "1" / "tables.safetensors"
    data_start = path.stat().st_size - whole.tables.nbytes
    for name in ("single", "halves"):
        data = bytearray(path.read_bytes())
        data[data_start + whole.tables.offsets[name]] ^= 1
        path.write_bytes(data)
        local = ModelStore(store, selection=ANY).load("m").local_version()
        assert local is not None
        if name == "single":
            verify(local)
            continue
        with pytest.raises(StoreError, match="table 'halves': sha256 is "):
            verify(local)


def test_only_the_local_tables_are_pulled(published: Path, tmp_path: Path) -> None:
    url = published.as_uri()
    version = ModelStore(url, tmp_path, selection=ANY).load("m")
    assert version.path.parent.parent.name.endswith(f"-tables-of-{ANY.bytes_max}-bytes")
    assert sorted(path.name for path in version.path.iterdir()) == [
        "goldens.safetensors",
        "ids.safetensors",
        "manifest.json",
        "plan.json",
        "tables.safetensors",
    ]
    local = version.local_version()
    assert local is not None
    verify(local)
    file = version.path / "tables.safetensors"
    assert file.stat().st_blocks * 512 < local.tables.nbytes + 32_768
    with pytest.raises(StoreError, match="'single'"):
        verify(ModelStore(version.path.parent.parent, selection=Part(0, PARTS)).load("m"))


def test_no_rows_are_pulled_without_local_tables(store: Path, tmp_path: Path) -> None:
    version = ModelStore(store.as_uri(), tmp_path, selection=ANY).load("m")
    assert not (version.path / "tables.safetensors").exists()
