"""Tests that Arrow columns in every layout are read like the EmbedRequest with the same bags."""

import io
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.arrow_streams import columns_of, message_of, stream_of
from server.fake_engine import Bags, Weights
from server.strategies import bags_of_ids, weights_or_none

from embedserve.codec.arrow.columns import SCHEMA_BYTES_MAX
from embedserve.codec.arrow.requests import ArrowDecoder
from embedserve.codec.protobuf_codec import ProtobufDecoder
from embedserve.codec.template_cache import BYTES_MAX, TEMPLATES_MAX
from embedserve.errors import InvalidRequestError
from embedserve.lookup_types import LookupRequest, WouldBlockError

ARROW = ArrowDecoder()
INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]


def assert_reads(body: bytes, bags: Bags, weights: Weights | None = None) -> LookupRequest:
    """Checks that ``body`` is read like a message of these bags and weights."""
    read = ARROW.decode_request(body)
    expected = ProtobufDecoder().decode_request(message_of(bags, weights).SerializeToString())
    assert (read.features, read.batch_size) == (expected.features, expected.batch_size)
    for name in ("ids", "lengths", "weights"):
        one, other = getattr(read, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype
            assert one.tolist() == other.tolist()
    assert read.string_features == expected.string_features
    return read


@given(
    data=st.data(),
    layout=st.sampled_from([pa.list_, pa.large_list]),
    ids=st.sampled_from(INTEGERS),
    rows=st.integers(1, 5),
)
def test_lists_are_read_from_one_or_several_batches(
    data: st.DataObject, layout: Any, ids: Any, rows: int
) -> None:
    bags = data.draw(bags_of_ids())
    weights = data.draw(weights_or_none(bags)) or {}
    weights = {name: one for name, one in weights.items() if data.draw(st.booleans())}
    for name in bags:
        if data.draw(st.booleans()):
            bags[name] = [[f"id {one}" for one in bag] for bag in bags[name]]
    table = columns_of(bags, weights, layout=layout, ids=ids)
    body = stream_of(table, rows=rows)
    read = assert_reads(body, bags, weights)
    inline = ARROW.decode_request(body, is_inline=True)
    assert inline.ids.tolist() == read.ids.tolist()
    assert ARROW.estimate_size(body) == (read.lengths.size, read.ids.size)


@given(data=st.data(), start=st.integers(0, 2))
def test_slices_and_null_bags_are_read(data: st.DataObject, start: int) -> None:
    """Checks that values outside a slice, and values behind a null bag, are ignored."""
    bags = data.draw(bags_of_ids())
    examples = len(next(iter(bags.values())))
    is_null = {name: data.draw(st.lists(st.booleans(), min_size=examples, max_size=examples))
               for name in bags}  # fmt: skip
    arrays = {}
    for name, of_feature in bags.items():
        padded = [[5, 6]] * start + of_feature + [[7]]
        whole = pa.array(padded, pa.list_(pa.int64()))
        mask = pa.array([True] * start + is_null[name] + [False])
        nulled = pa.ListArray.from_arrays(whole.offsets, whole.values, mask=mask)
        arrays[name] = nulled.slice(start, examples)
    left = {
        name: [[] if null else bag for bag, null in zip(of, is_null[name], strict=True)]
        for name, of in bags.items()
    }
    assert_reads(stream_of(pa.table(arrays)), left)


STRINGS: Bags = {"tag": [["drama", ""], [], ["映画"]], "user": [[1], [2, 3], []]}


@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_string_and_integer_columns_are_read_together(text: Any, rows: int) -> None:
    tags = pa.array([["x"], *STRINGS["tag"]], pa.list_(text)).slice(1)
    body = stream_of(pa.table({"tag": tags, "user": STRINGS["user"]}), rows=rows)
    read = assert_reads(body, STRINGS)
    assert read.strings is not None
    assert {read.strings[int(one)] for one in read.ids[:3]} == {"drama", "", "映画"}


@pytest.mark.parametrize(
    ("array", "bags"),
    [
        (pa.array([7, None, 9]), [[7], [], [9]]),
        (pa.array(["a", None, "b"]), [["a"], [], ["b"]]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [], [3, 4]]),
        (pa.array([[], [], []], pa.list_(pa.int32(), 0)), [[], [], []]),
        (pa.array([["a", None], None, ["b", "c"]], pa.list_(pa.string())), None),
        (pa.array([[], None, []]), [[], [], []]),
        (pa.nulls(3), [[], [], []]),
        (pa.array([[2**63 - 1], [0], []], pa.list_(pa.uint64())), [[2**63 - 1], [0], []]),
    ],
    ids=str,
)
def test_columns_of_various_layouts_are_read(array: Any, bags: list[list[Any]] | None) -> None:
    table = pa.table({"user": array, "movie": [[5], [], [6, 7]]})
    if bags is None:
        with pytest.raises(InvalidRequestError, match=r"features.user\[0\]\[1\] is null"):
            ARROW.decode_request(stream_of(table))
        return
    for rows in (1, 3):
        assert_reads(stream_of(table, rows=rows), {"user": bags, "movie": [[5], [], [6, 7]]})


@pytest.mark.parametrize("weight", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("layout", [pa.list_, pa.large_list, lambda of: pa.list_(of, 2)])
def test_weights_of_any_float_width_are_read(weight: Any, layout: Any) -> None:
    bags: Bags = {"movie": [[5, 6], [7, 8]], "user": [[1, 2], [3, 4]]}
    weights: Weights = {"user": [[0.5, -2.0], [1.5, 0.0]]}
    table = columns_of(bags, layout=layout)
    table = table.add_column(0, "user.weights", pa.array(weights["user"], layout(weight)))
    assert_reads(stream_of(table), bags, weights)


@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_weights_of_string_ids_are_read(value: float) -> None:
    bags: Bags = {"tag": [["drama", "x"], ["y"]]}
    weights: Weights = {"tag": [[0.5, value], [3.0]]}
    read = ARROW.decode_request(stream_of(columns_of(bags, weights)))
    assert read.weights is not None
    assert read.weights.tobytes() == np.array([0.5, value, 3.0], np.float32).tobytes()


def test_columns_from_pandas_and_polars_are_read() -> None:
    bags: Bags = {"user": [[1, 2], [], [3]], "movie": [[4], [5], [6]]}
    frame = pd.DataFrame(bags)
    frame["movie"] = [4, 5, 6]
    assert_reads(stream_of(pa.Table.from_pandas(frame)), bags)
    other = pl.DataFrame({"user": bags["user"], "movie": [4, 5, 6], "tag": [["a"], [], ["b"]]})
    sink = io.BytesIO()
    other.write_ipc_stream(sink, compat_level=pl.CompatLevel.oldest())
    assert_reads(sink.getvalue(), bags | {"tag": [["a"], [], ["b"]]})
    sink = io.BytesIO()
    other.write_ipc_stream(sink)
    with pytest.raises(InvalidRequestError, match=r"compat_level"):
        ARROW.decode_request(sink.getvalue())


def test_empty_record_batches_are_skipped() -> None:
    table = columns_of({"user": [[1], [2]]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        none = pa.RecordBatch.from_pydict({"user": []}, schema=table.schema)
        for one in (none, *table.to_batches(max_chunksize=1), none):
            writer.write_batch(one)
    assert_reads(sink.getvalue().to_pybytes(), {"user": [[1], [2]]})


def test_stream_without_end_marker_is_read() -> None:
    body = stream_of(columns_of({"user": [[1], [2]]}))
    assert body.endswith(b"\xff\xff\xff\xff\0\0\0\0")
    assert_reads(body[:-8], {"user": [[1], [2]]})


def test_response_options_are_read_from_schema_metadata() -> None:
    table = columns_of({"user": [[1]]})
    options = {"version": "3", "output_dtype": "float16", "output_keys": '["user", "tag"]'}
    read = ARROW.decode_request(stream_of(table, options=options), "shop")
    assert (read.model, read.output_dtype) == ("shop@3", "float16")
    assert read.output is not None
    assert read.output.keys == ("user", "tag")
    plain = ARROW.decode_request(stream_of(table.replace_schema_metadata({"pandas": "{"})))
    assert (plain.model, plain.output_dtype, plain.output) == ("", "float32", None)


def test_schema_cache_is_bounded() -> None:
    decoder = ArrowDecoder()
    cache = decoder.schemas
    first = stream_of(columns_of({"first": [[0]]}))
    for body in (first, *(stream_of(columns_of({f"f{i}": [[i]]})) for i in range(TEMPLATES_MAX))):
        decoder.decode_request(body)
        assert cache.read(body) is not None
        assert decoder.decode_request(body).ids.size == 1
    assert len(cache.templates) == TEMPLATES_MAX
    assert cache.read(first) is None
    for i in range(8):
        many = columns_of({f"{'x' * i}{at}": [[1]] for at in range(1000)})
        assert decoder.decode_request(stream_of(many)).ids.size == 1000
        assert 0 < cache.nbytes <= BYTES_MAX
    assert len(cache.templates) < 8
    large = columns_of({"user": [[1]]}).replace_schema_metadata({"x": "a" * SCHEMA_BYTES_MAX})
    before = list(cache.templates)
    assert decoder.decode_request(stream_of(large)).ids.size == 1
    assert cache.templates == before


def test_expensive_streams_are_not_decoded_inline() -> None:
    """Covers many columns, batches, bags, ids or strings. A cached schema no longer counts as many
    columns."""
    bags: Bags = {f"f{at}": [[1]] for at in range(200)}
    body = stream_of(columns_of(bags))
    with pytest.raises(WouldBlockError):
        ARROW.decode_request(body, is_inline=True)
    assert ARROW.estimate_size(body) == (0, 0)
    assert_reads(body, bags)
    assert ARROW.decode_request(body, is_inline=True).batch_size == 1
    assert ARROW.estimate_size(body) == (200, 200)
    weighed = pa.ListArray.from_arrays([0, 300_000], np.zeros(300_000, np.float32))
    for table, rows in (
        (columns_of({"user": [[1]] * 10}), 1),
        (pa.table({f"f{at}": pa.array(np.zeros(60_000, np.int8)) for at in range(2)}), None),
        (pa.table({"user": weighed.cast(pa.list_(pa.int8())), "user.weights": weighed}), None),
        (pa.table({"user": ["a"] * 3000}), None),
        (pa.table({"user": ["a" * 70_000]}), None),
        (columns_of({"user": [[1]]}).replace_schema_metadata({"x": "a" * 70_000}), None),
    ):
        body = stream_of(table, rows=rows)
        decoder = ArrowDecoder()
        with pytest.raises(WouldBlockError):
            decoder.decode_request(body, is_inline=True)
        assert decoder.decode_request(body).batch_size == table.num_rows
