"""Descriptions are checked key by key; checkpoints are read and never run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.manifest import TableSpec
from embedserve_store.sources import (
    check_weight,
    find_tables,
    read_description,
    read_state_dict,
)

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
        ({"pooling": "SUM"}, r"tables\[0\]: pooling is 'SUM', expected sum or mean"),
        ({"dim": 4}, r"tables\[0\]: unknown key 'dim', known are name, num_embeddings, "),
        ({"num_embeddings": "10"}, r"tables\[0\]: num_embeddings is '10', expected int"),
        ({"num_embeddings": True}, r"tables\[0\]: num_embeddings is True, expected int"),
        ({"num_embeddings": 0}, r"num_embeddings is 0, expected 1 or more"),
        ({"embedding_dim": 6}, r"embedding_dim is 6: FBGEMM's kernels take multiples of 4"),
        ({"feature_names": "user"}, r"feature_names is 'user', expected list"),
        ({"feature_names": [1]}, r"feature_names is \[1\], expected a list of names"),
        ({"feature_names": []}, r"feature_names is \[\]: name a feature"),
        ({"dtype": "bfloat16"}, r"dtype is 'bfloat16', expected one of float32"),
        ({"name": "a/b"}, r"table name 'a/b': use letters"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
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
def test_a_wrong_description_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(InvalidModelError, match=message):
        read_description(tmp_path / "d.json")


def test_is_weighted_is_a_boolean(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="is_weighted is 'yes', expected bool"):
        read_description(write(tmp_path / "d.json", TABLE, is_weighted="yes"))


def test_two_tables_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="2 tables are named 'user'"):
        read_description(write(tmp_path / "d.json", TABLE, TABLE))


@pytest.mark.parametrize("name", ["d.json", "d.yaml"])
def test_a_description_that_does_not_parse(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{tables: [")
    with pytest.raises(StoreError, match=f"{name}: cannot be parsed: ") as caught:
        read_description(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(f"!!python/object/apply:os.mkdir ['{tmp_path}/ran']")
    with pytest.raises(StoreError, match="cannot be parsed"):
        read_description(tmp_path / "d.yaml")
    assert not (tmp_path / "ran").exists()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for read in (read_description, read_state_dict):
        with pytest.raises(StoreError, match="none: cannot be read: No such file"):
            read(tmp_path / "none")
        with pytest.raises(StoreError, match="cannot be read: Is a directory"):
            read(tmp_path)


def test_a_state_dict_comes_back(tmp_path: Path) -> None:
    weight = torch.randn(10, 4)
    torch.save({"ebc.embedding_bags.user.weight": weight, "step": 3}, tmp_path / "s.pt")
    state_dict = read_state_dict(tmp_path / "s.pt")
    assert torch.equal(state_dict["ebc.embedding_bags.user.weight"], weight)
    assert state_dict["step"] == 3


class Marker:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"weight": torch.ones(2), "x": Marker(marker)}, tmp_path / "s.pt")
    with pytest.raises(StoreError, match=r"s\.pt: refused: it holds \S*mkdir") as caught:
        read_state_dict(tmp_path / "s.pt")
    assert not marker.exists()
    assert "\n" not in str(caught.value)


def test_a_bare_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "s.pkl").write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(StoreError, match=r"not a state dict as torch\.save writes it"):
        read_state_dict(tmp_path / "s.pkl")
    assert not marker.exists()
    pickle.loads((tmp_path / "s.pkl").read_bytes())  # noqa: S301  the marker works
    assert marker.exists()


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(5000)}, tmp_path / "s.pt")
    whole = (tmp_path / "s.pt").read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "s.pt").write_bytes(whole[:size])
        with pytest.raises(StoreError, match=r"s\.pt: not a state dict as torch.save writes it"):
            read_state_dict(tmp_path / "s.pt")


def test_a_saved_tensor_is_not_a_state_dict(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "s.pt")
    with pytest.raises(StoreError, match="holds a Tensor, expected a state dict"):
        read_state_dict(tmp_path / "s.pt")


@pytest.mark.parametrize("nesting", [None, "state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "sparse.ebc."])
def test_tables_are_found_wherever_they_lie(nesting: str | None, prefix: str) -> None:
    weight = torch.ones(10, 4)
    key = f"{prefix}embedding_bags.user.weight"
    inner: dict[str, Any] = {key: weight, "over.weight": torch.ones(1)}
    outer = {nesting: inner, "epoch": 3} if nesting else inner | {"epoch": 3}
    found, skipped = find_tables(outer, (SPEC,))
    assert found["user"] is weight
    assert skipped == (f"{nesting}.over.weight" if nesting else "over.weight", "epoch")


def test_a_longer_table_name_is_no_match() -> None:
    with pytest.raises(
        InvalidModelError, match=r"table 'user': no key ends in 'embedding_bags\.user\.weight'"
    ):
        find_tables({"x_embedding_bags.user.weight": 1, "embedding_bags.a.user.weight": 1}, (SPEC,))


def test_two_matches_are_both_named() -> None:
    weight = torch.ones(10, 4)
    state_dict = {
        "a.embedding_bags.user.weight": weight,
        "model": {"embedding_bags.user.weight": weight},
    }
    with pytest.raises(
        InvalidModelError,
        match=r"a\.embedding_bags\.user\.weight, model\.embedding_bags\.user\.weight",
    ):
        find_tables(state_dict, (SPEC,))


class Sharded(torch.Tensor):
    """Stands for DTensor: a tensor that holds a part of the rows."""


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(10, 8), r"has shape \[10, 8\], described is \[10, 4\]"),
        (torch.ones(40), r"has shape \[40\], described"),
        (torch.ones(10, 4, dtype=torch.bfloat16), "is torch.bfloat16, expected torch.float32"),
        (torch.ones(10, 4, device="meta"), "has no data: torch.strided, meta"),
        (torch.ones(10, 4).to_sparse(), "has no data: torch.sparse_coo"),
        ([1.0], "is a list, expected a plain torch.Tensor"),
        (torch.ones(10, 4).as_subclass(Sharded), "is a Sharded, expected a plain torch.Tensor"),
    ],
)
def test_a_weight_that_is_not_the_tables_is_refused(weight: Any, message: str) -> None:
    with pytest.raises(InvalidModelError, match=f"table 'user': its weight .*{message}"):
        check_weight(SPEC, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_plain_weight_is_taken(dtype: torch.dtype) -> None:
    check_weight(SPEC, torch.ones(10, 4, dtype=dtype))
    check_weight(SPEC, torch.nn.Parameter(torch.ones(10, 4, dtype=dtype)))
