"""Tests of a delta's goldens: the written goldens are read back, and errors name what is wrong."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from embedserve_store.errors import StoreError
from embedserve_store.format.delta_goldens import (
    EXAMPLES_MAX,
    GOLDENS_BYTES_MAX,
    IDS_MAX,
    DeltaGoldens,
    parse_goldens,
)
from embedserve_store.format.delta_manifest import DeltaManifest, check_tables, parse_delta
from embedserve_store.format.manifest import Manifest
from embedserve_store.format.table_spec import TableSpec

SHA = "a" * 64
USER = TableSpec("user", 10, 4, ("user",), "sum", "float32", SHA)
ITEM = TableSpec("item", 5, 2, ("item", "seen"), "mean", "float32", SHA)
BASE = Manifest("m", 7, (USER, ITEM), False)
DELTA = DeltaManifest("m", 7, 5, SHA, "me", "0" * 16, 40, "2026-01-02T03:04:05.000006+00:00", ())


def goldens(base: Manifest = BASE, examples: int = 2) -> DeltaGoldens:
    """Returns goldens with one row number for each bag."""
    count = len(base.features) * examples
    numbers = np.arange(count) % 5
    lengths = np.ones((len(base.features), examples), np.int32)
    weights = np.linspace(-1, 2, count, dtype=np.float32) if base.is_weighted else None
    rows, columns = (count, 4) if not base.is_pooled else (examples, sum(base.length_per_key))
    answers = np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)
    return DeltaGoldens(numbers, lengths, weights, answers, "float16")


def parse(data: bytes) -> DeltaManifest:
    return parse_delta(data, "m", 7, 5, "here")


@pytest.mark.parametrize(
    "base",
    [
        BASE,
        replace(BASE, is_weighted=True),
        Manifest("m", 7, (replace(USER, pooling="none"),), False),
    ],
    ids=["plain", "weighted", "unpooled"],
)
def test_round_trip(base: Manifest) -> None:
    written = goldens(base)
    delta = parse(replace(DELTA, goldens=written, signature="0" * 128).to_bytes())
    assert delta.goldens is not None
    assert delta.goldens.dtype == "float16"
    assert delta.goldens.arrays.keys() == written.arrays.keys()
    for name, array in delta.goldens.arrays.items():
        np.testing.assert_array_equal(array, written.arrays[name])
    check_tables(delta, base, "here")
    assert delta.goldens.examples == 2
    assert parse(DELTA.to_bytes()).goldens is None


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: one.pop("numbers"), "goldens: numbers is None, expected dict"),
        (lambda one: one.update(answers=7), "goldens: answers is 7, expected dict"),
        (lambda one: one["lengths"].update(shape=[6]), r"lengths: shape is \[6\], expected 2"),
        (lambda one: one["lengths"].update(shape=[-3, -2]), "lengths: shape is"),
        (lambda one: one["lengths"].update(shape=[3, True]), "lengths: shape is"),
        (lambda one: one["lengths"].update(shape=[0, 1 << 62]), "lengths: shape is"),
        (lambda one: one["lengths"].update(shape=[3, 3]), r"data has 24 bytes, \[3, 3\] means 36"),
        (lambda one: one["numbers"].update(data="*" * 64), "data is not base64"),
        (lambda one: one["numbers"].update(data="\u0660" * 64), "data is not base64"),
        (lambda one: one["numbers"].update(data=None), "data is None, expected str"),
        (lambda one: one.update(dtype="float64"), "dtype is 'float64', expected one of float32"),
        (lambda one: one.update(dtype=["x" * 99]), "dtype is"),
    ],
)
def test_malformed_field_is_rejected(change: Callable[[dict[str, Any]], Any], reason: str) -> None:
    data = json.loads(json.dumps(goldens().to_json()))
    change(data)
    with pytest.raises(StoreError, match=rf"^here: goldens: .*{reason.removeprefix('goldens: ')}"):
        parse_goldens(data, "here")


@pytest.mark.parametrize("data", [None, [], "goldens", 7])
def test_goldens_that_are_not_an_object_are_rejected(data: object) -> None:
    with pytest.raises(StoreError, match=r"^here: goldens: expected a JSON object"):
        parse_goldens(data, "here")


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"numbers": np.array([0, 1, 2, 5, 0, 1])},
            r"numbers\[3\] is 5, feature 'item' has 5 rows",
        ),
        ({"numbers": np.array([0, -1, 2, 3, 0, 1])}, r"numbers\[1\] is -1, feature 'user'"),
        ({"numbers": np.arange(5)}, "lengths do not add up to the 5 numbers"),
        ({"lengths": np.array([[2, -1], [3, 0], [1, 1]], np.int32)}, "lengths do not add up"),
        ({"lengths": np.full((2, 3), 1, np.int32)}, r"lengths is \[2, 3\], the version means"),
        ({"lengths": np.zeros((3, 0), np.int32)}, "have no example"),
        ({"weights": zeros(6)}, "the model takes no weights"),
        ({"answers": zeros(2, 9)}, r"answers is \[2, 9\], the version means \[2, 8\]"),
        ({"answers": np.full((2, 8), np.nan, np.float32)}, "answers has a value that is not fin"),
        ({"answers": zeros(GOLDENS_BYTES_MAX, 8)}, f"the limits are {EXAMPLES_MAX}, {IDS_MAX} and"),
        ({"numbers": np.zeros(IDS_MAX + 1, np.int64)}, f"2 examples, {IDS_MAX + 1} ids and"),
        ({"lengths": np.ones((3, EXAMPLES_MAX + 1), np.int32)}, f"{EXAMPLES_MAX + 1} examples, 6"),
    ],
)
def test_goldens_that_do_not_fit_the_model_are_rejected(
    change: dict[str, Any], reason: str
) -> None:
    delta = replace(DELTA, goldens=replace(goldens(), **change))
    with pytest.raises(StoreError, match=f"^here: goldens: .*{reason}"):
        check_tables(delta, BASE, "here")


def test_goldens_of_a_weighted_model_need_valid_weights() -> None:
    weighted = replace(BASE, is_weighted=True)
    with pytest.raises(StoreError, match="the model needs weights"):
        goldens().check(weighted, "here")
    nan = replace(goldens(weighted), weights=np.full(6, np.nan, np.float32))
    with pytest.raises(StoreError, match="weights has a value that is not finite"):
        nan.check(weighted, "here")
    with pytest.raises(StoreError, match=r"weights is \[5\], the version means \[6\]"):
        replace(nan, weights=zeros(5)).check(weighted, "here")


def test_undo_with_goldens_is_rejected() -> None:
    undo = replace(DELTA, reverts_to=3, goldens=goldens())
    with pytest.raises(StoreError, match="reverts to delta 3, and has goldens"):
        parse(undo.to_bytes())
