"""Tests of goldens from the training model's results: their ids, examples and size."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store.conftest import MakeEbc
from store.publishing.expected_results import (
    described,
    expected_results_of,
    publish_state,
    state_of,
    twins,
)
from unpooled import unpooled_collection

from embedserve_store.errors import InvalidModelError
from embedserve_store.format.id_rule import IdRule
from embedserve_store.format.manifest import FROM_DESCRIPTION, FROM_TRAINING
from embedserve_store.goldens.expected import read_expected
from embedserve_store.local_store import LocalStore
from embedserve_store.publishing import expected_answers
from embedserve_store.publishing.expected_answers import GOLDEN_EXAMPLES_MAX
from embedserve_store.publishing.publish import publish
from embedserve_store.publishing.write_expected import expected_of, write_expected
from embedserve_store.sources import live


@pytest.mark.parametrize("is_weighted", [False, True])
def test_training_results_become_the_goldens(
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


def test_manifest_records_whether_goldens_come_from_training(
    make_ebc: MakeEbc, tmp_path: Path
) -> None:
    ebc = make_ebc()
    tables = described(ebc)
    published = publish(state_of(ebc), tmp_path, model="m", tables=tables)
    assert published.manifest.source["goldens"] == FROM_DESCRIPTION
    assert publish(ebc, tmp_path, model="m").manifest.source["goldens"] == FROM_TRAINING


def test_goldens_use_ids_of_callers(tmp_path: Path) -> None:
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


def test_expected_results_without_any_callers_id_are_rejected(tmp_path: Path) -> None:
    ebc = twins()
    error = publish_state(
        ebc,
        tmp_path,
        live.describe(ebc),
        vocabularies={"a": {"never": 38}, "b": {"never": 38}},
        ids={name: IdRule("map", id_type="string") for name in "ab"},
        expected=expected_results_of(ebc, [[2], [2]]),
    )
    assert error == "expected: each of its bags has a row that no id of a caller means"


def test_goldens_of_an_embedding_collection_come_from_training(tmp_path: Path) -> None:
    ec = unpooled_collection([("a", 20, ["x", "y"]), ("b", 20, ["y"])])
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


def test_goldens_are_limited_to_the_first_examples(tmp_path: Path) -> None:
    ebc = twins()
    expected = expected_results_of(ebc, [[2] * 20_000, [1, 2] * 10_000])
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
def test_goldens_stay_within_id_and_byte_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, examples: int
) -> None:
    """An example has 2 lengths and 16 values."""
    monkeypatch.setattr(expected_answers, limit, value)
    ebc = twins()
    expected = expected_results_of(ebc, [[2, 2, 2], [2, 2, 2]])
    assert publish_state(ebc, tmp_path, described(ebc), expected=expected) == ""
    goldens = LocalStore(tmp_path).load("m").goldens()
    assert goldens.bags.lengths.tolist() == [[2] * examples] * 2
    assert np.array_equal(goldens.source_answers, expected.answers[:examples])


def test_first_examples_without_ids_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expected_answers, "GOLDEN_IDS_MAX", 9)
    ebc = twins()
    expected = expected_results_of(ebc, [[0, 8, 2], [0, 2, 0]])
    error = publish_state(ebc, tmp_path, described(ebc), expected=expected)
    assert error.startswith("expected: its first 1 examples have no ids that callers have, and")


def test_embedding_collection_goldens_are_limited_per_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec = unpooled_collection([("a", 20, ["x", "y"]), ("b", 20, ["y"])])
    expected = expected_of(ec)
    x, y = expected.bags.lengths
    monkeypatch.setattr(expected_answers, "GOLDEN_IDS_MAX", x[0] + 2 * y[0])
    publish(ec, tmp_path, model="m", expected=expected)
    goldens = LocalStore(tmp_path).load("m").goldens()
    assert goldens.bags.lengths.tolist() == [[2, 0], [2, 0]]
    np.testing.assert_array_equal(goldens.source_answers, goldens.stored_answers)
    ids = expected.bags.ids
    assert np.array_equal(goldens.bags.ids, [*ids[:2], *ids[x.sum() : x.sum() + 2]])
