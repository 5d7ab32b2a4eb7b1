"""Tests of Arrow streams with false sizes or offsets: each is rejected with the reason, before data
is read at them."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from server.arrow_streams import columns_of, stream_of
from server.codec.crafted_arrow import (
    ARROW,
    LARGE_LIST_FIELDS,
    LIMITS,
    LIST_SCHEMA,
    STRING_SCHEMA,
    CraftedStream,
)

from embedserve.codec.arrow.flatbuffers import INT16, UINT8, Number
from embedserve.codec.arrow.stream import COMPRESSION, END, SCHEMA, message_of
from embedserve.errors import InvalidRequestError, RequestTooLargeError
from embedserve.request_checks import check_lengths


def test_unchanged_crafted_streams_are_read() -> None:
    for one in (CraftedStream(), CraftedStream(**LARGE_LIST_FIELDS)):
        read = ARROW.decode_request(one.stream())
        assert (read.ids.tolist(), read.lengths.tolist()) == ([1, 2, 3], [2, 1])


FALSE_CLAIMS = {
    "an offset past the values": (
        CraftedStream(offsets=(0, 2, 4)),
        "has 4 for offset 2: offsets rise",
    ),
    "a negative offset": (CraftedStream(offsets=(0, -1, 3)), "has -1 for offset 1"),
    "a negative first offset": (CraftedStream(offsets=(-1, 2, 3)), "has -1 for offset 0"),
    "offsets that fall": (CraftedStream(offsets=(0, 3, 2)), "has 2 for offset 2"),
    "offsets that wrap": (
        CraftedStream(offsets=(0, 2**31 - 1, -(2**31))),
        "has 2147483647 for offset 1",
    ),
    "large offsets that wrap": (
        CraftedStream(offsets=(0, 2**63 - 1, -(2**63)), **LARGE_LIST_FIELDS),
        "has 9223372036854775807 for offset 1",
    ),
    "values that are not there": (
        CraftedStream(offsets=(0, 2, 100), nodes=((2, 0), (100, 0))),
        "has a buffer of 24 bytes where its 2 bags need 800",
    ),
    "a buffer past the body": (
        CraftedStream(buffers=((0, 0), (0, 12), (16, 0), (16, 2**40))),
        "has a buffer of 1099511627776 bytes at 16, of 40 of its record batch",
    ),
    "a buffer before the body": (
        CraftedStream(buffers=((0, 0), (-8, 12), (16, 0), (16, 24))),
        "has a buffer of 12 bytes at -8",
    ),
    "a buffer at the end of all numbers": (
        CraftedStream(buffers=((0, 0), (2**63 - 1, 12), (16, 0), (16, 24))),
        "has a buffer of 12 bytes at 9223372036854775807",
    ),
    "a buffer of negative size": (
        CraftedStream(buffers=((0, 0), (16, -12), (16, 0), (16, 24))),
        "has a buffer of -12 bytes",
    ),
    "buffers that overlap": (
        CraftedStream(buffers=((0, 0), (0, 40), (16, 0), (16, 24))),
        "its buffers overlap: they have 64 bytes, of 40",
    ),
    "offsets that are too few": (
        CraftedStream(buffers=((0, 0), (0, 8), (16, 0), (16, 24))),
        "has a buffer of 8 bytes where its 2 bags need 12",
    ),
    "a negative number of rows": (CraftedStream(rows=-1), "it has -1 rows"),
    "more rows than the column": (CraftedStream(rows=3), "has 2 examples, its record batch 3"),
    "a node too many": (CraftedStream(nodes=((2, 0), (3, 0), (3, 0))), "3 nodes and 4 buffers"),
    "no nodes": (CraftedStream(nodes=(), buffers=()), "0 nodes and 0 buffers"),
    "a negative length": (CraftedStream(nodes=((2, 0), (-3, 0))), "a negative length"),
    "more nulls than bags": (CraftedStream(nodes=((2, 3), (3, 0))), "more nulls than values"),
    "nulls without a bitmap": (
        CraftedStream(nodes=((2, 1), (3, 0))),
        "has a buffer of 0 bytes where its 2 bags need 1",
    ),
    "a null id": (
        CraftedStream(nodes=((2, 0), (3, 1)), buffers=((0, 0), (0, 12), (12, 1), (16, 24))),
        "features.user[0][0] is null",
    ),
    "compressed buffers": (
        CraftedStream(more={COMPRESSION: {0: Number(UINT8, 1)}}),
        "a record batch that is compressed by ZSTD",
    ),
    "a body past the end": (
        CraftedStream(body_bytes=2**62),
        "it declares 4611686018427387904",
    ),
    "a body of negative size": (CraftedStream(body_bytes=-8), "it declares -8 more bytes"),
    "a body that is shorter": (
        CraftedStream(body_bytes=24),
        "has a buffer of 24 bytes at 16, of 24",
    ),
    "strings whose offsets are past the text": (
        CraftedStream(
            nodes=((2, 0), (3, 0)),
            schema=STRING_SCHEMA,
            buffers=((0, 0), (0, 12), (16, 0), (16, 16), (32, 8)),
            offsets=(0, 2, 3),
        ),
        "has strings whose offsets are negative, or fall",
    ),
}


@pytest.mark.parametrize("name", FALSE_CLAIMS)
def test_false_sizes_and_offsets_are_rejected(name: str) -> None:
    crafted, reason = FALSE_CLAIMS[name]
    for is_inline in (False, True):
        with pytest.raises(InvalidRequestError) as caught:
            ARROW.decode_request(crafted.stream(), "", LIMITS, is_inline=is_inline)
        assert reason in caught.value.message
        assert caught.value.field == "body" or caught.value.message.startswith(caught.value.field)
    assert sum(ARROW.estimate_size(crafted.stream())) <= 2 * len(crafted.stream())


def dictionaries() -> Any:
    return pa.table({"user": pa.array(["a", "b"]).dictionary_encode()})


def big_endian() -> bytes:
    return message_of(SCHEMA, {0: Number(INT16, 1)}, 0)


NESTED = pa.list_(pa.list_(pa.int64()))
INVALID_STREAMS = {
    "nothing": (b"", "does not begin with a schema", "body"),
    "the end alone": (END, "does not begin with a schema", "body"),
    "JSON": (b'{"features": {"user": [1]}}', "begins with 0x7b226665", "body"),
    "a file": (b"ARROW1\0\0" + LIST_SCHEMA, "it is a file (Feather)", "body"),
    "half a head": (LIST_SCHEMA[:6], "ends within the message at byte 0", "body"),
    "half a schema": (LIST_SCHEMA[:60], "overruns the 60 bytes", "body"),
    "a negative size": (b"\xff" * 4 + b"\xf0\xff\xff\xff", "overruns the 8 bytes", "body"),
    "zeros": (b"\xff" * 4 + b"\x08\0\0\0" + bytes(8), "cannot be read", "body"),
    "a schema alone": (LIST_SCHEMA, "features has no examples", "features"),
    "no rows": (stream_of(columns_of({"user": []})), "features has no examples", "features"),
    "two schemas": (LIST_SCHEMA + LIST_SCHEMA, "is another schema", "body"),
    "no columns": (stream_of(pa.table({})), "there are no columns", "features"),
    "bytes behind it": (CraftedStream().stream() + b"\0", "1 bytes follow its end", "body"),
    "a batch first": (CraftedStream(schema=b"").stream(), "does not begin with a schema", "body"),
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
    f"ids of type {reason}": (
        stream_of(pa.table({"user": pa.array(values, kind)})),
        f"features.user is of type {reason}: send lists of integers",
        "features.user",
    )
    for values, kind, reason in (
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


@pytest.mark.parametrize("name", INVALID_STREAMS)
def test_invalid_streams_are_rejected_with_field_and_reason(name: str) -> None:
    body, reason, at = INVALID_STREAMS[name]
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as caught:
            ARROW.decode_request(body, "", LIMITS)
        assert reason in caught.value.message
        assert caught.value.field == at


def test_compressed_streams_and_dictionaries_from_pyarrow_are_rejected() -> None:
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
        ARROW.decode_request(LIST_SCHEMA + whole[start:])


BAGS: dict[str, Any] = {"user": [[1, 2], None, [3]], "movie": [[], [4], [5, 6]]}
WEIGHTED = stream_of(columns_of(BAGS, {"user": [[0.5, 1.0], [], [2.0]]}), rows=2)
TAGGED = stream_of(pa.table({"tag": [["a", "bc"], [], ["d"]], "user": [1, None, 3]}))


@given(
    body=st.sampled_from([WEIGHTED, TAGGED, CraftedStream().stream()]),
    changes=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=4),
    end=st.floats(0.5, 1),
)
@example(WEIGHTED, [], 1.0)
def test_mutated_streams_are_rejected_or_read_as_pyarrow_reads_them(
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
    expected = read_by_pyarrow(sent)
    if expected is not None:
        lengths = read.lengths.reshape(len(read.features), -1)
        assert list(read.features) == list(expected)
        assert lengths.tolist() == [[len(bag) for bag in of] for of in expected.values()]
        if not read.string_features:
            flat = [one for of in expected.values() for bag in of for one in bag]
            assert read.ids.tolist() == flat


def read_by_pyarrow(body: bytes) -> dict[str, list[list[Any]]] | None:
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
