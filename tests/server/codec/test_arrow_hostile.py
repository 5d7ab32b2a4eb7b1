"""Tests of Arrow streams with false sizes or offsets: each is rejected with the reason, before data
is read at them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from server.arrow_streams import columns_of, stream_of

from embedserve.codec.arrow.flatbuffers import INT16, INT64, UINT8, Fields, Number
from embedserve.codec.arrow.requests import ArrowDecoder
from embedserve.codec.arrow.stream import (
    BUFFERS,
    COMPRESSION,
    END,
    NODES,
    RECORD_BATCH,
    ROWS,
    SCHEMA,
    message_of,
)
from embedserve.config import Limits
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.request_checks import check_lengths

ARROW = ArrowDecoder()
LIMITS = Limits(request_examples_max=100, request_ids_max=1000, request_features_max=20)
LISTS = pa.schema({"user": pa.list_(pa.int64())}).serialize().to_pybytes()
LARGE = pa.schema({"user": pa.large_list(pa.int64())}).serialize().to_pybytes()
TEXTS = pa.schema({"user": pa.list_(pa.string())}).serialize().to_pybytes()


@dataclass
class Crafted:
    """A stream of two bags, [1, 2] and [3], with some fields changed.

    Attributes:
        buffers: (offset in the body, bytes) of the list's bitmap and offsets, and of the values'
            bitmap and values.
    """

    rows: int = 2
    offsets: Sequence[int] = (0, 2, 3)
    nodes: Sequence[tuple[int, int]] = ((2, 0), (3, 0))
    buffers: Sequence[tuple[int, int]] = ((0, 0), (0, 12), (16, 0), (16, 24))
    schema: bytes = LISTS
    dtype: str = "<i4"
    more: Fields = field(default_factory=dict)
    body_bytes: int | None = None

    def stream(self) -> bytes:
        offsets = np.array(self.offsets, np.int64).astype(self.dtype).tobytes()
        body = offsets.ljust(16 if self.dtype == "<i4" else 24, b"\0")
        body += np.arange(1, 4).tobytes()
        header = {
            ROWS: Number(INT64, self.rows),
            NODES: np.array(self.nodes, np.int64).reshape(-1, 2),
            BUFFERS: np.array(self.buffers, np.int64).reshape(-1, 2),
            **self.more,
        }
        nbytes = len(body) if self.body_bytes is None else self.body_bytes
        return self.schema + message_of(RECORD_BATCH, header, nbytes) + body + END


IN_LARGE: dict[str, Any] = {
    "schema": LARGE,
    "dtype": "<i8",
    "buffers": ((0, 0), (0, 24), (24, 0), (24, 24)),
}


def test_what_is_not_changed_is_read() -> None:
    for one in (Crafted(), Crafted(**IN_LARGE)):
        read = ARROW.decode_request(one.stream())
        assert (read.ids.tolist(), read.lengths.tolist()) == ([1, 2, 3], [2, 1])


LIES = {
    "an offset past the values": (Crafted(offsets=(0, 2, 4)), "has 4 for offset 2: offsets rise"),
    "a negative offset": (Crafted(offsets=(0, -1, 3)), "has -1 for offset 1"),
    "a negative first offset": (Crafted(offsets=(-1, 2, 3)), "has -1 for offset 0"),
    "offsets that fall": (Crafted(offsets=(0, 3, 2)), "has 2 for offset 2"),
    "offsets that wrap": (
        Crafted(offsets=(0, 2**31 - 1, -(2**31))),
        "has 2147483647 for offset 1",
    ),
    "large offsets that wrap": (
        Crafted(offsets=(0, 2**63 - 1, -(2**63)), **IN_LARGE),
        "has 9223372036854775807 for offset 1",
    ),
    "values that are not there": (
        Crafted(offsets=(0, 2, 100), nodes=((2, 0), (100, 0))),
        "has a buffer of 24 bytes where its 2 bags need 800",
    ),
    "a buffer past the body": (
        Crafted(buffers=((0, 0), (0, 12), (16, 0), (16, 2**40))),
        "has a buffer of 1099511627776 bytes at 16, of 40 of its record batch",
    ),
    "a buffer before the body": (
        Crafted(buffers=((0, 0), (-8, 12), (16, 0), (16, 24))),
        "has a buffer of 12 bytes at -8",
    ),
    "a buffer at the end of all numbers": (
        Crafted(buffers=((0, 0), (2**63 - 1, 12), (16, 0), (16, 24))),
        "has a buffer of 12 bytes at 9223372036854775807",
    ),
    "a buffer of negative size": (
        Crafted(buffers=((0, 0), (16, -12), (16, 0), (16, 24))),
        "has a buffer of -12 bytes",
    ),
    "buffers that overlap": (
        Crafted(buffers=((0, 0), (0, 40), (16, 0), (16, 24))),
        "its buffers overlap: they have 64 bytes, of 40",
    ),
    "offsets that are too few": (
        Crafted(buffers=((0, 0), (0, 8), (16, 0), (16, 24))),
        "has a buffer of 8 bytes where its 2 bags need 12",
    ),
    "a negative number of rows": (Crafted(rows=-1), "it has -1 rows"),
    "more rows than the column": (Crafted(rows=3), "has 2 examples, its record batch 3"),
    "a node too many": (Crafted(nodes=((2, 0), (3, 0), (3, 0))), "3 nodes and 4 buffers"),
    "no nodes": (Crafted(nodes=(), buffers=()), "0 nodes and 0 buffers"),
    "a negative length": (Crafted(nodes=((2, 0), (-3, 0))), "a negative length"),
    "more nulls than bags": (Crafted(nodes=((2, 3), (3, 0))), "more nulls than values"),
    "nulls without a bitmap": (
        Crafted(nodes=((2, 1), (3, 0))),
        "has a buffer of 0 bytes where its 2 bags need 1",
    ),
    "a null id": (
        Crafted(nodes=((2, 0), (3, 1)), buffers=((0, 0), (0, 12), (12, 1), (16, 24))),
        "features.user[0][0] is null",
    ),
    "compressed buffers": (
        Crafted(more={COMPRESSION: {0: Number(UINT8, 1)}}),
        "a record batch that is compressed by ZSTD",
    ),
    "a body past the end": (
        Crafted(body_bytes=2**62),
        "it declares 4611686018427387904",
    ),
    "a body of negative size": (Crafted(body_bytes=-8), "it declares -8 more bytes"),
    "a body that is shorter": (Crafted(body_bytes=24), "has a buffer of 24 bytes at 16, of 24"),
    "strings whose offsets are past the text": (
        Crafted(
            nodes=((2, 0), (3, 0)),
            schema=TEXTS,
            buffers=((0, 0), (0, 12), (16, 0), (16, 16), (32, 8)),
            offsets=(0, 2, 3),
        ),
        "has strings whose offsets are negative, or fall",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_what_a_batch_says_is_not_believed(name: str) -> None:
    crafted, said = LIES[name]
    for decode in (ARROW.decode_request, ARROW.try_decode_inline):
        with pytest.raises(InvalidRequestError) as caught:
            decode(crafted.stream(), "", LIMITS)
        assert said in caught.value.message
        assert caught.value.field == "body" or caught.value.message.startswith(caught.value.field)
    assert sum(ARROW.estimate_size(crafted.stream())) <= 2 * len(crafted.stream())


def batches(count: int) -> bytes:
    return stream_of(columns_of({"user": [[1]] * count}), rows=1)


TOO_MUCH = {
    "examples that are declared": (Crafted(rows=2**62).stream(), "--request-examples-max"),
    "examples of several batches": (batches(101), "--request-examples-max"),
    "ids": (stream_of(columns_of({"user": [[1] * 1001]})), "--request-ids-max"),
    "lists of fixed size": (
        stream_of(columns_of({"user": [[1] * 501] * 2}, layout=lambda of: pa.list_(of, 501))),
        "--request-ids-max",
    ),
    "columns": (
        stream_of(columns_of({f"f{i}": [[1]] for i in range(21)})),
        "--request-features-max",
    ),
    "columns, and their weights": (
        stream_of(columns_of({f"f{i}": [[1]] for i in range(41)})),
        "--request-features-max",
    ),
    "keys": (
        stream_of(columns_of({"user": [[1]]}), options={"output_keys": json.dumps(["a"] * 21)}),
        "--request-features-max",
    ),
    "a name": (stream_of(columns_of({"x" * 1025: [[1]]})), "has a name of 1025 bytes"),
    "metadata": (
        stream_of(
            columns_of({"a": [[1]]}).replace_schema_metadata({str(at): "" for at in range(65)})
        ),
        "metadata has 65 entries",
    ),
    "metadata of ours": (
        stream_of(columns_of({"a": [[1]]}), options={"version": "1" * 65_537}),
        "has 65537 bytes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_more_than_the_limits_allow(name: str) -> None:
    body, said = TOO_MUCH[name]
    with pytest.raises(RequestTooLargeError) as caught:
        ARROW.decode_request(body, "", LIMITS)
    assert said in caught.value.message


def test_bags_that_take_no_bytes_are_counted() -> None:
    """Covers lists of zero values, and nulls: a few bytes can be very many bags."""
    lists = columns_of({f"f{i}": [[]] * 100 for i in range(20)}, layout=lambda of: pa.list_(of, 0))
    nulls = pa.table({f"f{i}": pa.nulls(100) for i in range(20)})
    for table in (lists, nulls):
        body = stream_of(table)
        assert ARROW.decode_request(body).lengths.size == 2000
        ids = 2000 - len(body) // 4
        with pytest.raises(RequestTooLargeError, match=r"2000 bags, .* the limit is 1999"):
            ARROW.decode_request(body, "", Limits(request_ids_max=ids - 1))
    ids = 2000 - len(stream_of(lists)) // 4
    assert ARROW.decode_request(stream_of(lists), "", Limits(request_ids_max=ids))


def test_strings_are_counted_before_they_are_read() -> None:
    body = stream_of(pa.table({"user": [["ab"] * 11]}))
    assert ARROW.decode_request(body).ids.size == 11
    for limits, said in (
        (Limits(request_values_max=10), "11 strings, the limit is 10"),
        (Limits(request_text_bytes_max=21), "22 bytes of strings, the limit is 21"),
    ):
        with pytest.raises(RequestTooLargeError, match=said):
            ARROW.decode_request(body, "", limits)


def test_very_many_batches_are_refused() -> None:
    of_one = columns_of({"user": [[1]]})
    body, start = stream_of(of_one), of_one.schema.serialize().size
    batch = body[start : -len(END)]
    assert ARROW.decode_request(body[:start] + 252 * batch).batch_size == 252
    with pytest.raises(RequestTooLargeError, match=r"has 253 record batches .* limit is 252"):
        ARROW.decode_request(body[:start] + 1000 * batch)


def dictionaries() -> Any:
    return pa.table({"user": pa.array(["a", "b"]).dictionary_encode()})


def big_endian() -> bytes:
    return message_of(SCHEMA, {0: Number(INT16, 1)}, 0)


NESTED = pa.list_(pa.list_(pa.int64()))
STREAMS = {
    "nothing": (b"", "does not begin with a schema", "body"),
    "the end alone": (END, "does not begin with a schema", "body"),
    "JSON": (b'{"features": {"user": [1]}}', "begins with 0x7b226665", "body"),
    "a file": (b"ARROW1\0\0" + LISTS, "it is a file (Feather)", "body"),
    "half a head": (LISTS[:6], "ends within the message at byte 0", "body"),
    "half a schema": (LISTS[:60], "overruns the 60 bytes", "body"),
    "a negative size": (b"\xff" * 4 + b"\xf0\xff\xff\xff", "overruns the 8 bytes", "body"),
    "zeros": (b"\xff" * 4 + b"\x08\0\0\0" + bytes(8), "cannot be read", "body"),
    "a schema alone": (LISTS, "features has no examples", "features"),
    "no rows": (stream_of(columns_of({"user": []})), "features has no examples", "features"),
    "two schemas": (LISTS + LISTS, "is another schema", "body"),
    "no columns": (stream_of(pa.table({})), "there are no columns", "features"),
    "bytes behind it": (Crafted().stream() + b"\0", "1 bytes follow its end", "body"),
    "a batch first": (Crafted(schema=b"").stream(), "does not begin with a schema", "body"),
    "big-endian": (big_endian(), "big-endian", "body"),
    "a dictionary": (stream_of(dictionaries()), "is of type dictionary", "features.user"),
    "one name twice": (
        stream_of(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["user", "user"])),
        "is two columns of one name",
        "features.user",
    ),
    "numbers that are no ids": (
        stream_of(columns_of({"user": [[1.5]]}, ids=pa.float64())),
        "is of type float64: ids are integers or strings",
        "features.user",
    ),
    "weights of nothing": (
        stream_of(columns_of({"user": [[1]]}, {"movie": [[1.0]]})),
        "there is no column 'movie' that it weighs",
        "features.movie.weights",
    ),
    "weights of weights": (
        stream_of(columns_of({"user": [[1]]}, {"user": [[1.0]], "user.weights": [[1.0]]})),
        "has no column 'user.weights' of ids beside it",
        "weights.user.weights",
    ),
    "weights that are integers": (
        stream_of(columns_of({"user": [[1]]}, {"user": [[1]]}, weight=pa.int32())),
        "are of type int32, expected floats",
        "weights.user",
    ),
    "too few weights": (
        stream_of(columns_of({"user": [[1], [2, 3]]}, {"user": [[1.0], [2.0]]})),
        "weights.user[1] has 1 weight for 2 ids",
        "weights.user[1]",
    ),
    "too few weights in the second batch": (
        stream_of(columns_of({"user": [[1], [2, 3]]}, {"user": [[1.0], [2.0]]}), rows=1),
        "weights.user[1] has 1 weight for 2 ids",
        "weights.user[1]",
    ),
    "no weight": (
        stream_of(columns_of({"user": [[1], [2, 3]]}, {"user": [[1.0], [2.0, None]]})),  # type: ignore[list-item]
        "weights.user[1][1] is null",
        "weights.user[1][1]",
    ),
    "an id that is too large": (
        stream_of(columns_of({"user": [[1], [2, 2**63]]}, ids=pa.uint64())),
        "features.user[1][1] is 9223372036854775808: ids are at most 2^63 - 1",
        "features.user[1][1]",
    ),
    "text that is none": (
        stream_of(pa.table({"user": pa.ListArray.from_arrays(
            [0, 1, 3], pa.array([b"a", b"b", b"\xff"]).view(pa.string()))})),
        "features.user[1][1] is not UTF-8",
        "features.user[1][1]",
    ),
    "metadata that is not known": (
        stream_of(columns_of({"user": [[1]]}), options={"dtype": "float16"}),
        "metadata 'embedserve.dtype' is none of embedserve.version",
        "embedserve.dtype",
    ),
    "another dtype": (
        stream_of(columns_of({"user": [[1]]}), options={"output_dtype": "int8"}),
        "embedserve.output_dtype is 'int8', expected 'float32' or 'float16'",
        "embedserve.output_dtype",
    ),
    "keys that are no list": (
        stream_of(columns_of({"user": [[1]]}), options={"output_keys": "user"}),
        "embedserve.output_keys is 'user', expected a JSON list of keys",
        "embedserve.output_keys",
    ),
} | {
    f"ids of type {said}": (
        stream_of(pa.table({"user": pa.array(values, kind)})),
        f"features.user is of type {said}: send lists of integers",
        "features.user",
    )
    for values, kind, said in (
        ([[[1]]], NESTED, "list"),
        ([True], pa.bool_(), "bool"),
        ([1], pa.timestamp("s"), "timestamp"),
        ([b"a"], pa.binary(), "binary"),
        ([{"a": 1}], pa.struct({"a": pa.int64()}), "struct"),
        ([[("a", 1)]], pa.map_(pa.string(), pa.int64()), "map"),
        ([[1]], pa.list_view(pa.int64()), "list_view"),
        ([["a"]], pa.list_(pa.string_view()), "utf8_view"),
    )
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_what_is_no_request_is_refused_by_name(name: str) -> None:
    body, said, at = STREAMS[name]
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as caught:
            ARROW.decode_request(body, "", LIMITS)
        assert said in caught.value.message
        assert caught.value.field == at


def test_compressed_streams_and_dictionaries_of_the_library() -> None:
    table = columns_of({"user": [[1] * 100]})
    for codec in ("lz4", "zstd"):
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            writer.write_table(table)
        with pytest.raises(InvalidRequestError, match=f"compressed by {codec.upper()}"):
            ARROW.decode_request(sink.getvalue().to_pybytes())
    whole = stream_of(dictionaries())
    start = dictionaries().schema.serialize().size
    with pytest.raises(InvalidRequestError, match=r"is a dictionary batch, expected"):
        ARROW.decode_request(LISTS + whole[start:])


BAGS: dict[str, Any] = {"user": [[1, 2], None, [3]], "movie": [[], [4], [5, 6]]}
WEIGHTED = stream_of(columns_of(BAGS, {"user": [[0.5, 1.0], [], [2.0]]}), rows=2)
TAGGED = stream_of(pa.table({"tag": [["a", "bc"], [], ["d"]], "user": [1, None, 3]}))


@given(
    body=st.sampled_from([WEIGHTED, TAGGED, Crafted().stream()]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    end=st.floats(0.5, 1),
)
@example(WEIGHTED, [], 1.0)
def test_changed_bytes_are_refused_or_read_as_arrow_reads_them(
    body: bytes, changes: list[tuple[float, int]], end: float
) -> None:
    changed = bytearray(body)
    for at, octet in changes:
        changed[int(at * (len(body) - 1))] = octet
    if end < 0.9:
        del changed[int(end * len(body)) :]
    sent = bytes(changed)
    bags, ids = ARROW.estimate_size(sent)
    assert 0 <= bags <= len(sent)
    assert 0 <= ids <= len(sent)
    try:
        read = ARROW.decode_request(sent, "", LIMITS)
    except (InvalidRequestError, RequestTooLargeError):
        return
    check_lengths(read.lengths, read.ids.size)
    assert read.lengths.size == len(read.features) * read.batch_size
    expected = by_arrow(sent)
    if expected is not None:
        lengths = read.lengths.reshape(len(read.features), -1)
        assert list(read.features) == list(expected)
        assert lengths.tolist() == [[len(bag) for bag in of] for of in expected.values()]
        if not read.string_features:
            flat = [one for of in expected.values() for bag in of for one in bag]
            assert read.ids.tolist() == flat


def by_arrow(body: bytes) -> dict[str, list[list[Any]]] | None:
    """Returns the bags that Arrow's library reads; None if it rejects the stream."""
    try:
        table = pa.ipc.open_stream(body).read_all()
        table.validate(full=True)
        columns = table.to_pydict()
    except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError):
        return None
    names = [name for name in columns if name.removesuffix(".weights") not in columns
             or not name.endswith(".weights")]  # fmt: skip
    return {name: [as_bag(one) for one in columns[name]] for name in names}


def as_bag(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
