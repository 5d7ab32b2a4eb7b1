"""Tests of the comparison with the training model's results: a wrong description is rejected with
the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store.conftest import small_collection
from store.listing import everything_under
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import (
    FROM_DESCRIPTION,
    FROM_TRAINING,
    PARTLY_FROM_TRAINING,
    Manifest,
)
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.expected import Expected, read_expected
from embedserve_store.goldens.goldens_file import Bags
from embedserve_store.local_store import LocalStore
from embedserve_store.publishing import expected_answers
from embedserve_store.publishing.expected_answers import GOLDEN_EXAMPLES_MAX
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.write_expected import expected_of, write_expected
from embedserve_store.sources import live

MakeEbc = Callable[..., EmbeddingBagCollection]


def twins() -> EmbeddingBagCollection:
    """Returns a collection of two tables with the same shape."""
    torch.manual_seed(3)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=name,
                num_embeddings=40,
                embedding_dim=8,
                feature_names=[name],
                pooling=PoolingType.SUM,
            )
            for name in ("a", "b")
        ]
    )


def state_of(module: torch.nn.Module) -> dict[str, Any]:
    return {f"m.ebc.{key}": value for key, value in module.state_dict().items()}


def described(module: Any, **changes: dict[str, Any]) -> Sequence[TableSpec]:
    """Returns the tables of ``module``, with the fields of ``changes`` by table name."""
    return [replace(table, **changes.get(table.name, {})) for table in live.describe(module)]


def publish_state(
    module: torch.nn.Module, store: Path, tables: Sequence[TableSpec], **options: Any
) -> str:
    """Publishes; returns the error, "" if there is none. After an error the store is unchanged."""
    before = everything_under(store)
    try:
        publish(state_of(module), store, model="m", tables=tables, **options)
    except InvalidModelError as error:
        assert everything_under(store) == before
        return str(error)
    return ""


@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_training_models_answers_are_the_goldens(
    make_ebc: MakeEbc, tmp_path: Path, is_weighted: bool
) -> None:
    ebc = make_ebc(is_weighted=is_weighted, pooling="sum" if is_weighted else None)
    write_expected(ebc, tmp_path / "e.safetensors")
    expected = read_expected(tmp_path / "e.safetensors")
    tables = described(ebc, item={"dtype": "int8"})
    publish(
        state_of(ebc),
        tmp_path / "store",
        model="m",
        tables=tables,
        is_weighted=is_weighted,
        expected=tmp_path / "e.safetensors",
    )
    version = LocalStore(tmp_path / "store").load("m")
    assert version.manifest.source["goldens"] == FROM_TRAINING
    goldens = version.goldens()
    np.testing.assert_array_equal(goldens.source_answers, expected.answers)
    np.testing.assert_array_equal(goldens.bags.ids, expected.bags.ids)
    assert np.abs(expected.answers).max() > 0
    assert goldens.bags.lengths.max() > 1


def test_without_them_that_is_said(make_ebc: MakeEbc, tmp_path: Path) -> None:
    ebc = make_ebc()
    tables = described(ebc)
    published = publish(state_of(ebc), tmp_path, model="m", tables=tables)
    assert published.manifest.source["goldens"] == FROM_DESCRIPTION
    assert publish(ebc, tmp_path, model="m").manifest.source["goldens"] == FROM_TRAINING


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            described(twins(), a={"pooling": "mean"}),
            r"key 'a' of table 'a', pooling mean: the training model's answers are others, off by "
            r".* where the largest is .*; they are those of table 'a', pooling sum$",
        ),
        (
            [replace(t, name={"a": "b", "b": "a"}[t.name]) for t in live.describe(twins())],
            r"key 'a' of table 'b', pooling sum: .*; they are those of table 'a', pooling sum$",
        ),
        (
            described(twins(), a={"feature_names": ("b",)}, b={"feature_names": ("a",)}),
            r"its keys are a, b, those of the description b, a: the same in another order$",
        ),
        (live.describe(twins())[::-1], r"its keys are a, b, those of the description b, a: the"),
        (live.describe(twins())[:1], r"its features are a, b, those of the description a$"),
        (
            described(twins(), a={"feature_names": ("x",)}),
            r"its features are a, b, those of the description x, b$",
        ),
    ],
    ids=["mean for sum", "tables swapped", "features swapped", "order", "one less", "names"],
)
def test_a_wrong_description_is_refused(
    tmp_path: Path, tables: Sequence[TableSpec], message: str
) -> None:
    ebc = twins()
    expected = expected_of(ebc)
    assert publish_state(ebc, tmp_path / "right", live.describe(ebc), expected=expected) == ""
    said = publish_state(ebc, tmp_path / "store", tables, expected=expected)
    with pytest.raises(InvalidModelError, match=message):
        raise InvalidModelError(said)
    assert publish_state(ebc, tmp_path / "store", tables) == ""  # no other check finds it


def test_other_weights_than_those_that_answered_are_refused(tmp_path: Path) -> None:
    before, after = twins(), twins()
    with torch.no_grad():
        after.embedding_bags["b"].weight += 1e-3
    said = publish_state(
        after, tmp_path / "store", live.describe(after), expected=expected_of(before)
    )
    assert "key 'b' of table 'b', pooling sum: the training model's answers are others" in said
    assert "they are those" not in said


def test_weights_that_the_description_has_not_are_refused(
    make_ebc: MakeEbc, tmp_path: Path
) -> None:
    weighted, plain = make_ebc(is_weighted=True, pooling="sum"), make_ebc(pooling="sum")
    for one, other, message in (
        (weighted, plain, "expected: has no weights, the description takes some (is_weighted)"),
        (plain, weighted, "expected: has weights, the description takes none (is_weighted)"),
    ):
        said = publish_state(
            one,
            tmp_path / "store",
            live.describe(one),
            is_weighted=one.is_weighted(),
            expected=expected_of(other),
        )
        assert said == message
    with pytest.raises(InvalidModelError, match="no answers of a weighted mean"):
        expected_of(make_ebc(is_weighted=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length_per_key": (8, 4)}, "expected: key 'b' has 4 values, the description 8"),
        ({"answers": np.zeros((3, 16), np.float32)}, "expected: answers is [3, 16], its bags and"),
    ],
)
def test_a_file_of_another_shape_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    ebc = twins()
    wrong = replace(expected_of(ebc), **change)
    assert message in publish_state(ebc, tmp_path, live.describe(ebc), expected=wrong)


@pytest.mark.parametrize("row", [-1, 40])
def test_a_row_that_is_not_there_is_refused(tmp_path: Path, row: int) -> None:
    ebc = twins()
    expected = expected_of(ebc)
    expected.bags.ids[-1] = row
    said = publish_state(ebc, tmp_path, live.describe(ebc), expected=expected)
    assert said == f"expected: feature 'b' asks for row {row}, its table has 40 rows"


def test_features_may_come_in_another_order(tmp_path: Path) -> None:
    ebc = twins()
    expected = expected_of(ebc)
    first = int(expected.bags.lengths[0].sum())
    bags = replace(
        expected.bags,
        ids=np.roll(expected.bags.ids, -first),
        lengths=expected.bags.lengths[::-1].copy(),
    )
    turned = replace(expected, features=("b", "a"), bags=bags)
    assert publish_state(ebc, tmp_path, live.describe(ebc), expected=turned) == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_of_halves_is_compared_as_closely_as_it_adds_up(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    ebc = twins().to(dtype)
    tables = live.describe(ebc)
    expected = expected_of(ebc)
    assert publish_state(ebc, tmp_path, tables, expected=expected) == ""
    mean = described(ebc, a={"pooling": "mean"})
    assert "pooling sum" in publish_state(ebc, tmp_path, mean, expected=expected)
    goldens = LocalStore(tmp_path).load("m").goldens()
    np.testing.assert_array_equal(goldens.source_answers, goldens.stored_answers)


def test_goldens_have_the_ids_that_callers_have(tmp_path: Path) -> None:
    ebc = twins()
    rules = {"a": IdRule("modulo", modulus=35, offset=5)}
    vocabularies = {"b": np.arange(1000, 1030)}  # ids of rows 0 to 29
    expected = expected_of(ebc)
    options = {"ids": rules, "vocabularies": vocabularies, "expected": expected}
    assert publish_state(ebc, tmp_path, live.describe(ebc), **options) == ""
    goldens = LocalStore(tmp_path).load("m").goldens()
    lengths = goldens.bags.lengths
    assert lengths.shape == expected.bags.lengths.shape
    left = (lengths == expected.bags.lengths) & (lengths > 0)
    assert left.any(axis=1).all()
    assert ((lengths == 0) | left).all()
    assert not left[:, 0].any()  # this example has rows 0 and 39
    for feature, columns in ((0, slice(0, 8)), (1, slice(8, 16))):
        answers = goldens.source_answers[:, columns]
        same = left[feature]
        np.testing.assert_array_equal(answers[same], expected.answers[same, columns])
        assert not answers[~same].any()
    b_ids = goldens.bags.ids[lengths[0].sum() :]
    assert b_ids.size
    assert ((b_ids >= 1000) & (b_ids < 1030)).all()


def test_where_no_row_has_an_id_there_are_no_goldens(tmp_path: Path) -> None:
    ebc = twins()
    said = publish_state(
        ebc,
        tmp_path,
        live.describe(ebc),
        vocabularies={"a": {"never": 38}, "b": {"never": 38}},
        ids={name: IdRule("map", id_type="string") for name in "ab"},
        expected=first_example(expected_of(ebc)),
    )
    assert said == "expected: each of its bags has a row that no id of a caller means"


def first_example(expected: Expected) -> Expected:
    """Returns only the first example, which has two rows of each feature, the first and the
    last."""
    starts = np.cumsum(expected.bags.lengths.sum(axis=1)) - expected.bags.lengths.sum(axis=1)
    ids = np.concatenate([expected.bags.ids[start : start + 2] for start in starts])
    bags = replace(expected.bags, ids=ids, lengths=expected.bags.lengths[:, :1].copy())
    return replace(expected, bags=bags, answers=expected.answers[:1])


def test_rows_of_an_embedding_collection(tmp_path: Path) -> None:
    torch.manual_seed(5)
    configs = [
        EmbeddingConfig(name=name, num_embeddings=20, embedding_dim=4, feature_names=features)
        for name, features in (("a", ["x", "y"]), ("b", ["y"]))
    ]
    ec = EmbeddingCollection(tables=configs)
    expected = expected_of(ec)
    assert expected.keys == ("x", "y@a", "y@b")
    state = {f"ec.{key}": value for key, value in ec.state_dict().items()}
    right = live.describe(ec)
    options: dict[str, Any] = {"model": "m", "expected": expected}
    publish(state, tmp_path, tables=right, vocabularies={"a": range(15), "b": range(15)}, **options)
    version = LocalStore(tmp_path).load("m")
    assert version.manifest.source["goldens"] == FROM_TRAINING
    goldens = version.goldens()
    assert 0 < goldens.bags.lengths.sum() < expected.bags.lengths.sum()
    assert len(goldens.source_answers) < len(expected.answers)
    swapped = [replace(t, name={"a": "b", "b": "a"}[t.name]) for t in right]
    with pytest.raises(InvalidModelError, match=r"keys are x, y@a, y@b, those of the .* y@b, y@a"):
        publish(state, tmp_path, tables=swapped, **options)


def test_a_live_module_is_its_own_witness(tmp_path: Path) -> None:
    ebc = small_collection()
    publish(ebc, tmp_path, model="m", expected=expected_of(ebc))
    with torch.no_grad():
        ebc.embedding_bags["tag"].weight *= 2
    with pytest.raises(InvalidModelError, match="key 'tag' of table 'tag', pooling sum: the train"):
        publish(ebc, tmp_path, model="m", expected=expected_of(small_collection()))


def inputs(expected: Expected, lengths: list[list[int]]) -> Expected:
    """Returns other inputs for the tables "a" and "b" of 40 rows: ids 0, 1, 2, … of each
    feature."""
    counts = np.array(lengths, np.int32)
    ids = np.concatenate([np.arange(sum(one), dtype=np.int64) for one in lengths])
    bags = Bags(ids, counts, None)
    return replace(expected, bags=bags, answers=np.zeros(0, np.float32))


@pytest.mark.parametrize(
    ("lengths", "unchecked"),
    [
        ([[1, 1, 0], [2, 0, 3]], ["feature 'a' has no bag of two ids, so that a sum is a mean"]),
        ([[2, 0, 0], [0, 0, 0]], ["feature 'b' has no id"]),
        (
            [[0, 0, 0], [1, 1, 1]],
            ["feature 'a' has no id", "feature 'b' has no bag of two ids, so that a sum is a mean"],
        ),
    ],
)
def test_inputs_that_cannot_tell_are_refused_unless_that_is_accepted(
    tmp_path: Path, lengths: list[list[int]], unchecked: list[str]
) -> None:
    ebc = twins()
    given = inputs(expected_of(ebc), lengths)
    manifest = Manifest("", 0, live.describe(ebc), is_weighted=False)
    given = replace(given, answers=live.answers(ebc, manifest, given.bags))
    tables = described(ebc)
    said = publish_state(ebc, tmp_path, tables, expected=given)
    assert said.startswith(f"expected: {'; '.join(unchecked)}: use inputs that can tell")
    assert "--accept-unchecked" in said
    publish(
        state_of(ebc), tmp_path, model="m", tables=tables, expected=given, accept_unchecked=True
    )
    source = LocalStore(tmp_path).load("m").manifest.source
    assert source["goldens"] == PARTLY_FROM_TRAINING
    compared = source["compared"]
    assert compared == {
        "examples": 3,
        "rows": {"a": sum(lengths[0]), "b": sum(lengths[1])},
        "pooling": {key: "sum" for key in "ab" if not any(repr(key) in one for one in unchecked)},
        "unchecked": unchecked,
    }


def answered(
    module: EmbeddingBagCollection, lengths: list[list[int]], weight: float | None = None
) -> Expected:
    """Returns the results of ``module`` for bags of these lengths. The ids of each feature are 0,
    1, 2, … modulo 40."""
    manifest = Manifest("", 0, live.describe(module), weight is not None)
    ids = np.concatenate([np.arange(sum(one), dtype=np.int64) % 40 for one in lengths])
    weights = None if weight is None else np.full(len(ids), weight, np.float32)
    bags = Bags(ids, np.array(lengths, np.int32), weights)
    answers = live.answers(module, manifest, bags)
    return Expected(manifest.features, manifest.keys, manifest.length_per_key, bags, answers)


def test_rows_of_zeros_cannot_tell(tmp_path: Path) -> None:
    ebc = twins()
    with torch.no_grad():
        ebc.embedding_bags["b"].weight[:3] = 0
    reason = "expected: feature 'b' has rows of which a sum is a mean, such as zeros: use inputs"
    given = answered(ebc, [[2, 1], [2, 1]])
    for pooling in ("sum", "mean"):
        tables = described(ebc, b={"pooling": pooling})
        assert publish_state(ebc, tmp_path, tables, expected=given).startswith(reason)
    given = answered(ebc, [[2, 1], [2, 3]])
    assert publish_state(ebc, tmp_path, live.describe(ebc), expected=given) == ""


def test_weights_that_change_nothing_cannot_tell(make_ebc: MakeEbc, tmp_path: Path) -> None:
    ebc = make_ebc(is_weighted=True, pooling="sum")
    options: dict[str, Any] = {"is_weighted": True}
    given = answered(ebc, [[2, 3]] * 4, 1.0)
    said = publish_state(ebc, tmp_path, live.describe(ebc), expected=given, **options)
    assert said.startswith("expected: the answers are the same without weights: use inputs")
    given = answered(ebc, [[2, 3]] * 4, 0.5)
    assert publish_state(ebc, tmp_path, live.describe(ebc), expected=given, **options) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_checksums_no_row_that_changed_is_published(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    ebc = twins().to(dtype)
    write_expected(ebc, tmp_path / "all", rows="all")
    write_expected(ebc, tmp_path / "sampled")
    state = state_of(ebc)
    sampled = set(read_expected(tmp_path / "sampled").bags.ids.tolist())
    row = next(row for row in range(40) if row not in sampled)
    key = "m.ebc.embedding_bags.b.weight"
    wrong = state | {key: state[key].clone()}
    wrong[key][row] += 1000
    options: dict[str, Any] = {"model": "m", "tables": described(ebc, a={"dtype": "int8"})}
    store = tmp_path / "store"
    publish(wrong, store, expected=tmp_path / "sampled", **options)
    before = everything_under(store)
    with pytest.raises(InvalidModelError, match=f"^expected: row {row} of table 'b' is not the tr"):
        publish(wrong, store, expected=tmp_path / "all", **options)
    assert everything_under(store) == before
    published = publish(state, store, expected=tmp_path / "all", **options)
    assert published.manifest.source["compared"]["rows"] == {"a": 40, "b": 40}


def test_checksums_of_other_tables_are_refused(tmp_path: Path) -> None:
    ebc = twins()
    expected = expected_of(ebc, rows="all")
    for checksums, message in (
        ({"c": expected.checksums["a"]}, "has checksums of table 'c', the description has a, b"),
        (
            {"a": expected.checksums["a"][:39]},
            "has checksums of 39 rows of table 'a', the description has 40",
        ),
    ):
        wrong = replace(expected, checksums=checksums)
        said = publish_state(ebc, tmp_path, live.describe(ebc), expected=wrong)
        assert said == f"expected: {message}"
    with pytest.raises(InvalidModelError, match="rows is 'some', expected 'sampled' or 'all'"):
        expected_of(ebc, rows="some")  # type: ignore[arg-type]


def test_goldens_are_the_first_of_many_examples(tmp_path: Path) -> None:
    ebc = twins()
    expected = answered(ebc, [[2] * 20_000, [1, 2] * 10_000])
    assert publish_state(ebc, tmp_path, described(ebc), expected=expected) == ""
    version = LocalStore(tmp_path).load("m")
    assert version.manifest.source["compared"]["examples"] == 20_000
    goldens = version.goldens()
    lengths = goldens.bags.lengths
    assert lengths.tolist() == [[2] * GOLDEN_EXAMPLES_MAX, [1, 2] * (GOLDEN_EXAMPLES_MAX // 2)]
    first, second = (expected.bags.span(i).start for i in range(2))
    ids = expected.bags.ids
    assert np.array_equal(
        goldens.bags.ids, [*ids[first : first + 20_000], *ids[second : second + 15_000]]
    )
    assert np.array_equal(goldens.source_answers, expected.answers[:GOLDEN_EXAMPLES_MAX])
    changed = expected.answers.copy()
    changed[-1] += 1  # an example that is no golden
    wrong = replace(expected, answers=changed)
    assert "answers are others" in publish_state(ebc, tmp_path, described(ebc), expected=wrong)


@pytest.mark.parametrize(
    ("limit", "value", "examples"),
    [("GOLDEN_IDS_MAX", 7, 1), ("GOLDEN_IDS_MAX", 8, 2), ("GOLDEN_BYTES_MAX", 2 * 72, 2)],
)
def test_goldens_stay_within_ids_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, examples: int
) -> None:
    """An example has 2 lengths and 16 values."""
    monkeypatch.setattr(expected_answers, limit, value)
    ebc = twins()
    expected = answered(ebc, [[2, 2, 2], [2, 2, 2]])
    assert publish_state(ebc, tmp_path, described(ebc), expected=expected) == ""
    goldens = LocalStore(tmp_path).load("m").goldens()
    assert goldens.bags.lengths.tolist() == [[2] * examples] * 2
    assert np.array_equal(goldens.source_answers, expected.answers[:examples])


def test_first_examples_without_ids_are_no_goldens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_answers, "GOLDEN_IDS_MAX", 9)
    ebc = twins()
    expected = answered(ebc, [[0, 8, 2], [0, 2, 0]])
    said = publish_state(ebc, tmp_path, described(ebc), expected=expected)
    assert said.startswith("expected: its first 1 examples have no ids that callers have, and")


def test_goldens_of_an_embedding_collection_are_cut_key_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [
        EmbeddingConfig(name=name, num_embeddings=20, embedding_dim=4, feature_names=features)
        for name, features in (("a", ["x", "y"]), ("b", ["y"]))
    ]
    ec = EmbeddingCollection(tables=configs)
    expected = expected_of(ec)
    x, y = expected.bags.lengths
    monkeypatch.setattr(expected_answers, "GOLDEN_IDS_MAX", x[0] + 2 * y[0])
    publish(ec, tmp_path, model="m", expected=expected)
    goldens = LocalStore(tmp_path).load("m").goldens()
    assert goldens.bags.lengths.tolist() == [[2, 0], [2, 0]]
    np.testing.assert_array_equal(goldens.source_answers, goldens.stored_answers)
    ids = expected.bags.ids
    assert np.array_equal(goldens.bags.ids, [*ids[:2], *ids[x.sum() : x.sum() + 2]])


def test_what_write_expected_makes_can_tell(make_ebc: MakeEbc, tmp_path: Path) -> None:
    ebc = make_ebc()
    published = publish(
        state_of(ebc), tmp_path, model="m", tables=described(ebc), expected=expected_of(ebc)
    )
    compared = published.manifest.source["compared"]
    assert compared["unchecked"] == []
    poolings = {one.key: one.table.pooling for one in published.manifest.columns}
    assert compared["pooling"] == poolings
    assert all(
        0 < compared["rows"][one.name] <= one.num_embeddings for one in published.manifest.tables
    )
    assert repr(published) == f"<PublishedVersion m version 1 in {published.where}>"
