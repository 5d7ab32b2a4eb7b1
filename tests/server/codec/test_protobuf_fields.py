"""Tests of finding fields by their bytes, against the protobuf library's reading of the message."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from embedserve.codec.protobuf_fields import (
    I32,
    LENGTH_DELIMITED,
    VARINT,
    TooManyFieldsError,
    count_varints,
    extract_fields,
    fields,
    read_varints,
    tag_of,
)
from embedserve_proto import embedding_pb2 as pb

INT64 = st.integers(-(2**63), 2**63 - 1)
PACKED_IDS = tag_of(3, LENGTH_DELIMITED)


def packed_ids(ids: list[int]) -> bytes:
    """Returns the value of a packed field as the library writes it."""
    (_, _, start, end), *more = fields(pb.EmbedRequest(ids=ids).SerializeToString())
    assert not more
    return pb.EmbedRequest(ids=ids).SerializeToString()[start:end]


@given(st.lists(INT64 | st.integers(0, 300), min_size=1, max_size=50))
def test_varints_are_read_as_the_library_wrote_them(ids: list[int]) -> None:
    packed = packed_ids(ids)
    assert read_varints(packed).tolist() == ids
    assert count_varints(packed) == len(ids)


@given(st.lists(st.sampled_from([0, 1, 0x7F, 0x80, 0x81, 0xFF]), max_size=24).map(bytes))
def test_any_bytes_are_the_varints_that_the_library_reads_or_none(packed: bytes) -> None:
    message = bytes([PACKED_IDS, len(packed)]) + packed
    try:
        expected: list[int] | None = list(pb.EmbedRequest.FromString(message).ids)
    except DecodeError:
        expected = None
    try:
        got: list[int] | None = read_varints(packed).tolist()
    except ValueError:
        got = None
    assert got == expected


def test_no_bytes_are_no_numbers() -> None:
    empty = read_varints(b"")
    assert (empty.size, empty.dtype) == (0, np.dtype(np.int64))


@pytest.mark.parametrize(
    ("packed", "problem"),
    [
        (b"\x80", "end within one"),
        (b"\x01\xff\xff", "end within one"),
        (b"\xff" * 10 + b"\x01", "over 10 bytes"),
        (b"\x01" + b"\x80" * 10 + b"\x01\x05", "over 10 bytes"),
    ],
)
def test_what_are_no_varints_is_refused(packed: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_varints(packed)


def test_what_is_taken_out_is_given_by_name_and_in_order() -> None:
    first = pb.EmbedRequest(model="m", keys=["a"], ids=[1, 2], lengths=[2])
    lone = bytes([tag_of(3, VARINT), 7])
    last = pb.EmbedRequest(ids=[300], weights=[0.5], string_ids=["x"])
    body = first.SerializeToString() + lone + last.SerializeToString()
    names = {PACKED_IDS: "ids", tag_of(3, VARINT): "ids", tag_of(5, I32): "weights"}
    taken, rest = extract_fields(body, names, 100)
    assert read_varints(b"".join(taken["ids"])).tolist() == [1, 2, 7, 300]
    assert list(taken) == ["ids"]  # weights are packed here
    expected = pb.EmbedRequest(model="m", keys=["a"], lengths=[2], weights=[0.5], string_ids=["x"])
    assert pb.EmbedRequest.FromString(b"".join(rest)) == expected


def test_fields_are_counted_whether_taken_out_or_not() -> None:
    body = pb.EmbedRequest(keys=["a", "b"], ids=[1]).SerializeToString()
    extract_fields(body, {PACKED_IDS: "ids"}, 3)
    with pytest.raises(TooManyFieldsError):
        extract_fields(body, {PACKED_IDS: "ids"}, 2)


REQUESTS = st.builds(
    pb.EmbedRequest,
    model=st.text(max_size=200),
    keys=st.lists(st.text(max_size=3), max_size=4),
    ids=st.lists(INT64, max_size=30),
    weights=st.lists(st.floats(width=32), max_size=4),
    ids_bytes=st.binary(max_size=300),
    output_dtype=st.sampled_from([0, 1, 2**31 - 1]),
    string_ids=st.lists(st.text(max_size=3), max_size=4),
)


@given(REQUESTS)
def test_fields_cover_a_message_without_gaps(request: Any) -> None:
    body = request.SerializeToString()
    end_before = 0
    for _, position, start, end in fields(body):
        assert end_before == position < start <= end
        end_before = end
    assert end_before == len(body)


@given(REQUESTS, st.data())
def test_a_message_cut_short_is_read_to_its_end_or_refused(
    request: Any, data: st.DataObject
) -> None:
    body = request.SerializeToString()
    cut = body[: data.draw(st.integers(0, len(body)))]
    try:
        pb.EmbedRequest.FromString(cut)
    except DecodeError:
        with pytest.raises(ValueError, match="ends within a field"):
            list(fields(cut))
    else:
        list(fields(cut))


@pytest.mark.parametrize("wire_type", [4, 6, 7])
def test_groups_and_what_is_no_wire_type_are_refused(wire_type: int) -> None:
    with pytest.raises(ValueError, match=f"wire type {wire_type}"):
        list(fields(bytes([tag_of(3, wire_type), 0])))


def test_fields_in_a_group_are_unknown_and_count_as_others_do() -> None:
    """Checks that a message of one group is rejected as quickly as one of as many fields. Both are
    read on the event loop."""
    known, inside, count = tag_of(1, 0), b"\x08\x01", 100_000
    body = inside + b"\x0b" + inside * count + b"\x0c" + inside
    found = [tag for tag, *_ in fields(body)]
    assert len(found) == count + 4
    assert [at for at, tag in enumerate(found) if tag == known] == [0, count + 3]
    taken, rest = extract_fields(body, {known: "number"}, count + 4)
    assert [bytes(one) for one in taken["number"]] == [b"\x01", b"\x01"]
    assert b"".join(rest) == body[2:-2]
    with pytest.raises(TooManyFieldsError):
        extract_fields(body, {known: "number"}, count)


class Counted(bytes):
    """Counts the reads of single bytes."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        Counted.reads += 1
        return super().__getitem__(at)


def test_no_more_of_a_group_is_read_than_fields_may_be() -> None:
    body = Counted(b"\x0b" + b"\x08\x01" * 100_000 + b"\x0c")
    with pytest.raises(TooManyFieldsError):
        extract_fields(body, {}, 64)
    assert Counted.reads < 1000
