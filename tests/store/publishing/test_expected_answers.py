"""Tests of the comparison with the training model's results: a wrong description is rejected with
the reason."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from store.conftest import MakeEbc, small_collection
from store.listing import everything_under
from store.publishing.expected_results import (
    described,
    expected_results_of,
    publish_state,
    state_of,
    twins,
)

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.manifest import PARTLY_FROM_TRAINING
from embedserve_store.format.table_spec import TableSpec
from embedserve_store.goldens.expected import read_expected
from embedserve_store.local_store import LocalStore
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.write_expected import expected_of, write_expected
from embedserve_store.sources import live


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
def test_wrong_description_is_rejected_with_the_reason(
    tmp_path: Path, tables: Sequence[TableSpec], message: str
) -> None:
    ebc = twins()
    expected = expected_of(ebc)
    assert publish_state(ebc, tmp_path / "right", live.describe(ebc), expected=expected) == ""
    error = publish_state(ebc, tmp_path / "store", tables, expected=expected)
    with pytest.raises(InvalidModelError, match=message):
        raise InvalidModelError(error)
    assert publish_state(ebc, tmp_path / "store", tables) == ""  # no other check finds it


def test_weights_that_differ_from_the_trained_are_rejected(tmp_path: Path) -> None:
    before, after = twins(), twins()
    with torch.no_grad():
        after.embedding_bags["b"].weight += 1e-3
    error = publish_state(
        after, tmp_path / "store", live.describe(after), expected=expected_of(before)
    )
    assert "key 'b' of table 'b', pooling sum: the training model's answers are others" in error
    assert "they are those" not in error


def test_is_weighted_mismatch_is_rejected(make_ebc: MakeEbc, tmp_path: Path) -> None:
    weighted, plain = make_ebc(is_weighted=True, pooling="sum"), make_ebc(pooling="sum")
    for one, other, message in (
        (weighted, plain, "expected: has no weights, the description takes some (is_weighted)"),
        (plain, weighted, "expected: has weights, the description takes none (is_weighted)"),
    ):
        error = publish_state(
            one,
            tmp_path / "store",
            live.describe(one),
            is_weighted=one.is_weighted(),
            expected=expected_of(other),
        )
        assert error == message
    with pytest.raises(InvalidModelError, match="no answers of a weighted mean"):
        expected_of(make_ebc(is_weighted=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length_per_key": (8, 4)}, "expected: key 'b' has 4 values, the description 8"),
        ({"answers": np.zeros((3, 16), np.float32)}, "expected: answers is [3, 16], its bags and"),
    ],
)
def test_expected_results_of_wrong_shape_are_rejected(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    ebc = twins()
    wrong = replace(expected_of(ebc), **change)
    assert message in publish_state(ebc, tmp_path, live.describe(ebc), expected=wrong)


@pytest.mark.parametrize("row", [-1, 40])
def test_expected_results_of_an_unknown_row_are_rejected(tmp_path: Path, row: int) -> None:
    ebc = twins()
    expected = expected_of(ebc)
    expected.bags.ids[-1] = row
    error = publish_state(ebc, tmp_path, live.describe(ebc), expected=expected)
    assert error == f"expected: feature 'b' asks for row {row}, its table has 40 rows"


def test_features_in_another_order_are_accepted(tmp_path: Path) -> None:
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
def test_half_precision_model_is_compared_within_its_precision(
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


def test_live_module_is_compared_with_expected_results(tmp_path: Path) -> None:
    ebc = small_collection()
    publish(ebc, tmp_path, model="m", expected=expected_of(ebc))
    with torch.no_grad():
        ebc.embedding_bags["tag"].weight *= 2
    with pytest.raises(InvalidModelError, match="key 'tag' of table 'tag', pooling sum: the train"):
        publish(ebc, tmp_path, model="m", expected=expected_of(small_collection()))


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
def test_inputs_that_leave_pooling_unchecked_need_accept_unchecked(
    tmp_path: Path, lengths: list[list[int]], unchecked: list[str]
) -> None:
    ebc = twins()
    given = expected_results_of(ebc, lengths)
    tables = described(ebc)
    error = publish_state(ebc, tmp_path, tables, expected=given)
    assert error.startswith(f"expected: {'; '.join(unchecked)}: use inputs that can tell")
    assert "--accept-unchecked" in error
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


def test_zero_rows_that_leave_pooling_unchecked_are_rejected(tmp_path: Path) -> None:
    ebc = twins()
    with torch.no_grad():
        ebc.embedding_bags["b"].weight[:3] = 0
    reason = "expected: feature 'b' has rows of which a sum is a mean, such as zeros: use inputs"
    given = expected_results_of(ebc, [[2, 1], [2, 1]])
    for pooling in ("sum", "mean"):
        tables = described(ebc, b={"pooling": pooling})
        assert publish_state(ebc, tmp_path, tables, expected=given).startswith(reason)
    given = expected_results_of(ebc, [[2, 1], [2, 3]])
    assert publish_state(ebc, tmp_path, live.describe(ebc), expected=given) == ""


def test_weights_of_one_that_leave_weighting_unchecked_are_rejected(
    make_ebc: MakeEbc, tmp_path: Path
) -> None:
    ebc = make_ebc(is_weighted=True, pooling="sum")
    options: dict[str, Any] = {"is_weighted": True}
    given = expected_results_of(ebc, [[2, 3]] * 4, 1.0)
    error = publish_state(ebc, tmp_path, live.describe(ebc), expected=given, **options)
    assert error.startswith("expected: the answers are the same without weights: use inputs")
    given = expected_results_of(ebc, [[2, 3]] * 4, 0.5)
    assert publish_state(ebc, tmp_path, live.describe(ebc), expected=given, **options) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_checksums_detect_changed_rows(tmp_path: Path, dtype: torch.dtype) -> None:
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


def test_checksums_of_other_tables_are_rejected(tmp_path: Path) -> None:
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
        error = publish_state(ebc, tmp_path, live.describe(ebc), expected=wrong)
        assert error == f"expected: {message}"
    with pytest.raises(InvalidModelError, match="rows is 'some', expected 'sampled' or 'all'"):
        expected_of(ebc, rows="some")  # type: ignore[arg-type]


def test_expected_of_leaves_nothing_unchecked(make_ebc: MakeEbc, tmp_path: Path) -> None:
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
