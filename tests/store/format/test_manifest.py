"""Tests of the manifest: it derives the model's fields from its tables, and rejects
contradictions."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from embedserve_store.errors import StoreError
from embedserve_store.format.manifest import KeyColumns, Manifest
from embedserve_store.format.table_spec import TableSpec

TABLES = (
    TableSpec("a", 100, 8, ("x", "y"), "sum", "int8", "00"),
    TableSpec("b", 30, 4, ("y", "z"), "mean", "float32", "11"),
)
FILES = {"plan.json": "22", "goldens.safetensors": "33"}
MANIFEST = Manifest("m", 3, TABLES, True, {"kind": "state_dict"}, FILES)


def test_keys_and_dims_are_derived_from_the_tables() -> None:
    assert MANIFEST.features == ("x", "y", "z")
    assert MANIFEST.keys == ("x", "y@a", "y@b", "z")
    assert MANIFEST.length_per_key == (8, 8, 4, 4)
    assert MANIFEST.rows_per_feature == (100, 30, 30)
    assert MANIFEST.nbytes == 100 * 12 + 30 * 16


def test_columns_locate_each_key_in_the_result() -> None:
    a, b = TABLES
    assert MANIFEST.columns == (
        KeyColumns("x", 0, a, 0, 8),
        KeyColumns("y@a", 1, a, 8, 16),
        KeyColumns("y@b", 1, b, 16, 20),
        KeyColumns("z", 2, b, 20, 24),
    )


def table(name: str, *features: str) -> TableSpec:
    return TableSpec(name, 10, 4, features, "sum", "float32")


@pytest.mark.parametrize(
    ("features", "groups"),
    [
        (["x", "y", "z"], ["a", "b", "c"]),
        (["xy", "yz", "w"], ["ab", "c"]),
        (["x", "y", "xz"], ["ac", "b"]),
        (["x", "y", "z", "w", "zy", "zx"], ["abcef", "d"]),
        (["wv", "x", "y", "z", "yx", "vz"], ["adf", "bce"]),
    ],
)
def test_tables_that_share_features_are_grouped(features: list[str], groups: list[str]) -> None:
    """The tables are a, b, …, and each letter of an entry is a feature."""
    tables = tuple(table(name, *own) for name, own in zip("abcdef", features, strict=False))
    found = Manifest("m", 1, tables, False).table_groups
    assert ["".join(one.name for one in group) for group in found] == groups


def test_chain_of_many_tables_is_one_group() -> None:
    """Lasts minutes if the time is quadratic in the number of tables."""
    count = 20_000
    tables = tuple(table(f"t{i}", f"f{i}", f"f{i + 1}") for i in reversed(range(count)))
    assert [len(group) for group in Manifest("m", 1, tables, False).table_groups] == [count]


def test_tables_of_all_features_are_found_in_one_pass() -> None:
    """A search for each feature took most of the time to open a version of 10,000 tables."""
    reads = []

    class Names(tuple[str, ...]):
        def __iter__(self) -> Iterator[str]:
            reads.append(self)
            return super().__iter__()

        def __contains__(self, name: object) -> bool:
            reads.append(self)
            return super().__contains__(name)

    tables = tuple(replace(table(f"t{i}"), feature_names=Names([f"f{i}"])) for i in range(50))
    manifest = Manifest("m", 1, tables, False)
    assert manifest.table_per_feature == tables
    assert manifest.rows_per_feature == (10,) * 50
    assert len(manifest.features) == len(reads) == 50


def test_json_round_trip() -> None:
    data = json.loads(json.dumps(MANIFEST.to_json()))
    assert Manifest.from_json(data, "manifest.json") == MANIFEST


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_bytes": 8}, "row_bytes is 8, but a int8 row of 8 dims has 12"),
        ({"ids": {"rule": "hashed"}}, "ids: rule is 'hashed'"),
        ({"feature_names": [1]}, "expected a list of names"),
        ({"sha256": None}, "sha256 is None, expected str"),
        ({"num_embeddings": 2.0}, "num_embeddings is 2.0, expected int"),
        ({"name": "b"}, "2 tables are named 'b'"),
        ({"pooling": "none"}, "table 'a' is not pooled and 'b' is: publish"),
        ({"feature_names": ["y", "y@b"]}, "2 answers are called 'y@b': rename a feature"),
    ],
)
def test_invalid_tables_in_json_are_rejected(change: dict[str, Any], message: str) -> None:
    data = json.loads(json.dumps(MANIFEST.to_json()))
    data["tables"][0] |= change
    with pytest.raises(StoreError, match=f"here: .*{message}"):
        Manifest.from_json(data, "here")


def test_weights_without_pooling_are_rejected() -> None:
    tables = tuple(replace(one, embedding_dim=8, pooling="none") for one in TABLES)
    data = json.loads(json.dumps(replace(MANIFEST, tables=tables).to_json()))
    with pytest.raises(StoreError, match="here: is_weighted, but rows that are not pooled have no"):
        Manifest.from_json(data, "here")


@pytest.mark.parametrize("data", [None, [], 1, {"format_version": 1}, {"format_version": "1"}])
def test_json_that_is_not_a_manifest_is_rejected(data: Any) -> None:
    with pytest.raises(StoreError, match="here: "):
        Manifest.from_json(data, "here")
