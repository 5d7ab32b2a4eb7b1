"""Tests of a rejected publish: the error names the cause, and the store stays unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from store.conftest import MakeEbc
from store.listing import everything_under
from torchrec import EmbeddingBagCollection

from embedserve_store.errors import InvalidModelError, StoreError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.model_version import ModelVersion
from embedserve_store.publishing.publish import check_options, publish
from embedserve_store.publishing.publish_sharded import publish_sharded
from embedserve_store.sources import live
from embedserve_store.sources.description import read_description

DRAFT = """
tables:  # check: answers are in this order
  - {name: user, num_embeddings: 10, embedding_dim: 4, feature_names: [user], pooling: sum}
"""


def test_url_given_as_a_path_is_rejected(
    ebc: EmbeddingBagCollection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidModelError, match="store is 's3:/b/x': give a URL as a str"):
        publish(ebc, Path("s3://b/x"), model="m")
    assert list(tmp_path.iterdir()) == []


def test_draft_description_needs_accept_draft(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text(DRAFT)
    draft = read_description(str(tmp_path / "d.yaml"))
    state = {"embedding_bags.user.weight": torch.ones(10, 4)}
    with pytest.raises(InvalidModelError, match=r"d\.yaml: line 2, 'tables:  # check: .*guessed"):
        publish(state, tmp_path / "store", model="m", tables=draft)
    assert not (tmp_path / "store").exists()
    publish(state, tmp_path / "store", model="m", tables=draft, accept_draft=True)


def test_changed_layout_needs_layout_changed(make_ebc: MakeEbc, tmp_path: Path) -> None:
    publish(make_ebc(), tmp_path, model="m")
    before = everything_under(tmp_path)
    with pytest.raises(InvalidModelError) as caught:
        publish(make_ebc(pooling="mean"), tmp_path, model="m")
    assert "has another layout than version 1: key 'user': pooling sum to mean; " in str(
        caught.value
    )
    assert everything_under(tmp_path) == before
    assert publish(make_ebc(), tmp_path, model="m", dtype="int8").version == 2
    changed = make_ebc(pooling="mean")
    assert publish(changed, tmp_path, model="m", layout_changed=True).version == 3
    assert publish(make_ebc(pooling="mean"), tmp_path, model="m").version == 4


def test_damaged_previous_version_needs_layout_changed(
    ebc: EmbeddingBagCollection, version: ModelVersion
) -> None:
    store = version.path.parent.parent
    (version.path / "manifest.json").write_text("{")
    with pytest.raises(InvalidModelError, match=r"cannot be compared \(.*manifest.json: not JSON"):
        publish(ebc, store, model="m")
    assert publish(ebc, store, model="m", layout_changed=True).version == 2


def test_weights_on_the_meta_device_are_rejected(make_ebc: MakeEbc, tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"table 'user': its weight is on meta, "):
        publish(make_ebc().to("meta"), tmp_path, model="m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int2"}, "table 'user': dtype is 'int2', expected one of float32"),
        ({"dtype": {"usr": "int8"}}, "dtype names table 'usr', the model has user, item, tag$"),
        ({"sharding": "grid"}, "table 'user': sharding is 'grid'"),
        ({"sharding": {"usr": "row_wise"}}, "sharding names table 'usr'"),
        ({"ids": {"usr": IdRule()}}, "ids names table 'usr'"),
        ({"vocabularies": {"usr": [1]}}, "vocabularies names table 'usr'"),
        ({"ids": {"tag": IdRule(rule="map")}}, "table 'tag': ids.rule is 'map': it needs a voc"),
        ({"prefix": "model"}, "EmbeddingCollection under 'model', found EmbeddingBagCollection"),
        ({"tables": []}, "a module describes itself"),
        ({"world_size": 0}, "world_size is 0"),
        ({"model": "../m"}, r"model name '\.\./m': use letters"),
        ({"model": ".m"}, r"model name '\.m'"),
        ({"model": ""}, "model name ''"),
    ],
)
def test_invalid_options_leave_the_store_unchanged(
    ebc: EmbeddingBagCollection, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidModelError, match=message):
        publish(ebc, tmp_path / "store", **({"model": "m"} | options))
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, None),
        ({"dtype": "int2"}, "dtype is 'int2'"),
        ({"dtype": {"usr": "int8"}}, "dtype names table 'usr'"),
        ({"sharding": "grid"}, "table 'user': sharding is 'grid'"),
        ({"world_size": 0}, "world_size is 0"),
        ({"model": "../m"}, "model name"),
        ({"store": "file"}, "file/m: cannot be written: .*file is not a folder"),
    ],
)
def test_check_options_validates_without_weights(
    ebc: EmbeddingBagCollection, tmp_path: Path, options: dict[str, Any], message: str | None
) -> None:
    (tmp_path / "file").write_text("")
    given: dict[str, Any] = {"model": "m", "dtype": "int8", "sharding": "row_wise", "world_size": 2}
    given |= options
    store = tmp_path / given.pop("store", "store")
    if message is None:
        check_options(live.describe(ebc), store, **given)
    else:
        with pytest.raises(StoreError, match=message):
            check_options(live.describe(ebc), store, **given)
    assert everything_under(tmp_path) == ["file"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_non_finite_rows_are_rejected(
    ebc: EmbeddingBagCollection,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: float,
    dtype: str,
) -> None:
    monkeypatch.setattr("embedserve_store.publishing.version_writer.BLOCK_BYTES", 500)
    ebc.embedding_bags["item"].weight.data[70, 3] = value
    with pytest.raises(InvalidModelError, match=f"table 'item': row 70 holds {value}"):
        publish(ebc, tmp_path, model="m", dtype=dtype)
    assert everything_under(tmp_path) == []


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_rows_beyond_the_range_of_the_dtype_are_rejected(
    ebc: EmbeddingBagCollection, tmp_path: Path, dtype: str
) -> None:
    ebc.embedding_bags["user"].weight.data[299] = -3e38  # the block's sum overflows
    with pytest.raises(InvalidModelError, match=f"row 299 holds values too large for {dtype}"):
        publish(ebc, tmp_path, model="m", dtype=dtype)
    publish(ebc, tmp_path, model="m", dtype="float32")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_whose_sums_overflow_are_rejected(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    ebc.embedding_bags["user"].weight.data[:] = 3e38
    with pytest.raises(InvalidModelError, match=r"'user' hold inf: .* the sum of a bag is beyond"):
        publish(ebc, tmp_path, model="m")
    assert everything_under(tmp_path) == []


def test_tensor_with_the_negative_bit_is_rejected(tmp_path: Path) -> None:
    """The bytes are the negatives of the values."""
    negated = torch.complex(torch.rand(8, 4), torch.rand(8, 4)).conj().imag
    torch.save({"embedding_bags.t.weight": negated}, tmp_path / "m.pt")
    tables = [TableSpec("t", 8, 4, ("t",), "sum", "float32")]
    with pytest.raises(InvalidModelError, match="table 't'"):
        publish(tmp_path / "m.pt", tmp_path / "store", model="m", tables=tables)


def test_oversized_table_is_rejected_by_name(tmp_path: Path) -> None:
    tables = [TableSpec("t", 9 * 10**18, 4, ("t",), "sum", "float32")]
    with pytest.raises(StoreError, match="table 't': num_embeddings is 9000000000000000000"):
        check_options(tables, tmp_path, model="m", dtype="int8", sharding="row_wise", world_size=1)


@pytest.mark.parametrize("publish", [publish, publish_sharded])
def test_unknown_option_raises_type_error(
    publish: Any, ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'sharing'"):
        publish(ebc, tmp_path / "store", model="m", sharing="row_wise")

    assert not (tmp_path / "store").exists()
