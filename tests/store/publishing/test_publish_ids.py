"""Tests of a publish with rules of ids: each table keeps its rule, and wrong rules and vocabularies
are rejected."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pooled import collection
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from unpooled import unpooled_collection

from embedserve_store import IdRule, ModelStore, ModelVersion, publish, verify
from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import FROM_TRAINING
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.reference_pooling import row_numbers
from embedserve_store.publishing.publish_sharded import publish_sharded

TAGS = [f"tag {row}" for row in range(16)]
ITEMS = {10**12 + row: 76 - row for row in range(77)}


def load(store: Path) -> ModelVersion:
    version = ModelStore(store).load("m")
    verify(version)
    return version


@pytest.fixture
def ebc() -> EmbeddingBagCollection:
    """Returns a collection like that of make_ebc, in which no feature has two tables."""
    return collection(
        [
            ("user", 300, 16, ["user", "friend"], PoolingType.SUM),
            ("item", 77, 8, ["item"], PoolingType.SUM),
            ("tag", 16, 4, ["tag"], PoolingType.SUM),
        ]
    )


def test_every_id_rule_is_stored_and_used_by_the_goldens(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    publish(
        ebc,
        tmp_path,
        model="m",
        ids={
            "user": IdRule(rule="modulo", modulus=299, offset=1),
            "item": IdRule(rule="map", unknown="skip"),
            "tag": IdRule(rule="map", id_type="string", unknown="row", default_row=3),
        },
        vocabularies={"item": ITEMS, "tag": TAGS},
    )
    version = load(tmp_path)
    user, item, tag = (table.ids for table in version.manifest.tables)
    assert user == IdRule(rule="modulo", modulus=299, offset=1)
    assert (item.entries, item.unknown, item.id_type) == (77, "skip", "int64")
    assert (tag.entries, tag.default_row, tag.examples) == (16, 3, tuple(TAGS[:4]))
    bags = version.goldens().bags
    ids = dict(
        zip(
            version.manifest.features,
            np.split(bags.ids, np.cumsum(bags.lengths.sum(axis=1))[:-1]),
            strict=True,
        )
    )
    assert ids["user"].min() < 0
    assert ids["user"].max() > 300
    assert set(ids["item"].tolist()) <= ITEMS.keys()
    numbers = row_numbers(bags, version.translator)
    limits = np.repeat(version.manifest.rows_per_feature, bags.lengths.sum(axis=1))
    assert (numbers < limits).all()
    assert {ITEMS[i] for i in ids["item"].tolist()} <= set(numbers.tolist())


def test_vocabulary_maps_ids_to_rows_in_reverse_order(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    """The map decides the row of each id, and the result is that row's."""
    publish(ebc, tmp_path, model="m", vocabularies={"item": ITEMS})
    version = load(tmp_path)
    rows = version.id_maps["item"].rows_of(np.array([10**12, 10**12 + 76, 5]))
    assert rows.tolist() == [76, 0, -1]


def test_default_modulus_is_the_number_of_rows(ebc: EmbeddingBagCollection, tmp_path: Path) -> None:
    publish(ebc, tmp_path, model="m", ids={"item": IdRule(rule="modulo")})
    assert load(tmp_path).manifest.tables[1].ids.modulus == 77


@pytest.mark.parametrize(
    ("ids", "vocabularies", "message"),
    [
        ({"item": IdRule(rule="modulo", modulus=78)}, {}, "table 'item': ids: modulus is 78"),
        ({"item": IdRule(unknown="row", default_row=77)}, {}, "default_row is 77"),
        ({"item": IdRule(rule="hash")}, {}, "rule is 'hash'"),
        ({"item": IdRule(rule="modulo", modulus=7)}, {"item": [1]}, "it has a vocabulary"),
        ({}, {"item": range(78)}, "its vocabulary says row 77, the table has 77 rows"),
        ({}, {"item": {5: -1}}, "its vocabulary says row -1"),
        ({}, {"item": [1, 2, 1]}, "table 'item'.*1"),
        ({}, {"item": []}, "table 'item': its vocabulary holds no ids"),
        ({}, {"item": {}}, "table 'item': its vocabulary holds no ids"),
        ({}, {"item": {1: 1.7}}, "its vocabulary says row 1.7, expected an integer"),
        ({}, {"item": {1: "x"}}, "its vocabulary says row 'x', expected an integer"),
        ({}, {"item": {1: 2**70}}, "its vocabulary says row 77"),
        ({}, {"item": np.zeros((2, 2), np.int64)}, "its vocabulary holds int64"),
        ({"item": IdRule(rule="modulo", offset=77)}, {}, "offset is 77, expected 0 to 76"),
        ({}, {"item": [0.5]}, "its vocabulary holds float64, expected int64"),
        ({}, {"item": np.array([2**63], np.uint64)}, "9223372036854775808, which is outside int64"),
        ({"tag": IdRule("map", id_type="string")}, {"tag": ["a", 1]}, "1, which is not a string"),
        ({"tag": IdRule("map", id_type="string")}, {"tag": ["a", "b", "a"]}, "'a' 2 times"),
        ({"tag": IdRule("map", id_type="string")}, {"tag": ["\ud800"]}, "is no text"),
    ],
)
def test_invalid_id_rules_leave_the_store_unchanged(
    ebc: EmbeddingBagCollection, tmp_path: Path, ids: Any, vocabularies: Any, message: str
) -> None:
    with pytest.raises(InvalidModelError, match=message):
        publish(ebc, tmp_path / "store", model="m", ids=ids, vocabularies=vocabularies)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("id_type", ["int64", "string"])
def test_empty_vocabulary_file_is_rejected_by_its_path(
    ebc: EmbeddingBagCollection, tmp_path: Path, id_type: str
) -> None:
    path = tmp_path / "ids.txt"
    path.touch()
    with pytest.raises(InvalidModelError, match=r"table 'item': .*ids\.txt: holds no ids"):
        publish(
            ebc,
            tmp_path / "store",
            model="m",
            ids={"item": IdRule("map", id_type=id_type)},
            vocabularies={"item": path},
        )


def test_tables_of_a_shared_feature_need_the_same_id_rule(make_ebc: Any, tmp_path: Path) -> None:
    """Feature item has the tables item and tag."""
    ebc = make_ebc()
    with pytest.raises(InvalidModelError, match="feature 'item' serves tables 'item' and 'tag'"):
        publish(ebc, tmp_path, model="m", vocabularies={"item": range(16)})
    different = {"item": range(16), "tag": range(15, -1, -1)}
    with pytest.raises(InvalidModelError, match="whose vocabularies differ"):
        publish(ebc, tmp_path, model="m", vocabularies=different)
    in_another_order: dict[str, Any] = {"item": {"b": 1, "a": 0}, "tag": ["a", "b"]}
    strings = dict.fromkeys(("item", "tag"), IdRule(rule="map", id_type="string"))
    publish(ebc, tmp_path, model="s", ids=strings, vocabularies=in_another_order)
    assert (
        publish(
            ebc, tmp_path, model="m", vocabularies={"item": range(16), "tag": range(16)}
        ).version
        == 1
    )
    load(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_embedding_collection_is_published_unpooled(tmp_path: Path, dtype: str) -> None:
    ec = unpooled_collection([("t0", 20, ["f0"]), ("t1", 21, ["f1"])])
    publish(ec, tmp_path, model="m", dtype=dtype, vocabularies={"t1": [5]})
    version = load(tmp_path)
    assert not version.manifest.is_pooled
    goldens = version.goldens()
    numbers = row_numbers(goldens.bags, version.translator)
    first = int(goldens.bags.lengths[0].sum())
    assert set(goldens.bags.ids[first:].tolist()) == {5}
    rows = [ec.embeddings[name].weight.detach().numpy() for name in ("t0", "t1")]
    expected = np.concatenate([rows[0][numbers[:first]], rows[1][numbers[first:]]])
    np.testing.assert_array_equal(goldens.source_answers, expected)
    tolerance = 0 if dtype == "float32" else 0.1
    np.testing.assert_allclose(goldens.stored_answers, expected, atol=tolerance)


def test_state_dict_of_an_embedding_collection_is_published(tmp_path: Path) -> None:
    ec = unpooled_collection([("t0", 20, ["f0"])])
    published = publish(ec, tmp_path, model="a")
    again = publish(
        {f"seq.{key}": value for key, value in ec.state_dict().items()},
        tmp_path,
        model="m",
        tables=published.manifest.tables,
    )
    assert again.manifest.tables == published.manifest.tables


SLOTS = ("sorted_raw_ids", "remapped_ids_mapping")


def managed_collisions() -> ManagedCollisionEmbeddingBagCollection:
    config = EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    module = MCHManagedCollisionModule(
        device=torch.device("cpu"),
        zch_size=8,
        eviction_policy=LFU_EvictionPolicy(),
        eviction_interval=10,
    )
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=[config]), ManagedCollisionCollection({"t": module}, [config])
    )


def test_table_with_managed_collisions_needs_a_vocabulary(tmp_path: Path) -> None:
    torch.save(torch.nn.ModuleDict({"mc": managed_collisions()}).state_dict(), tmp_path / "mc.pt")
    tables = [TableSpec("t", 8, 4, ("f",), "sum", "float32")]
    source = tmp_path / "mc.pt"
    for ids in ({}, {"t": IdRule(rule="modulo")}):
        with pytest.raises(
            InvalidModelError,
            match=r"'t': mc\._managed_collision_collection beside it maps .* with a vocabulary",
        ):
            publish(source, tmp_path / "store", tables=tables, model="m", ids=ids)
        assert not (tmp_path / "store").exists()
    slots = {"t": {10**15 + 1: 0, 10**15 + 2: 5}}
    publish(source, tmp_path / "store", tables=tables, model="m", vocabularies=slots)
    assert load(tmp_path / "store").manifest.tables[0].ids.entries == 2


def test_slots_of_live_managed_collisions_are_a_vocabulary(tmp_path: Path) -> None:
    mc: Any = managed_collisions()
    reason = r"pass the collection itself, with a vocabulary .* its rows by push_rows alone\)"
    with pytest.raises(InvalidModelError, match=reason):
        publish(mc, tmp_path, model="m")
    to_rows = mc._managed_collision_collection
    ids = torch.arange(7000, 7009)
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(9, dtype=torch.int32))
    for _ in range(12):
        to_rows(features)  # the table has slots for some of the ids
    module = to_rows.eval()._managed_collision_modules["t"].state_dict()
    pairs = zip(*(module[f"_mch_{name}"].tolist() for name in SLOTS), strict=True)
    slots = {key: row for key, row in pairs if key < 2**63 - 1}
    assert 0 < len(slots) < len(ids)
    published = publish(
        mc._embedding_module,
        tmp_path,
        model="m",
        ids={"t": IdRule(rule="map", unknown="row", default_row=7)},
        vocabularies={"t": slots},
    )
    assert published.manifest.source["goldens"] == FROM_TRAINING
    found = load(tmp_path).translator.translate(ids.numpy(), np.array([9])).rows
    assert np.array_equal(found, to_rows(features)["f"].values().numpy())


def test_publish_sharded_rejects_an_unsharded_module(
    ebc: EmbeddingBagCollection, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModelError, match="no sharded"):
        publish_sharded(ebc, tmp_path, model="m")
    assert list(tmp_path.iterdir()) == []
