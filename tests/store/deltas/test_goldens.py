"""Tests of the goldens that a training job pushes: its own results, in the delta's manifest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from store.deltas.conftest import DIMS, line_of, rows
from store.one_table import publish_versions
from torchrec import KeyedJaggedTensor

from embedserve_store import (
    Bags,
    DeltaLine,
    DeltaWriter,
    IdRule,
    InvalidModelError,
    ModelStore,
    StoreError,
    TableSpec,
    compact_deltas,
    publish,
)
from embedserve_store.errors import GoldensError
from embedserve_store.format.changed_ids import ChangedIds
from embedserve_store.format.delta_goldens import EXAMPLES_MAX, DeltaGoldens
from embedserve_store.format.delta_manifest import DeltaManifest
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.row_layout import dequantize_rows
from embedserve_store.goldens.delta_parity import check_results
from embedserve_store.goldens.reference_pooling import pool_stored

FEATURES = ("user", "friend", "item", "tag")
BAGS = Bags(
    np.array([0, 1, 299, 7, 5, 0, 1, 1, 15]),
    np.array([[2, 1], [0, 1], [1, 2], [1, 1]], np.int32),
    None,
)


def pushed_goldens(store: Path, seq: int = 1) -> DeltaGoldens:
    goldens = line_of(store).manifest(seq)[0].goldens
    assert goldens is not None
    return goldens


def version_results(store: Path) -> NDArray[np.float32]:
    """Returns the results of the version for BAGS."""
    version = ModelStore(store).load("m", 1)
    return pool_stored(version.manifest, BAGS, BAGS.ids, version.tables)


def jagged(*keys: str) -> KeyedJaggedTensor:
    """Returns BAGS as a KeyedJaggedTensor, in the order of ``keys``."""
    bags = [BAGS.of(FEATURES.index(key)) for key in keys]
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.from_numpy(np.concatenate([one.ids for one in bags])),
        lengths=torch.from_numpy(np.concatenate([one.lengths[0] for one in bags])),
    )


def test_version_has_the_features_used_by_these_tests(store: Path) -> None:
    assert ModelStore(store).manifest("m").features == FEATURES


@pytest.mark.parametrize("bags", [BAGS, jagged(*FEATURES), jagged("tag", "item", "friend", "user")])
def test_bags_may_be_a_keyed_jagged_tensor(store: Path, writer: DeltaWriter, bags: Any) -> None:
    answers = version_results(store)
    writer.push_rows({}, goldens=(bags, torch.from_numpy(answers)))
    goldens = pushed_goldens(store)
    np.testing.assert_array_equal(goldens.numbers, BAGS.ids)
    np.testing.assert_array_equal(goldens.lengths, BAGS.lengths)
    np.testing.assert_array_equal(goldens.answers, answers)
    assert (goldens.weights, goldens.dtype) == (None, "float32")


def test_weights_of_a_keyed_jagged_tensor_are_kept(tmp_path: Path) -> None:
    publish_versions(tmp_path, is_weighted=True)
    weights = torch.tensor([0.5, 2.0])
    bags = KeyedJaggedTensor(["t"], torch.tensor([3, 1]), weights, torch.tensor([2]))
    with DeltaWriter(tmp_path, model="m") as writer:
        writer.push_rows({}, goldens=(bags, np.full((1, 4), 2.5, np.float32)))
    np.testing.assert_array_equal(pushed_goldens(tmp_path).weights, weights)
    assert compact_deltas(tmp_path, "m").version == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_of_a_smaller_dtype_are_compared_in_that_dtype(
    store: Path, writer: DeltaWriter, dtype: torch.dtype
) -> None:
    writer.push_rows({}, goldens=(BAGS, torch.from_numpy(version_results(store)).to(dtype)))
    assert f"torch.{pushed_goldens(store).dtype}" == str(dtype)
    assert compact_deltas(store, "m").version == 2


@pytest.mark.parametrize(
    ("bags", "answers", "reason"),
    [
        ({"user": [[1]]}, None, "goldens are a dict, expected Bags or a KeyedJaggedTensor"),
        (jagged("user", "item"), None, "goldens have no feature 'friend'"),
        (Bags(BAGS.ids, BAGS.lengths[:3], None), None, r"expected \[n\] and \[4 features, exam"),
        (Bags(BAGS.ids[1:], BAGS.lengths, None), None, "lengths do not add up to 8 ids"),
        (Bags(BAGS.ids + 1, BAGS.lengths, None), None, r"numbers\[2\] is 300, feature 'user'"),
        (Bags(BAGS.ids, BAGS.lengths, np.ones(9, np.float32)), None, "takes no weights"),
        (BAGS, np.zeros((2, 3), np.float32), r"answers is \[2, 3\], the version means \[2, "),
        (BAGS, np.zeros((2, 3)), "answers are float64, expected float32, float16, bfloat16"),
        (BAGS, np.nan, "answers has a value that is not finite"),
    ],
)
def test_invalid_goldens_are_rejected(
    store: Path, writer: DeltaWriter, bags: Any, answers: Any, reason: str
) -> None:
    pushed_answers = version_results(store) if answers is None else answers
    if answers is np.nan:
        pushed_answers = version_results(store) * np.float32("nan")
    with pytest.raises(InvalidModelError, match=reason):
        writer.push_rows({"tag": ([1], rows("tag", 1))}, goldens=(bags, pushed_answers))
    assert line_of(store).seqs() == []
    assert writer.push_rows({}) == 1


def test_goldens_over_the_limits_are_rejected_with_their_counts(
    store: Path, writer: DeltaWriter
) -> None:
    examples = EXAMPLES_MAX + 1
    bags = Bags(np.zeros(0, np.int64), np.zeros((4, examples), np.int32), None)
    width = sum(ModelStore(store).manifest("m").length_per_key)
    with pytest.raises(InvalidModelError, match=rf"{examples} examples, 0 ids and .*, the limits"):
        writer.push_rows({}, goldens=(bags, np.zeros((examples, width), np.float32)))


def test_vocabulary_ids_of_goldens_become_row_numbers(tmp_path: Path) -> None:
    weights = {f"ebc.embedding_bags.{table}.weight": torch.zeros(4, 4) for table in "st"}
    tables = [
        TableSpec("s", 4, 4, ("rows",), "sum", "float32"),
        TableSpec("t", 4, 4, ("f",), "sum", "float32", ids=IdRule("map")),
    ]
    vocabularies = {"t": [100, 200, 300, 400]}
    publish(weights, tmp_path, model="m", tables=tables, vocabularies=vocabularies)
    values = np.ones((2, 4), np.float32)
    with DeltaWriter(tmp_path, model="m") as writer:
        bags = Bags(np.array([2, 400, 200, 100]), np.array([[1, 0], [2, 1]], np.int32), None)
        answers = np.array([[0] * 4 + [2] * 4, [0] * 8], np.float32)
        writer.push_rows({"t": ([200, 400], values)}, goldens=(bags, answers))
        assert pushed_goldens(tmp_path).numbers.tolist() == [2, 3, 1, 0]
        bags = Bags(np.array([7]), np.array([[0], [1]], np.int32), None)
        with pytest.raises(InvalidModelError, match="feature 'f': id 7 is not in the vocabulary"):
            writer.push_rows({}, goldens=(bags, answers[:1]))
    assert compact_deltas(tmp_path, "m").version == 2


def test_compaction_compares_rows_with_the_last_goldens(store: Path, writer: DeltaWriter) -> None:
    """The compacted version's own goldens are pooled from the new rows, so they cannot show that
    these rows are wrong."""
    answers = version_results(store)
    new = rows("tag", 1)
    table = ModelStore(store).load("m", 1).tables
    spec = table.tables["tag"]
    before = dequantize_rows(table.rows("tag")[[15]], spec.dtype, spec.embedding_dim)
    writer.push_rows({"tag": ([15], new)}, goldens=(BAGS, answers))  # the old results
    with pytest.raises(
        StoreError, match=r"delta 1 of line 1: goldens: 'tag' \(table 'tag'\), exam"
    ):
        compact_deltas(store, "m")
    assert ModelStore(store).versions("m") == [1]
    changed = answers.copy()
    changed[1, -2 * DIMS["tag"] : -DIMS["tag"]] += (new - before)[0]
    writer.push_rows({}, goldens=(BAGS, changed))
    made = ModelStore(store).load("m", compact_deltas(store, "m").version)
    goldens = made.goldens()
    np.testing.assert_array_equal(goldens.source_answers, goldens.stored_answers)
    with pytest.raises(StoreError, match="delta 1 of line 1: goldens: 'tag'"):
        compact_deltas(store, "m", version=1, seq=1)


def test_goldens_of_a_whole_line_are_not_kept_in_memory(
    store: Path, writer: DeltaWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each delta's goldens may have 4 MiB, and a line 100,000 deltas."""
    answers = version_results(store)
    for _ in range(3):
        writer.push_rows({}, goldens=(BAGS, answers))
    applied: list[DeltaManifest] = []

    def record_delta(line: DeltaLine, delta: DeltaManifest) -> dict[str, ChangedIds]:
        applied.append(delta)
        return {}

    monkeypatch.setattr(DeltaLine, "ids", record_delta)
    compact_deltas(store, "m")
    assert [(delta.seq, delta.goldens) for delta in applied] == [(1, None), (2, None), (3, None)]


def test_goldens_are_stored_in_the_manifest_of_their_delta(
    store: Path, writer: DeltaWriter
) -> None:
    writer.push_rows({}, goldens=(BAGS, version_results(store)))
    writer.push_rows({})
    line = line_of(store)
    assert [delta.goldens is None for delta, _ in line.deltas()] == [False, True]
    text = (store / "m/deltas/1" / f"{1:020d}.json").read_text()
    assert set(json.loads(text)["goldens"]) == {"numbers", "lengths", "answers", "dtype"}


@pytest.mark.parametrize(("pooling", "item"), [("sum", "example"), ("none", "row")])
def test_first_result_that_differs_is_named_by_its_position_in_the_key(
    pooling: str, item: str
) -> None:
    tables = tuple(TableSpec(name, 9, 4, (f"f{name}",), pooling, "float32") for name in "ab")
    manifest = Manifest("m", 1, tables, False)
    answers = np.ones((4, 4) if pooling == "none" else (2, 8), np.float32)
    lengths = np.ones((2, 2), np.int32)
    goldens = DeltaGoldens(np.zeros(4, np.int64), lengths, None, answers, "float32")
    bounds = np.full_like(answers, 0.5)
    results = answers + bounds
    check_results(results, goldens, bounds, manifest, "here")
    results[(3, 2) if pooling == "none" else (1, 6)] = np.nan
    message = rf"here: goldens: 'fb' \(table 'b'\), {item} 1, column 2: .*; 1 of 16 values differ"
    with pytest.raises(GoldensError, match=message):
        check_results(results, goldens, bounds, manifest, "here")
