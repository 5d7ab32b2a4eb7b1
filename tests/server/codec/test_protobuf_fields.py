"""Tests of finding fields by their bytes, against the protobuf library's reading of the message."""

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
def test_varints_written_by_protobuf_are_read(ids: list[int]) -> None:
    packed = packed_ids(ids)
    assert read_varints(packed).tolist() == ids
    assert count_varints(packed) == len(ids)


@given(st.lists(st.sampled_from([0, 1, 0x7F, 0x80, 0x81, 0xFF]), max_size=24).map(bytes))
def test_random_varints_are_read_or_rejected_like_by_protobuf(packed: bytes) -> None:
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


def test_empty_input_yields_no_varints() -> None:
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
def test_invalid_varints_are_rejected(packed: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_varints(packed)


def test_extracted_fields_are_returned_by_name_in_order() -> None:
    first = pb.EmbedRequest(model="m", keys=["a"], ids=[1, 2], lengths=[2])
    lone = bytes([tag_of(3, VARINT), 7])
    last = pb.EmbedRequest(ids=[300], weights=[0.5], string_ids=["x"])
    body = first.SerializeToString() + lone + last.SerializeToString()
    names = {PACKED_IDS: "ids", tag_of(3, VARINT): "ids", tag_of(5, I32): "weights"}
    extracted, rest, count = extract_fields(body, names, 100)
    assert read_varints(b"".join(extracted["ids"])).tolist() == [1, 2, 7, 300]
    assert list(extracted) == ["ids"]  # weights are packed here
    assert count == len(list(fields(body)))
    expected = pb.EmbedRequest(model="m", keys=["a"], lengths=[2], weights=[0.5], string_ids=["x"])
    assert pb.EmbedRequest.FromString(b"".join(rest)) == expected


def test_extracted_and_other_fields_count_toward_the_limit() -> None:
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
def test_truncated_message_is_read_or_rejected_like_by_protobuf(
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
def test_unpaired_group_ends_and_unknown_wire_types_are_rejected(wire_type: int) -> None:
    with pytest.raises(ValueError, match=f"wire type {wire_type}"):
        list(fields(bytes([tag_of(3, wire_type), 0])))


def test_fields_in_a_group_are_unknown_and_count_toward_the_limit() -> None:
    """Checks that a message of one group is rejected as quickly as one of as many fields. Both are
    read on the event loop."""
    known, inside, count = tag_of(1, 0), b"\x08\x01", 100_000
    body = inside + b"\x0b" + inside * count + b"\x0c" + inside
    found = [tag for tag, *_ in fields(body)]
    assert len(found) == count + 4
    assert [at for at, tag in enumerate(found) if tag == known] == [0, count + 3]
    extracted, rest, _ = extract_fields(body, {known: "number"}, count + 4)
    assert [bytes(one) for one in extracted["number"]] == [b"\x01", b"\x01"]
    assert b"".join(rest) == body[2:-2]
    with pytest.raises(TooManyFieldsError):
        extract_fields(body, {known: "number"}, count)


class ReadCountingBytes(bytes):
    """Counts the reads of single bytes."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        ReadCountingBytes.reads += 1
        return super().__getitem__(at)


def test_group_is_read_no_further_than_the_field_limit() -> None:
    body = ReadCountingBytes(b"\x0b" + b"\x08\x01" * 100_000 + b"\x0c")
    with pytest.raises(TooManyFieldsError):
        extract_fields(body, {}, 64)
    assert ReadCountingBytes.reads < 1000
