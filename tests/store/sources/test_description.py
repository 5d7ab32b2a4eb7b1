"""Tests of descriptions, which are checked key by key."""

import json
from pathlib import Path
from typing import Any

import pytest

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.sources.description import Description, read_description

TABLE = {
    "name": "user",
    "num_embeddings": 10,
    "embedding_dim": 4,
    "feature_names": ["user", "friend"],
    "pooling": "sum",
}
SPEC = TableSpec("user", 10, 4, ("user", "friend"), "sum", "float32")
YAML = """
is_weighted: true
tables:
  - {name: user, num_embeddings: 10, embedding_dim: 4, feature_names: [user, friend], pooling: sum}
  - name: item
    num_embeddings: 20
    embedding_dim: 8
    feature_names: [item]
    pooling: mean
    dtype: int8
"""
WORD = TABLE | {"name": "word", "feature_names": ["word"], "pooling": "none"}


def write(path: Path, *tables: Any, **other: Any) -> Path:
    path.write_text(json.dumps({"tables": tables, **other}))
    return path


def test_yaml_and_json_describe_tables(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(YAML)
    described = read_description(tmp_path / "d.yaml")
    assert described.is_weighted
    assert described.tables == (SPEC, TableSpec("item", 20, 8, ("item",), "mean", "int8"))
    plain = read_description(write(tmp_path / "d.json", TABLE))
    assert plain.tables == (SPEC,)
    assert not plain.is_weighted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": None}, r"tables\[0\]: pooling is missing"),
        ({"pooling": "SUM"}, r"tables\[0\]: pooling is 'SUM', expected sum, mean or none"),
        ({"dim": 4}, r"tables\[0\]: unknown key 'dim', known are name, num_embeddings, "),
        ({"num_embeddings": "10"}, r"tables\[0\]: num_embeddings is '10', expected int"),
        ({"num_embeddings": True}, r"tables\[0\]: num_embeddings is True, expected int"),
        ({"num_embeddings": 0}, r"num_embeddings is 0, expected 1 or more"),
        ({"embedding_dim": 0}, r"embedding_dim is 0, expected 1 or more"),
        ({"feature_names": "user"}, r"feature_names is 'user', expected list"),
        ({"feature_names": [1]}, r"feature_names is \[1\], expected a list of names"),
        ({"feature_names": []}, r"feature_names is \[\]: name a feature"),
        ({"dtype": "bfloat16"}, r"dtype is 'bfloat16', expected one of float32"),
        ({"name": "a/b"}, r"table name 'a/b': use letters"),
        ({"sharding": 3}, r"sharding is 3, expected str"),
        (
            {"ids": "modulo"},
            r"tables\[0\]: ids: found 'modulo', expected rule: NAME, one of rows, modulo, map",
        ),
        ({"ids": {"rule": "hash"}}, r"ids: found \{'rule': 'hash'\}, expected rule: NAME, one"),
        ({"ids": {"rule": "rows", "modulus": 3}}, r"ids by rows: unknown key 'modulus', known are"),
        ({"ids": {"rule": "modulo", "unknown": "skip"}}, r"ids by modulo: unknown key 'unknown'"),
        ({"ids": {"rule": "modulo", "modulus": "3"}}, r"ids: modulus is '3', expected int"),
        ({"ids": {"rule": "map"}}, r"ids by map: vocabulary is missing"),
        ({"ids": {"rule": "map", "vocabulary": 3}}, r"ids: vocabulary is 3, expected str"),
        (
            {"ids": {"rule": "map", "vocabulary": "v", "id_type": "uuid"}},
            r"ids: id_type is 'uuid', expected int64, string",
        ),
        ({"ids": {"rule": "rows", "unknown": "zero"}}, r"unknown is 'zero', expected error, skip"),
        ({"ids": {"rule": "rows", "unknown": "row"}}, r"unknown: row and default_row go together"),
        ({"ids": {"rule": "rows", "default_row": 1}}, r"unknown: row and default_row go together"),
        (
            {"ids": {"rule": "rows", "unknown": "row", "default_row": 10}},
            r"default_row is 10, the table has rows 0 to 9",
        ),
    ],
)
def test_invalid_table_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    table = {key: value for key, value in (TABLE | change).items() if value is not None}
    with pytest.raises(InvalidModelError, match=message):
        read_description(write(tmp_path / "d.json", table))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "found .*expected keys tables, is_weighted"),
        ("{}", "tables is missing"),
        ('{"tables": [], "weighted": true}', "unknown key 'weighted'"),
        ('{"tables": []}', "no tables"),
        ('{"tables": [7]}', r"tables\[0\]: found 7, expected keys name"),
        ('{"tables": [], "is_weighted": 1}', "no tables"),
    ],
)
def test_invalid_description_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(InvalidModelError, match=message):
        read_description(tmp_path / "d.json")


def test_is_weighted_must_be_a_boolean(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="is_weighted is 'yes', expected bool"):
        read_description(write(tmp_path / "d.json", TABLE, is_weighted="yes"))


def test_duplicate_table_name_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="2 tables are named 'user'"):
        read_description(write(tmp_path / "d.json", TABLE, TABLE))


@pytest.mark.parametrize("name", ["d.json", "d.yaml"])
def test_unparsable_description_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{tables: [")
    with pytest.raises(StoreError, match=f"{name}: cannot be parsed: ") as caught:
        read_description(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_two_drafts_in_one_file_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(YAML + YAML)
    with pytest.raises(InvalidModelError, match=r"d.yaml: .* line 12: key 'is_weighted' is there"):
        read_description(path)


def test_yaml_object_tags_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(f"!!python/object/apply:os.mkdir ['{tmp_path}/ran']")
    with pytest.raises(StoreError, match="cannot be parsed"):
        read_description(tmp_path / "d.yaml")
    assert not (tmp_path / "ran").exists()


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="none: cannot be read: No such file"):
        read_description(tmp_path / "none")
    message = r"cannot be read: Is a directory, expected a YAML or JSON file$"
    with pytest.raises(StoreError, match=message):
        read_description(tmp_path)


@pytest.mark.parametrize(
    ("ids", "rule"),
    [
        ({"rule": "rows"}, IdRule()),
        ({"rule": "rows", "unknown": "skip"}, IdRule(unknown="skip")),
        (
            {"rule": "rows", "unknown": "row", "default_row": 9},
            IdRule(unknown="row", default_row=9),
        ),
        ({"rule": "modulo"}, IdRule("modulo", modulus=10)),
        ({"rule": "modulo", "offset": 1}, IdRule("modulo", modulus=9, offset=1)),
        ({"rule": "modulo", "modulus": 7, "offset": 2}, IdRule("modulo", modulus=7, offset=2)),
        ({"rule": "map", "vocabulary": "v.txt"}, IdRule("map")),
        (
            {"rule": "map", "vocabulary": "v.txt", "id_type": "string", "unknown": "skip"},
            IdRule("map", id_type="string", unknown="skip"),
        ),
    ],
)
def test_id_settings_become_id_rules(tmp_path: Path, ids: dict[str, Any], rule: IdRule) -> None:
    (table,) = read_description(write(tmp_path / "d.json", TABLE | {"ids": ids})).tables
    assert table.ids == rule


def test_vocabulary_paths_are_relative_to_the_description(tmp_path: Path) -> None:
    described = read_description(
        write(
            tmp_path / "d.json",
            TABLE | {"ids": {"rule": "map", "vocabulary": "ids/user.txt"}},
            TABLE
            | {"name": "b", "feature_names": ["b"], "ids": {"rule": "map", "vocabulary": "/v"}},
            TABLE | {"name": "c", "feature_names": ["c"]},
        )
    )
    assert described.vocabularies == {"user": tmp_path / "ids/user.txt", "b": Path("/v")}


def test_sharding_is_kept_for_tables_that_specify_it(tmp_path: Path) -> None:
    other = TABLE | {"name": "b", "feature_names": ["b"]}
    path = write(tmp_path / "d.json", TABLE | {"sharding": "row_wise"}, other)
    assert read_description(path).sharding == {"user": "row_wise"}


def test_tables_without_pooling_form_an_embedding_collection(tmp_path: Path) -> None:
    (table,) = read_description(write(tmp_path / "d.json", WORD)).tables
    assert table.pooling == "none"
    with pytest.raises(InvalidModelError, match="'word' is not pooled and 'user' is"):
        read_description(write(tmp_path / "d.json", TABLE, WORD))


def test_handwritten_description_needs_only_tables() -> None:
    described = Description((SPEC,))
    assert not described.is_weighted
    assert not described.vocabularies
    assert not described.sharding
