"""Tests of Arrow responses: Arrow's own library reads the same values, dtypes and metadata."""

import io
from collections.abc import Mapping

import numpy as np
import polars as pl
import pytest
from server.arrow_streams import metadata_in, read_table, vectors
from server.codecs import ARROW, encoded
from server.fake_engine import model_info
from server.fake_models import unpooled_info

from embedserve.codec.arrow.responses import INLINE_KEYS_MAX, INLINE_VECTORS_MAX
from embedserve.lookup_types import LookupResult, OutputOptions
from embedserve.model_info import ModelInfo

POOLED, UNPOOLED = model_info(), unpooled_info()
BY_KEY = OutputOptions(format_options="keys")
KEYS = {"user": slice(0, 4), "movie": slice(4, 7), "tag": slice(7, 9)}


def values_of(examples: int, dtype: str = "float32") -> np.ndarray:
    return np.arange(9 * examples, dtype=dtype).reshape(examples, 9)


def metadata_of(model: ModelInfo, **more: object) -> Mapping[str, object]:
    return {
        "model": model.name,
        "version": model.version,
        "keys": list(model.keys),
        "length_per_key": list(model.length_per_key),
        **more,
    }


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("examples", [1, 2, 3, 5])
@pytest.mark.parametrize("cut", [1, 9])
def test_values_column_has_the_vectors_of_all_keys(examples: int, dtype: str, cut: int) -> None:
    values = values_of(examples, dtype)
    for _ in range(2):  # the second time the cached prefix is used
        result = LookupResult(POOLED, values)
        if cut < examples:
            result = LookupResult(POOLED, values[:cut], extra_chunks=[values[cut:]])
        table = read_table(encoded(ARROW, result))
        assert table.column_names == ["values"]
        assert vectors(table["values"]).dtype == dtype
        assert np.array_equal(vectors(table["values"]), values)
        assert metadata_in(table) == metadata_of(POOLED)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("examples", [1, 2, 5])
def test_each_key_has_its_own_column_if_requested(examples: int, dtype: str) -> None:
    values = values_of(examples, dtype)
    result = LookupResult(POOLED, values, output=BY_KEY)
    halves = LookupResult(POOLED, values[:1], extra_chunks=[values[1:]], output=BY_KEY)
    for one in (result, result, halves):
        table = read_table(encoded(ARROW, one))
        assert table.column_names == list(KEYS)
        for key, columns in KEYS.items():
            assert np.array_equal(vectors(table[key]), values[:, columns])
        assert metadata_in(table) == metadata_of(POOLED)


def test_polars_reads_pooled_responses() -> None:
    values = values_of(3)
    whole = pl.read_ipc_stream(io.BytesIO(encoded(ARROW, LookupResult(POOLED, values))))
    assert np.array_equal(whole["values"].to_numpy(), values)
    by_key = pl.read_ipc_stream(
        io.BytesIO(encoded(ARROW, LookupResult(POOLED, values, output=BY_KEY)))
    )
    assert by_key["movie"].dtype == pl.Array(pl.Float32, 3)
    assert np.array_equal(by_key["movie"].to_numpy(), values[:, 4:7])


@pytest.mark.parametrize("output_options", [None, BY_KEY])
def test_selected_keys_and_unknown_ids_are_encoded(output_options: OutputOptions | None) -> None:
    part = POOLED.with_keys(("tag", "user"))
    values = values_of(2)[:, [0, 1, 2, 3, 7, 8]]
    result = LookupResult(part, np.ascontiguousarray(values), {"tag": 3}, output=output_options)
    table = read_table(encoded(ARROW, result))
    found = [vectors(column) for column in table.columns]
    assert np.array_equal(np.concatenate(found, axis=1), values)
    assert metadata_in(table) == metadata_of(part, unknown_ids={"tag": 3})
    again = read_table(
        encoded(ARROW, LookupResult(part, np.ascontiguousarray(values), output=output_options))
    )
    assert metadata_in(again) == metadata_of(part)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("output_options", [None, BY_KEY])
def test_unpooled_response_has_a_list_of_vectors_per_example(
    output_options: OutputOptions | None, dtype: str
) -> None:
    lengths = np.array([[2, 0, 1], [0, 0, 0], [1, 1, 1], [2, 0, 1]], np.int32)
    lengths = lengths[: len(UNPOOLED.keys)]
    values = np.arange(4 * lengths.sum(), dtype=dtype).reshape(-1, 4)
    result = LookupResult(UNPOOLED, values, None, lengths, output=output_options)
    table = read_table(encoded(ARROW, result))
    assert table.column_names == list(UNPOOLED.keys)
    ends = lengths.sum(axis=1).cumsum()
    for key, own, rows in zip(UNPOOLED.keys, lengths, np.split(values, ends[:-1]), strict=True):
        assert [len(one) for one in table[key].to_pylist()] == own.tolist()
        assert np.array_equal(vectors(table[key]), rows)
    assert metadata_in(table) == metadata_of(UNPOOLED)


def test_values_are_not_copied_and_large_by_key_results_are_not_inline() -> None:
    values = values_of(INLINE_VECTORS_MAX // 3 + 1)
    inline = ARROW.try_encode_inline(LookupResult(POOLED, values))
    assert inline is not None
    assert any(np.shares_memory(np.asarray(one), values) for one in inline[0])
    large = LookupResult(POOLED, values, output=BY_KEY)
    assert ARROW.try_encode_inline(large) is None
    table = read_table(b"".join(ARROW.encode(large)))
    assert np.array_equal(vectors(table["movie"]), values[:, 4:7])
    assert ARROW.try_encode_inline(LookupResult(POOLED, values[:-1], output=BY_KEY)) is not None
    few = model_info(features={f"f{at}": (2, 1) for at in range(INLINE_KEYS_MAX)})
    many = model_info(features={f"f{at}": (2, 1) for at in range(INLINE_KEYS_MAX + 1)})
    for model, is_inline in ((few, True), (many, False)):
        one = LookupResult(model, np.zeros((1, len(model.keys)), np.float32), output=BY_KEY)
        assert (ARROW.try_encode_inline(one) is not None) is is_inline
        assert read_table(encoded(ARROW, one)).column_names == list(model.keys)
